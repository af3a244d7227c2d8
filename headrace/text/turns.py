"""Messages as a client sends them, to turns as a template takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from headrace.errors import InvalidRequest
from headrace.text.conversation import Asked

ROLES = ("system", "developer", "user", "assistant", "tool")
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")


class Message(msgspec.Struct, frozen=True):
    """One turn. `normalise` checks and joins its parts."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same, by its newer name
    function_call: Any = None  # of old: refused


class Conversation(Protocol):
    """What of a body becomes a conversation."""

    @property
    def messages(self) -> Sequence[Message] | None: ...
    @property
    def chat_template_kwargs(self) -> Mapping[str, Any] | None: ...
    @property
    def add_generation_prompt(self) -> bool | None: ...
    @property
    def continue_final_message(self) -> bool | None: ...
    @property
    def documents(self) -> Sequence[dict[str, Any]] | None: ...
    @property
    def reasoning_effort(self) -> str | None: ...


def asked_by(said: Conversation, tools: Sequence[dict[str, Any]], names: frozenset[str]) -> Asked:
    """What is asked of a template that reads `names`. tools: those that are shown.

    Raises InvalidRequest.
    """
    resume = bool(said.continue_final_message)
    if resume and said.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other",
            param="continue_final_message",
        )
    turns = normalise(said.messages or [])
    if resume and turns[-1]["role"] != "assistant":
        raise InvalidRequest(
            "continue_final_message needs an assistant message at the end", param="messages"
        )
    asked = said.add_generation_prompt
    kwargs = dict(said.chat_template_kwargs or {})
    for reserved in _RESERVED:
        if reserved in kwargs:
            raise InvalidRequest(
                f"chat_template_kwargs may not hold {reserved!r}", param="chat_template_kwargs"
            )
    if said.reasoning_effort is not None:
        kwargs = {**effort_variables(said.reasoning_effort, names), **kwargs}
    return Asked(
        turns=turns,
        tools=list(tools),
        documents=list(said.documents or []),
        add_generation_prompt=not resume if asked is None else asked,
        continue_final_message=resume,
        kwargs=kwargs,
    )


def written_on(said: Conversation) -> str:
    """The text of the last message, if the model is to write on in it. Raises InvalidRequest."""
    if not said.continue_final_message or not said.messages:
        return ""
    last, at = said.messages[-1], len(said.messages) - 1
    return _text(last.content, f"messages[{at}].content", last.role) or ""


def effort_variables(effort: str, names: frozenset[str]) -> dict[str, Any]:
    """The variables by which a template that reads `names` thinks more, less or not at all."""
    if "reasoning_effort" in names:
        return {"reasoning_effort": effort}
    for name in ("enable_thinking", "thinking"):
        if name in names:
            return {name: effort != "none"}
    raise InvalidRequest(
        "this model's chat template has no reasoning_effort", param="reasoning_effort"
    )


def normalise(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as `ChatTemplate` takes them: text content.

    "developer" becomes "system". Raises InvalidRequest for unknown roles, content that is not
    text, and a tool result that answers no call.
    """
    out: list[dict[str, Any]] = []
    answers = False  # a tool message may stand here
    for position, message in enumerate(messages):
        where = f"messages[{position}]"
        if message.role not in ROLES:
            raise InvalidRequest(
                f"{where}.role = {message.role!r:.50}: one of {', '.join(ROLES)}", param="messages"
            )
        if message.role == "tool" and not answers:
            raise InvalidRequest(
                f"{where}: a tool message must follow an assistant message with tool_calls",
                param="messages",
            )
        if message.function_call is not None:
            raise InvalidRequest(
                f"{where}.function_call is not supported: use tool_calls", param="messages"
            )
        content = _text(message.content, f"{where}.content", message.role)
        if content is None and not message.tool_calls and message.role != "assistant":
            raise InvalidRequest(f"{where}.content is required", param="messages")
        role = "system" if message.role == "developer" else message.role
        turn: dict[str, Any] = {"role": role, "content": content or ""}
        if message.tool_calls:
            turn["tool_calls"] = [_call(call, where) for call in message.tool_calls]
        for key in ("name", "tool_call_id"):
            if getattr(message, key) is not None:
                turn[key] = getattr(message, key)
        thought = message.reasoning_content or message.reasoning
        if thought:
            turn["reasoning_content"] = thought
        answers = bool(message.tool_calls) or (answers and message.role == "tool")
        out.append(turn)
    return out


def _text(content: str | list[dict[str, Any]] | None, where: str, role: str) -> str | None:
    """Text parts, one a line. An assistant's refusal is text as well."""
    if not isinstance(content, list):
        return content
    texts = []
    for at, part in enumerate(content):
        kind = part.get("type")
        key = "refusal" if kind == "refusal" and role == "assistant" else "text"
        if kind != key:
            raise InvalidRequest(
                f"{where}[{at}]: a part of type {kind!r:.50} is not supported: "
                "this model reads text",
                param="messages",
            )
        if not isinstance(part.get(key), str):
            raise InvalidRequest(f"{where}[{at}].{key} is required", param="messages")
        texts.append(part[key])
    return "\n".join(texts)


def _call(call: dict[str, Any], where: str) -> dict[str, Any]:
    """A tool call; `ChatTemplate` makes an object of its arguments."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{where}.tool_calls: function.name is missing", param="messages")
    return {**call, "type": "function"}
