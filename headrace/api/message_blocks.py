"""Anthropic's messages as chat's, and what a model says as Anthropic's content blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from headrace.api.schemas import (
    MAX_SALT,
    MAX_STOP_CHARS,
    MAX_STOP_IDS,
    MAX_STOPS,
    MAX_USER,
    Count,
    Int64,
)
from headrace.draws import Draws
from headrace.errors import InvalidRequest
from headrace.grammar.asked import StructuredOutputs
from headrace.text.parts import Arguments, Call, Part, Reasoning, Text

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


class Metadata(msgspec.Struct, frozen=True):
    """Who asks, by the caller's own name; for the usage log."""

    user_id: Annotated[str, Meta(max_length=MAX_USER)] | None = None


class Countable(Draws, frozen=True, kw_only=True):
    """Body of /v1/messages/count_tokens: what makes the prompt. How to draw changes no count."""

    HARMLESS: ClassVar = frozenset({
        "cache_control", "metadata", "service_tier", "user_profile_id", "workspace_id",
    })  # fmt: skip
    REFUSED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "container": (None,),
        "mcp_servers": (None, []),
        "context_management": (None,),
        "diagnostics": (None,),
        "inference_geo": (None,),
        "speed": (None, "standard"),
    }

    model: str | None = None
    messages: Annotated[list[Turn], Meta(min_length=1)]
    system: Blocks | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class Messages(Countable, frozen=True, kw_only=True):
    """Body of /v1/messages: Anthropic's fields, and ours that draw and place a request."""

    max_tokens: Count
    stop_sequences: (
        Annotated[
            list[Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]],
            Meta(max_length=MAX_STOPS),
        ]
        | None
    ) = None
    metadata: Metadata | None = None
    stream: bool | None = None
    stop_token_ids: Annotated[list[int], Meta(max_length=MAX_STOP_IDS)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    priority: Int64 | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MAX_SALT)] | None = None
    structured_outputs: StructuredOutputs | None = None


# Chat's name of a field -> Anthropic's.
NAMES = {"stop": "stop_sequences", "response_format": "output_config"}


def chat_fields(body: Countable) -> dict[str, Any]:
    """What a chat request needs of it, by chat's names. Raises InvalidRequest."""
    turns: list[dict[str, Any]] = []
    if body.system:
        turns.append({"role": "system", "content": _text(body.system, "system")})
    for position, turn in enumerate(body.messages):
        turns += _turns(turn, f"messages[{position}]")
    choice, config = body.tool_choice, body.output_config or OutputConfig()
    form = config.format and {
        "type": "json_schema",
        "json_schema": {"name": "output", "schema": config.format.schema},
    }
    kwargs = dict(body.chat_template_kwargs or {})
    if body.thinking is not None:
        kwargs.setdefault("enable_thinking", body.thinking.type != "disabled")
    return {
        "messages": turns,
        "tools": [_tool(tool, i) for i, tool in enumerate(body.tools)] if body.tools else None,
        "tool_choice": _choice(choice),
        "parallel_tool_calls": False if choice and choice.disable_parallel_tool_use else None,
        "response_format": form,
        "reasoning_effort": config.effort,
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
            texts.append(_string(block, "text", place))
        elif kind == "thinking" and turn.role == "assistant":
            thoughts.append(_string(block, "thinking", place))
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
        "name": _string(block, "name", place),
        "arguments": msgspec.json.encode(arguments).decode(),
    }
    return {"id": _string(block, "id", place), "type": "function", "function": function}


def _result(block: Mapping[str, Any], place: str) -> dict[str, Any]:
    content, failed = block.get("content"), block.get("is_error")
    text = "" if content is None else _text(content, f"{place}.content")
    if not isinstance(failed, bool | None):
        raise InvalidRequest(f"{place}.is_error: true or false", param="messages")
    if failed:
        text = f"Error: {text}"  # chat has no field for it; the model should know
    return {
        "role": "tool",
        "tool_call_id": _string(block, "tool_use_id", place),
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
        texts.append(_string(block, "text", f"{where}[{at}]"))
    return "\n".join(texts)


def _string(block: Mapping[str, Any], name: str, place: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"{place}.{name}: a string", param=place.partition("[")[0])
    return value


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


def blocks_of(parts: Iterable[Part]) -> list[dict[str, Any]]:
    """The content of an answer, from its `joined` parts."""
    out: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, Arguments):
            out[-1] |= _input(part.text)
        else:
            out.append(begun(part) | _filled(part))
    return out


def begun(part: Part) -> dict[str, Any]:
    """The block that a part begins, with nothing in it yet."""
    if isinstance(part, Text):
        return {"type": "text", "text": ""}
    if isinstance(part, Reasoning):
        return {"type": "thinking", "thinking": "", "signature": ""}
    assert isinstance(part, Call), "arguments begin no block"
    return {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}


def _filled(part: Part) -> dict[str, Any]:
    if isinstance(part, Text):
        return {"text": part.text}
    return {"thinking": part.text} if isinstance(part, Reasoning) else {}


def _input(arguments: str) -> dict[str, Any]:
    """The arguments of a call; those that were cut short beside it, as they are."""
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.MsgspecError, RecursionError):
        value = None
    return {"input": value} if isinstance(value, dict) else {"partial_json": arguments}
