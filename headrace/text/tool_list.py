"""The list of tools in a body, and how templates take it."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

MAX_TOOLS = 128  # OpenAI's limit
Name = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.\-]{1,64}\Z")]


class Function(msgspec.Struct, frozen=True):
    """A function as OpenAI describes it. No parameters: it takes none."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True):
    """One entry of `tools`."""

    function: Function
    type: str = "function"


Tools = Annotated[list[Tool], Meta(max_length=MAX_TOOLS)]


def shown_tool(tool: Tool) -> dict[str, Any]:
    """As a template takes it, whoever may call it."""
    function = tool.function
    shown: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        shown["description"] = function.description
    shown["parameters"] = function.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": shown}
