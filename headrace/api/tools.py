"""What a body says of tools: which may be called, whether one must be, and how many at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from headrace.errors import InvalidRequest
from headrace.grammar.calls import MOST_CALLS, Offer
from headrace.text.tool_list import Tool, shown_tool


class Toolbox(msgspec.Struct, frozen=True):
    """The tools of one request. Where nothing may be called there is none."""

    shown: list[dict[str, Any]]  # all of `tools`, as templates take them
    offers: list[Offer]  # those that may be called
    must: bool  # the answer is calls and nothing else
    most: int  # calls in one answer
    single: bool  # parallel_tool_calls = false, or one named function

    @property
    def names(self) -> Mapping[str, Sequence[str]]:
        """Tool -> the names of its parameters."""
        pairs = [(offer.name, offer.parameters.get("properties")) for offer in self.offers]
        return {name: list(inner) if isinstance(inner, dict) else [] for name, inner in pairs}

    @property
    def bound(self) -> bool:
        """A grammar is needed though nothing must be called."""
        return self.single or any(offer.strict for offer in self.offers)


def toolbox(
    tools: Sequence[Tool] | None, choice: str | Mapping[str, Any] | None, parallel: bool | None
) -> Toolbox | None:
    """None if no tool may be called. Raises InvalidRequest naming tools or tool_choice."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice needs tools", param="tool_choice")
        return None
    offers = [_offer(tool, at) for at, tool in enumerate(tools)]
    names = [offer.name for offer in offers]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidRequest(f"tools holds {twice!r} twice", param="tools")
    mode, allowed, one = _chosen(choice)
    for name in allowed or ():
        if name not in names:
            raise InvalidRequest(f"tool_choice: there is no tool {name!r}", param="tool_choice")
    if mode == "none":
        return None
    single = one or parallel is False
    return Toolbox(
        shown=[shown_tool(tool) for tool in tools],
        offers=[offer for offer in offers if allowed is None or offer.name in allowed],
        must=mode == "required",
        most=1 if single else MOST_CALLS,
        single=single,
    )


def _offer(tool: Tool, at: int) -> Offer:
    if tool.type != "function":
        raise InvalidRequest(
            f"tools[{at}].type = {tool.type!r}: only functions are supported", param="tools"
        )
    function = tool.function
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    schema, param = function.parameters, f"tools[{at}].function.parameters"
    if schema is not None and schema.get("type", "object") != "object":
        raise InvalidRequest(f"{param}.type is not 'object'", param=param)
    parameters = nothing if schema is None else {"type": "object", **schema}
    return Offer(function.name, parameters, bool(function.strict), param)


class _Function(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class _Named(msgspec.Struct, forbid_unknown_fields=True):
    function: _Function
    type: Literal["function"] = "function"

    @property
    def name(self) -> str:
        return self.function.name


class _Allowed(msgspec.Struct, forbid_unknown_fields=True):
    tools: Annotated[list[_Named], Meta(min_length=1)]
    mode: Literal["auto", "required"] = "auto"


def _chosen(choice: str | Mapping[str, Any] | None) -> tuple[str, list[str] | None, bool]:
    """none, auto or required; the only names that count (None: all); whether it names the one."""
    if choice is None or isinstance(choice, str):
        if choice not in (None, "none", "auto", "required"):
            raise InvalidRequest(
                f"tool_choice = {choice!r:.50}: none, auto, required or a function",
                param="tool_choice",
            )
        return choice or "auto", None, False
    try:
        if choice.get("type") == "allowed_tools":
            allowed = msgspec.convert(choice.get("allowed_tools"), _Allowed)
            return allowed.mode, [tool.name for tool in allowed.tools], False
        return "required", [msgspec.convert(choice, _Named).name], True
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"tool_choice: {error}", param="tool_choice") from None
