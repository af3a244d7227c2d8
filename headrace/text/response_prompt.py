"""What of a body of /v1/responses becomes its prompt, as chat's fields have it.

Here and not in `api`, for the gateway makes the same prompt of the same body.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, Protocol

import msgspec
from msgspec import Meta

from headrace.errors import InvalidRequest
from headrace.foreign_json import string_of

MAX_ITEMS = 4096

Input = str | Annotated[list[dict[str, Any]], Meta(max_length=MAX_ITEMS)]


class ReasoningConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How hard to think. Reasoning is shown whole, so `auto` is no summary."""

    effort: str | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None  # the same, by its older name
    context: Literal["auto", "all_turns"] | None = None  # the template decides what it shows
    mode: Literal["standard"] | None = None


class Responses(Protocol):
    """What of a body is read here."""

    @property
    def instructions(self) -> str | None: ...
    @property
    def reasoning(self) -> ReasoningConfig | None: ...
    @property
    def tools(self) -> Sequence[dict[str, Any]] | None: ...
    @property
    def tool_choice(self) -> str | dict[str, Any] | None: ...
    @property
    def chat_template_kwargs(self) -> Mapping[str, Any] | None: ...


def prompt_fields(body: Responses, items: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """By chat's names; None: not given. items: the conversation, oldest first.

    Raises InvalidRequest with the names of /v1/responses.
    """
    turns = [{"role": "system", "content": body.instructions}] if body.instructions else []
    return {
        "messages": [*turns, *turns_of(items)],
        "tools": [_tool(tool, i) for i, tool in enumerate(body.tools)] if body.tools else None,
        "tool_choice": _choice(body.tool_choice),
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
        "chat_template_kwargs": body.chat_template_kwargs,
    }


def input_items(given: str | list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """`input` as items with ids, as they are stored and listed. Raises InvalidRequest."""
    if given is None:
        return []
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    out: list[dict[str, Any]] = []
    for item in given:
        kind = item.get("type") or "message"
        if not isinstance(kind, str):
            raise InvalidRequest(f"input[{len(out)}].type: a string", param="input")
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
            function = {name: string_of(item, name, where) for name in ("name", "arguments")}
            call = {
                "id": string_of(item, "call_id", where),
                "type": "function",
                "function": function,
            }
            _assistant(turns).setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            turns.append({
                "role": "tool",
                "tool_call_id": string_of(item, "call_id", where),
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
    role, text = string_of(item, "role", where), _text(item.get("content"), f"{where}.content")
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
        texts.append(string_of(part, "refusal" if kind == "refusal" else "text", f"{where}[{at}]"))
    return "\n".join(texts)


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
    return {"type": "function", "function": {"name": string_of(choice, "name", "tool_choice")}}
