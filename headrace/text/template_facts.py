"""What a chat template can do, found out once: from its variables and from a few renders."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

_SYSTEM, _USER = "headrace-probe-system", "headrace-probe-user"
Probe = Callable[[Sequence[Mapping[str, Any]]], str]  # renders messages, "" if refused


class TemplateFacts(msgspec.Struct, frozen=True):
    """names: the variables that the template reads and does not set itself."""

    names: frozenset[str] = frozenset()
    shows_system: bool = True  # else a system message is refused or left out
    wants_parts: bool = False  # content as a list of parts, not as text
    shows_calls: bool = False  # `tool_calls` of earlier turns

    @property
    def takes_tools(self) -> bool:
        """It reads a list of tools, and writes the calls of earlier turns."""
        return "tools" in self.names and self.shows_calls

    @property
    def takes_documents(self) -> bool:
        """It reads a list of documents."""
        return "documents" in self.names


def find_facts(source: str, names: frozenset[str], probe: Probe) -> TemplateFacts:
    """The facts of a template with this source."""
    user: dict[str, Any] = {"role": "user", "content": _USER}
    plain = _USER in probe([user])
    user["content"] = [{"type": "text", "text": _USER}]
    parts = not plain and _USER in probe([user])
    if not parts:
        user["content"] = _USER
    system: dict[str, Any] = {"role": "system", "content": _SYSTEM}
    if parts:
        system["content"] = [{"type": "text", "text": _SYSTEM}]
    return TemplateFacts(
        names=names,
        shows_system=_SYSTEM in probe([system, user]),
        wants_parts=parts,
        shows_calls="tool_calls" in source,
    )
