"""One request's answer while it arrives: bytes and their times in, a `Record` out. No clock."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.bench.sse import EventReader
from headrace.bench.stats import Record


class _Named(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct):
    function: _Named | None = None


class _Delta(msgspec.Struct):
    """Of a chunk, or the message of a whole answer. Two names of reasoning are in use."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    message: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None

    def content(self) -> str:
        """What the reader is meant to read: text, or a part of a call."""
        if self.text:
            return self.text
        said = self.delta or self.message
        if said is None:
            return ""
        if not said.tool_calls:
            return said.content or ""
        calls = [call.function for call in said.tool_calls if call.function]
        return (said.content or "") + "".join((c.name or "") + (c.arguments or "") for c in calls)

    def thinks(self) -> bool:
        return bool(self.delta and (self.delta.reasoning_content or self.delta.reasoning))


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Answer(msgspec.Struct):
    """A chunk of a stream, or a whole answer: only what is measured."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: dict[str, Any] | str | None = None


_ANSWER = msgspec.json.Decoder(_Answer)


class Exchange:
    """A feed machine that fills `record`. `text` is kept only when asked for."""

    def __init__(self, record: Record, *, keep_text: bool = False) -> None:
        self.record = record
        self.complete = False
        self._events = EventReader()
        self._usage: _Usage | None = None
        self._keep_text = keep_text
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def feed(self, data: bytes, now_s: float) -> None:
        """Bytes of an event stream that arrived at `now_s`."""
        for payload in self._events.feed(data):
            if payload == b"[DONE]":
                self.complete = True
            else:
                self._take(_ANSWER.decode(payload), now_s)

    def feed_whole(self, body: bytes) -> None:
        """The body of an answer that was not streamed."""
        self._take(_ANSWER.decode(body), None)
        self.complete = True

    def _take(self, answer: _Answer, now_s: float | None) -> None:
        record = self.record
        if answer.error is not None:
            record.error = "error event: " + words(answer.error)
        self._usage = answer.usage or self._usage
        for choice in answer.choices:
            if choice.finish_reason:
                record.finish_reason = choice.finish_reason
            content = choice.content()
            if content and self._keep_text:
                self._texts.append(content)
            if now_s is None:
                continue
            if content and record.content_s is None:
                record.content_s = now_s
            if content or choice.thinks():
                record.chunks_s.append(now_s)

    def flush(self) -> None:
        """The connection has ended: settle the counts, and note a stream that was cut."""
        record, usage = self.record, self._usage
        if not self.complete and not record.error and not record.cancelled:
            record.error = "stream ended without [DONE]"
        if usage:
            details = usage.prompt_tokens_details
            record.prompt_tokens, record.output_tokens = (
                usage.prompt_tokens,
                usage.completion_tokens,
            )
            record.cached_tokens = (details.cached_tokens if details else None) or 0
        else:
            record.output_tokens, record.counted_by = len(record.chunks_s), "chunks"


def words(error: dict[str, Any] | str) -> str:
    """An error object in the fewest words that name it."""
    if isinstance(error, str):
        return error
    return str(error.get("code") or error.get("message") or error)


def reason(body: bytes) -> str:
    """Of an answer that is no 200: its words behind a blank, or nothing."""
    error = _error_of(body)
    return f" {words(error)}" if error else ""


def message(body: bytes) -> str:
    """Of an answer that is no 200: what it says for people, or nothing."""
    error = _error_of(body)
    return str(error.get("message") or "") if isinstance(error, dict) else error


def _error_of(body: bytes) -> dict[str, Any] | str:
    try:
        return _ANSWER.decode(body).error or ""
    except msgspec.MsgspecError:
        return ""
