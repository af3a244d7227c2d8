"""POST /v1/messages and /v1/messages/count_tokens, as Anthropic has them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from headrace.api.admission import admit
from headrace.api.answer import Answer, Choice
from headrace.api.as_chat import as_chat, renamed
from headrace.api.body import read_body
from headrace.api.events import Events
from headrace.api.exchange import exchange_of
from headrace.api.generate import answered, ignored
from headrace.api.message_blocks import NAMES, Countable, Messages, begun, blocks_of, chat_fields
from headrace.api.prepare import Prepared, prepare_chat
from headrace.api.schemas import parse
from headrace.api.service import Service, encode_json, service_of
from headrace.api.turns import chat_ids
from headrace.error_bodies import anthropic_body
from headrace.errors import HeadraceError, InvalidRequest
from headrace.text.parts import Arguments, Call, Part, Reasoning, Text

_encode = msgspec.json.Encoder().encode


class Head(msgspec.Struct, frozen=True):
    """What an answer says of itself whatever the model says."""

    id: str
    model: str
    capped: bool  # the context ends before max_tokens

    def message(self, content: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        """A message that has not ended."""
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }

    def stop(self, reason: str, stop_reason: str | int | None) -> dict[str, Any]:
        """How it ended, in Anthropic's words."""
        if reason == "stop" and isinstance(stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": stop_reason}
        length = "model_context_window_exceeded" if self.capped else "max_tokens"
        words = {"stop": "end_turn", "length": length, "tool_calls": "tool_use"}
        words["content_filter"] = "refusal"
        return {"stop_reason": words[reason], "stop_sequence": None}


def usage_of(answer: Answer) -> dict[str, Any]:
    """Anthropic's counts: input_tokens are those that were not read from the cache."""
    usage = answer.usage()
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"thinking_tokens": answer.reasoning_tokens},
    }


def event(kind: str, **members: Any) -> bytes:
    """One named event."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, **members}))


class MessageEvents(Events):
    """message_start, ping, blocks one after another, message_delta, message_stop."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._index = -1  # of the block that is open, or was last
        self._open: type[Part] | None = None  # what the open block holds
        self._stop: dict[str, Any] = {}

    def begin(self, answer: Answer) -> list[bytes]:
        message = self._head.message([], usage_of(answer))
        return [event("message_start", message=message), event("ping")]

    def text(self, index: int, text: str) -> bytes:
        return b"".join(self.parts(index, [Text(text)]))

    def parts(self, index: int, parts: Sequence[Part]) -> list[bytes]:
        out: list[bytes] = []
        for part in parts:
            if isinstance(part, Call) or not self._goes_on(part):
                out.append(self._closed())
                self._index += 1
                self._open = Arguments if isinstance(part, Call) else type(part)
                block = begun(part)
                out.append(event("content_block_start", index=self._index, content_block=block))
            if not isinstance(part, Call):
                delta = _delta(part)
                out.append(event("content_block_delta", index=self._index, delta=delta))
        return out

    def _goes_on(self, part: Part) -> bool:
        return self._open is type(part)

    def _closed(self) -> bytes:
        """The end of the open block, if one is. Thinking is signed, here by nobody."""
        if self._open is None:
            return b""
        signed = b""
        if self._open is Reasoning:
            delta = {"type": "signature_delta", "signature": ""}
            signed = event("content_block_delta", index=self._index, delta=delta)
        self._open = None
        return signed + event("content_block_stop", index=self._index)

    def finish(self, index: int, reason: str, stop_reason: str | int | None) -> bytes:
        self._stop = self._head.stop(reason, stop_reason)
        return self._closed()

    def end(self, answer: Answer) -> bytes:
        last = event("message_delta", delta=self._stop, usage=usage_of(answer))
        return last + event("message_stop")

    def failed(self, error: HeadraceError) -> bytes:
        return b"event: error\ndata: " + _encode(anthropic_body(error)) + b"\n\n"


def _delta(part: Part) -> dict[str, Any]:
    if isinstance(part, Text):
        return {"type": "text_delta", "text": part.text}
    if isinstance(part, Reasoning):
        return {"type": "thinking_delta", "thinking": part.text}
    assert isinstance(part, Arguments), "a call begins a block"
    return {"type": "input_json_delta", "partial_json": part.text}


async def create(request: Request) -> ASGIApp:
    """Answer. Raises the errors of body, schemas, admission and prepare."""
    service = service_of(request)
    raw, size_bytes = await read_body(request, service.settings.max_body_bytes)
    body, unknown = parse(Messages, raw, strict=service.settings.strict)
    _check_thinking(service, body)
    with renamed(NAMES):
        user = body.metadata.user_id if body.metadata is not None else None
        more = {"stop": body.stop_sequences, "user": user}
        chat = as_chat(raw, {**chat_fields(body), **more})
        info = admit(service, chat)
        prepared = await prepare_chat(service, chat, info, size_bytes, exchange_of(request).record)
    prepared, capped = _limited(prepared, body)
    head = Head(f"msg_{secrets.token_hex(12)}", service.name, capped)

    async def content(answer: Answer, parts: list[list[Part]]) -> dict[str, Any]:
        choice: Choice = answer.choices[0]
        assert choice.finish is not None, "collect waits for the end"
        message = head.message(blocks_of(parts[0]), usage_of(answer))
        return message | head.stop(choice.finish, choice.stop_reason)

    def events(answer: Answer) -> Events:
        return MessageEvents(head)

    streamed = events if body.stream else None
    return await answered(request, service, prepared, unknown, events=streamed, content=content)


def _limited(prepared: Prepared, body: Messages) -> tuple[Prepared, bool]:
    """At most max_tokens, and no more than the context holds: clients ask for what the largest
    model gives, and the stop reason says which of the two ended an answer."""
    (job,) = prepared.jobs  # may fill the context
    if (body.min_tokens or 0) > body.max_tokens:
        raise InvalidRequest(
            f"min_tokens = {body.min_tokens} is over max_tokens = {body.max_tokens}",
            param="min_tokens",
        )
    capped = job.max_tokens < body.max_tokens
    job = msgspec.structs.replace(job, max_tokens=min(job.max_tokens, body.max_tokens))
    return msgspec.structs.replace(prepared, jobs=[job]), capped


def _check_thinking(service: Service, body: Countable) -> None:
    """Adaptive thinking leaves it to the model; enabled thinking asks for it."""
    asked = body.thinking is not None and body.thinking.type == "enabled"
    if asked and service.dialect.marks is None:
        raise InvalidRequest("thinking: this model does not think", param="thinking")


async def count_tokens(request: Request) -> Response:
    """How many tokens the prompt has. Raises as `create`, but for what the engine says."""
    service = service_of(request)
    raw, _ = await read_body(request, service.settings.max_body_bytes)
    body, unknown = parse(Countable, raw, strict=service.settings.strict)
    service.check_model(body.model)
    _check_thinking(service, body)
    count = await asyncio.to_thread(_count, service, body)
    content = encode_json({"input_tokens": count})
    return Response(content, headers=ignored(unknown), media_type="application/json")


def _count(service: Service, body: Countable) -> int:
    with renamed(NAMES):
        chat = as_chat({}, chat_fields(body))
        return len(chat_ids(service, chat))
