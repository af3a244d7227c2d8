"""What of a body of /v1/messages becomes its prompt, as chat's fields have it.

Here and not in `api`, for the gateway makes the same prompt of the same body.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Protocol

import msgspec
from msgspec import Meta

from headrace.errors import InvalidRequest
from headrace.foreign_json import string_of

Blocks = str | list[dict[str, Any]]


class Turn(msgspec.Struct, frozen=True):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: Blocks


class Thinking(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """enabled and adaptive ask the chat template for thinking, disabled against it. A budget is
    taken and not enforced: Anthropic calls it a target."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Meta(ge=1)] | None = None
    display: Literal["summarized"] | None = None  # it is shown whole


class Format(msgspec.Struct, frozen=True):
    """output_config.format."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The form of the answer, and how hard to think."""

    format: Format | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class ToolChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Messages(Protocol):
    """What of a body is read here."""

    @property
    def messages(self) -> Sequence[Turn]: ...
    @property
    def system(self) -> Blocks | None: ...
    @property
    def tools(self) -> Sequence[dict[str, Any]] | None: ...
    @property
    def tool_choice(self) -> ToolChoice | None: ...
    @property
    def thinking(self) -> Thinking | None: ...
    @property
    def output_config(self) -> OutputConfig | None: ...
    @property
    def chat_template_kwargs(self) -> Mapping[str, Any] | None: ...


def prompt_fields(body: Messages) -> dict[str, Any]:
    """By chat's names; None: not given. Raises InvalidRequest with Anthropic's names."""
    turns: list[dict[str, Any]] = []
    if body.system:
        turns.append({"role": "system", "content": _text(body.system, "system")})
    for position, turn in enumerate(body.messages):
        turns += _turns(turn, f"messages[{position}]")
    kwargs = dict(body.chat_template_kwargs or {})
    if body.thinking is not None:
        kwargs.setdefault("enable_thinking", body.thinking.type != "disabled")
    return {
        "messages": turns,
        "tools": [_tool(tool, i) for i, tool in enumerate(body.tools)] if body.tools else None,
        "tool_choice": _choice(body.tool_choice),
        "reasoning_effort": body.output_config.effort if body.output_config else None,
        "chat_template_kwargs": kwargs or None,
        # A last turn of the assistant's is the beginning of the answer.
        "continue_final_message": True if turns[-1]["role"] == "assistant" else None,
    }


def _turns(turn: Turn, where: str) -> list[dict[str, Any]]:
    """A turn as chat has it: results of tools are turns of their own, before the user's text."""
    if isinstance(turn.content, str) or turn.role == "system":
        return [{"role": turn.role, "content": _text(turn.content, f"{where}.content")}]
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for at, block in enumerate(turn.content):
        place, kind = f"{where}.content[{at}]", block.get("type")
        if kind == "text":
            texts.append(string_of(block, "text", place))
        elif kind == "thinking" and turn.role == "assistant":
            thoughts.append(string_of(block, "thinking", place))
        elif kind == "tool_use" and turn.role == "assistant":
            calls.append(_call(block, place))
        elif kind == "tool_result" and turn.role == "user":
            results.append(_result(block, place))
        else:
            raise InvalidRequest(
                f"{place}: a block of type {kind!r} is not taken from the {turn.role}",
                param="messages",
            )
    if turn.role == "user":
        text = [{"role": "user", "content": "\n".join(texts)}] if texts or not results else []
        return [*results, *text]
    made: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        made["reasoning_content"] = "\n".join(thoughts)
    if calls:
        made["tool_calls"] = calls
    return [made]


def _call(block: Mapping[str, Any], place: str) -> dict[str, Any]:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"{place}.input: an object", param="messages")
    function = {
        "name": string_of(block, "name", place),
        "arguments": msgspec.json.encode(arguments).decode(),
    }
    return {"id": string_of(block, "id", place), "type": "function", "function": function}


def _result(block: Mapping[str, Any], place: str) -> dict[str, Any]:
    content, failed = block.get("content"), block.get("is_error")
    text = "" if content is None else _text(content, f"{place}.content")
    if not isinstance(failed, bool | None):
        raise InvalidRequest(f"{place}.is_error: true or false", param="messages")
    if failed:
        text = f"Error: {text}"  # chat has no field for it; the model should know
    return {
        "role": "tool",
        "tool_call_id": string_of(block, "tool_use_id", place),
        "content": text,
    }


def _text(content: Any, where: str) -> str:
    """A string, or text blocks joined."""
    if isinstance(content, str):
        return content
    param = where.partition("[")[0]
    if not isinstance(content, list):
        raise InvalidRequest(f"{where}: a string or a list of text blocks", param=param)
    texts = []
    for at, block in enumerate(content):
        if not isinstance(block, dict) or block.get("type") != "text":
            raise InvalidRequest(f"{where}[{at}]: only text blocks are read here", param=param)
        texts.append(string_of(block, "text", f"{where}[{at}]"))
    return "\n".join(texts)


def _tool(tool: Mapping[str, Any], at: int) -> dict[str, Any]:
    if tool.get("type", "custom") not in ("custom", None):
        raise InvalidRequest(
            f"tools[{at}]: type {tool['type']!r} runs on Anthropic's servers, not here",
            param="tools",
        )
    function: dict[str, Any] = {
        "name": tool.get("name"),
        "parameters": tool.get("input_schema"),
    }
    for name in ("description", "strict"):
        if tool.get(name) is not None:
            function[name] = tool[name]
    return {"type": "function", "function": function}


def _choice(choice: ToolChoice | None) -> Any:
    if choice is None:
        return None
    if choice.type == "tool":
        if choice.name is None:
            raise InvalidRequest("tool_choice.name is required", param="tool_choice")
        return {"type": "function", "function": {"name": choice.name}}
    return {"auto": "auto", "any": "required", "none": "none"}[choice.type]
