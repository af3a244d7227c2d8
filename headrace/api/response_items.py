"""Bodies of /v1/responses, and its items as chat's messages."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from headrace.api.schemas import MAX_LOGPROBS, MAX_SALT, MAX_STOP_IDS, MAX_USER, Count, Int64
from headrace.draws import Draws
from headrace.errors import InvalidRequest
from headrace.grammar.asked import StructuredOutputs

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"  # reasoning comes back as it is: nothing to encrypt
MAX_ITEMS = 4096
MAX_INCLUDES = 16

Metadata = Annotated[
    dict[
        Annotated[str, Meta(max_length=64)],
        Annotated[str, Meta(max_length=512)],
    ],
    Meta(max_length=16),
]


class TextFormat(msgspec.Struct, frozen=True):
    """text.format: response_format with its members side by side."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema: dict[str, Any] | bool | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The form of the answer."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How hard to think. Reasoning is shown whole, so `auto` is no summary."""

    effort: str | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None  # the same, by its older name
    context: Literal["auto", "all_turns"] | None = None  # the template decides what it shows
    mode: Literal["standard"] | None = None


class Stream(msgspec.Struct, frozen=True):
    """stream_options: only what asks for padding, and we never pad."""

    include_obfuscation: bool | None = None


class Responses(Draws, frozen=True, kw_only=True):
    """Body of /v1/responses."""

    HARMLESS: ClassVar = frozenset({
        "safety_identifier", "service_tier", "prompt_cache_key", "prompt_cache_retention",
        "prompt_cache_options",
        "max_tool_calls",  # of tools that a server runs; ours runs none
    })  # fmt: skip
    REFUSED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "access_programs": (None,),
        "background": (None, False),
        "background_options": (None,),
        "context_management": (None, []),
        "conversation": (None,),
        "image": (None,),
        "moderation": (None,),
        "prompt": (None,),
        "truncation": (None, "disabled"),
    }

    model: str | None = None
    input: str | Annotated[list[dict[str, Any]], Meta(max_length=MAX_ITEMS)] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: Stream | None = None
    max_output_tokens: Count | None = None
    include: Annotated[list[str], Meta(max_length=MAX_INCLUDES)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    metadata: Metadata | None = None
    user: Annotated[str, Meta(max_length=MAX_USER)] | None = None  # for the usage log
    stop_token_ids: Annotated[list[int], Meta(max_length=MAX_STOP_IDS)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    priority: Int64 | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MAX_SALT)] | None = None
    structured_outputs: StructuredOutputs | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def logprobs(self) -> bool:
        """Log-probabilities of the answer's text are asked for."""
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)


# Chat's name of a field -> the one of responses.
NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text",
    "verbosity": "text",
    "reasoning_effort": "reasoning",
}


def chat_fields(body: Responses, items: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What a chat request needs, by chat's names; `items`: the conversation, oldest first.

    Raises InvalidRequest.
    """
    for name in body.include or ():
        if name not in (LOGPROBS, ENCRYPTED):
            raise InvalidRequest(
                f"include: {name!r} is nothing that is known here", param="include"
            )
    turns = [{"role": "system", "content": body.instructions}] if body.instructions else []
    turns += turns_of(items)
    text = body.text or TextConfig()
    return {
        "messages": turns,
        "max_completion_tokens": body.max_output_tokens,
        "response_format": _format(text.format),
        "verbosity": None if text.verbosity == "medium" else text.verbosity,
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
        "tools": [_tool(tool, i) for i, tool in enumerate(body.tools)] if body.tools else None,
        "tool_choice": _choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "logprobs": True if body.logprobs else None,
        "top_logprobs": body.top_logprobs or None,
        "user": body.user,
    }


def input_items(given: str | list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """`input` as items with ids, as they are stored and listed."""
    if given is None:
        return []
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    out = []
    for item in given:
        kind = item.get("type") or "message"
        content = item.get("content")
        if kind == "message" and isinstance(content, str):
            said = "output_text" if item.get("role") == "assistant" else "input_text"
            item = {**item, "content": [{"type": said, "text": content}]}
        prefix = {"message": "msg", "function_call": "fc", "reasoning": "rs"}.get(kind, "item")
        name = item.get("id")
        name = name if isinstance(name, str) and name else f"{prefix}_{secrets.token_hex(12)}"
        out.append({**item, "type": kind, "id": name})
    return out


def turns_of(items: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Items as chat's messages: what the model thought, said and called is one turn."""
    turns: list[dict[str, Any]] = []
    for at, item in enumerate(items):
        where, kind = f"input[{at}]", item.get("type") or "message"
        if kind == "message":
            _message(turns, item, where)
        elif kind == "function_call":
            function = {name: _string(item, name, where) for name in ("name", "arguments")}
            call = {"id": _string(item, "call_id", where), "type": "function", "function": function}
            _assistant(turns).setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            turns.append({
                "role": "tool",
                "tool_call_id": _string(item, "call_id", where),
                "content": _text(item.get("output"), f"{where}.output"),
            })  # fmt: skip
        elif kind == "reasoning":
            content = item.get("content")
            text = "" if content is None else _text(content, f"{where}.content")
            turn = _assistant(turns, fresh="content")
            turn["reasoning_content"] = turn.get("reasoning_content", "") + text
        else:
            raise InvalidRequest(f"{where}: items of type {kind!r} are not taken", param="input")
    for turn in turns:
        turn.setdefault("content", "")
    return turns


def _message(turns: list[dict[str, Any]], item: Mapping[str, Any], where: str) -> None:
    role, text = _string(item, "role", where), _text(item.get("content"), f"{where}.content")
    if role == "assistant":
        _assistant(turns, fresh="content")["content"] = text
    else:
        turns.append({"role": role, "content": text})


def _assistant(turns: list[dict[str, Any]], fresh: str = "") -> dict[str, Any]:
    """The turn of the assistant that is being written; a new one if it has a `fresh` already, or
    has called."""
    last = turns[-1] if turns else {}
    if last.get("role") != "assistant" or (fresh and (fresh in last or "tool_calls" in last)):
        turns.append({"role": "assistant"})
    return turns[-1]


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{where}: a string or a list of parts", param="input")
    texts = []
    for at, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("input_text", "output_text", "text", "reasoning_text", "refusal"):
            raise InvalidRequest(f"{where}[{at}]: parts of type {kind!r} are not taken: this model "
                                 "reads text", param="input")  # fmt: skip
        texts.append(_string(part, "refusal" if kind == "refusal" else "text", f"{where}[{at}]"))
    return "\n".join(texts)


def _string(item: Mapping[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"{where}.{name}: a string", param=where.partition("[")[0])
    return value


def _format(asked: TextFormat | None) -> dict[str, Any] | None:
    if asked is None or asked.type != "json_schema":
        return None if asked is None else {"type": asked.type}
    schema = {
        name: getattr(asked, name)
        for name in ("name", "schema", "description", "strict")
        if getattr(asked, name) is not None
    }
    return {"type": "json_schema", "json_schema": schema}


def _tool(tool: Mapping[str, Any], at: int) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise InvalidRequest(
            f"tools[{at}]: type {tool.get('type')!r} is not here: function is", param="tools"
        )
    names = ("name", "description", "parameters", "strict")
    return {
        "type": "function",
        "function": {name: tool[name] for name in names if tool.get(name) is not None},
    }


def _choice(choice: str | dict[str, Any] | None) -> Any:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") != "function":
        raise InvalidRequest(
            f"tool_choice: type {choice.get('type')!r} is not here: function is",
            param="tool_choice",
        )
    return {"type": "function", "function": {"name": _string(choice, "name", "tool_choice")}}
