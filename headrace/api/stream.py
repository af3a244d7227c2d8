"""Server-sent events: from merged deltas to bytes on the socket.

The pieces of a chunk that never change are encoded once a choice; a token then costs one JSON
string and a few joins.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from headrace.api.answer import Answer, Reply
from headrace.api.errors import CLIENT_GONE, ClientGone, as_ours, event_of
from headrace.api.exchange import Exchange
from headrace.api.logprobs import Entry, Reporter
from headrace.api.prepare import Shown
from headrace.engine.client import TokenStream
from headrace.observe.metrics import ApiMetrics

log = logging.getLogger("headrace.api")

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold chunks back
)
_encode = msgspec.json.Encoder().encode


class Chunks:
    """The bytes of one protocol's stream. Subclasses name the object and shape a choice.

    `before` and `after` surround the JSON string of a delta's text.
    """

    object = ""
    before = b""
    after = b""
    roles = False  # each choice starts with a role chunk

    def __init__(
        self,
        reply: Reply,
        n_choices: int,
        reporter: Reporter | None = None,
        shown: Shown | None = None,
    ) -> None:
        self._reporter, self._shown = reporter, shown or Shown()
        head = _encode(
            {
                "id": reply.id,
                "object": self.object,
                "created": reply.created,
                "model": reply.model,
                "system_fingerprint": reply.system_fingerprint,
            }
        )
        self._head = b"data: " + head[:-1] + b',"choices":['
        self._continuous = reply.continuous_usage
        # OpenAI: with include_usage, every chunk but the last has a null usage.
        self._tail = b',"usage":null}\n\n' if reply.include_usage else b"}\n\n"
        self._texts = [self._open(index) + self.before for index in range(n_choices)]
        self._text_end = self.after + b"]" + self._tail

    def text(self, index: int, text: str) -> bytes:
        """New text of a choice."""
        return self._texts[index] + _encode(text) + self._text_end

    def told(self, index: int, text: str, entries: list[Entry], offset: int) -> bytes:
        """As `text`, with what is said of tokens. offset: characters of the choice so far that
        `entries` do not count: its echo."""
        rest: dict[str, Any] = {**self.delta(text), "logprobs": None, "finish_reason": None}
        if self._shown.top >= 0:
            assert self._reporter is not None, "nobody to write log-probabilities down"
            rest["logprobs"] = self.logprobs(self._reporter, entries, self._shown.top, offset)
        if self._shown.token_ids:
            rest["token_ids"] = [span.token for span, _ in entries]
        return self._open(index) + self._close(rest)

    def echoed(self, entries: list[Entry]) -> dict[str, Any] | None:
        """The `logprobs` of an echo; None where nothing is asked."""
        if not entries:
            return None
        assert self._reporter is not None, "nobody to write log-probabilities down"
        return self.logprobs(self._reporter, entries, self._shown.top, 0)

    def opened(
        self, index: int, echo: str, logprobs: dict[str, Any] | None, prompt: list[int]
    ) -> bytes:
        """What goes before a choice's own text: an echo, ids of the prompt; b"" if nothing."""
        ids = self._shown.token_ids
        if not (echo or ids):
            return b""
        rest: dict[str, Any] = {**self.delta(echo), "logprobs": logprobs, "finish_reason": None}
        if ids:
            rest |= {"token_ids": [], "prompt_token_ids": prompt}
        return self._open(index) + self._close(rest)

    @staticmethod
    def delta(text: str) -> dict[str, Any]:
        """The members of a choice that hold new text."""
        raise NotImplementedError

    @staticmethod
    def logprobs(
        reporter: Reporter, entries: list[Entry], count: int, offset: int
    ) -> dict[str, Any]:
        """The `logprobs` of a choice."""
        raise NotImplementedError

    def role(self, index: int) -> bytes:
        """The first chunk of a choice, in protocols that have one."""
        raise NotImplementedError

    def finish(self, index: int, reason: str, stop_reason: str | int | None) -> bytes:
        """The last chunk of a choice."""
        raise NotImplementedError

    def usage(self, usage: Mapping[str, Any]) -> bytes:
        """The chunk with no choices, before [DONE]."""
        return self._head + b'],"usage":' + _encode(usage) + b"}\n\n"

    def with_usage(self, chunk: bytes, usage: Mapping[str, Any]) -> bytes:
        """A chunk of ours with the counts so far instead of null."""
        assert chunk.endswith(self._tail), "a chunk made by this object"
        return chunk[: -len(self._tail)] + b',"usage":' + _encode(usage) + b"}\n\n"

    def beside(self, chunk: bytes, name: str, value: Any) -> bytes:
        """A chunk of ours with one more member beside its choices."""
        member = b',"' + name.encode() + b'":' + _encode(value)
        return chunk[: -len(self._tail)] + member + self._tail

    def _open(self, index: int) -> bytes:
        return self._head + b'{"index":%d,' % index

    def _close(self, rest: Mapping[str, Any]) -> bytes:
        """The end of a choice whose object goes on with the members of `rest`."""
        return _encode(rest)[1:] + b"]" + self._tail


class EventStream:
    """An ASGI response. Nothing is sent before the first event, so that an early error still gets
    its real status; after `keepalive_s` of silence the headers go out with a comment.
    """

    def __init__(
        self,
        answer: Answer,
        chunks: Chunks,
        reply: Reply,
        exchange: Exchange,
        metrics: ApiMetrics,
        headers: Mapping[str, str],
    ) -> None:
        self._answer = answer
        self._chunks = chunks
        self._reply = reply
        self._exchange = exchange
        self._metrics = metrics
        extra = [
            (name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()
        ]
        self._headers = [*HEADERS, *extra]
        opens = answer.prepared.echo or answer.prepared.shown.token_ids
        self._unopened = set(range(len(answer.prepared.jobs))) if opens else set[int]()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tokens = self._answer.stream
        async with tokens, watch_client(receive, tokens):
            self._exchange.tokens = tokens  # from here on, silence nudges `take`
            try:
                data = await self._first()
            finally:
                self._exchange.detail = self._answer.summary()
            await send({"type": "http.response.start", "status": 200, "headers": self._headers})
            try:
                while True:
                    await self._exchange.write(data)
                    if tokens.done:
                        break
                    data = await self._next()
                    while not data and not tokens.done:
                        data = await self._next()
                data = self._last()
            except ClientGone as gone:
                self._exchange.error = gone
                return
            except Exception as error:
                ours = as_ours(error)
                if ours is not error:
                    log.exception("unexpected error in a stream")
                data = event_of(ours)
                self._exchange.error = ours
            finally:
                self._exchange.detail = self._answer.summary()
            await send({"type": "http.response.body", "body": data, "more_body": False})

    async def _first(self) -> bytes:
        roles = b""
        if self._chunks.roles:
            chunks = [self._chunks.role(choice.index) for choice in self._answer.choices]
            roles = b"".join(map(self._counted, chunks))
        data = await self._next()
        while not data and not self._answer.stream.done:
            data = await self._next()
        return roles + data

    def _opening(self, position: int) -> bytes:
        """What goes before the answers to a prompt, each once a choice."""
        answer, n = self._answer, self._answer.prepared.n
        logprobs = self._chunks.echoed(answer.echoed(position))
        echo, prompt = answer.echo(position), answer.prepared.jobs[position].prompt
        indices = range(position * n, position * n + n)
        opened = [self._chunks.opened(i, echo, logprobs, prompt) for i in indices]
        return b"".join(self._counted(chunk) for chunk in opened if chunk)

    async def _next(self) -> bytes:
        """Events for all that came; a comment after a nudge; empty when text is held back."""
        answer, chunks = self._answer, self._chunks
        before_s = answer.stream.last_token_s
        deltas = await answer.stream.take()
        if not deltas:
            return b"" if answer.stream.done else KEEP_ALIVE
        if before_s:
            self._metrics.inter_token_s.note(answer.stream.last_token_s - before_s)
        out: list[bytes] = []
        for delta in deltas:
            choice = answer.choices[delta.index]
            if choice.ended:  # the overrun of a stop string
                continue
            if self._unopened and (position := delta.index // answer.prepared.n) in self._unopened:
                self._unopened.remove(position)
                if answer.prepared.shown.echo:  # of a long prompt, that takes a while
                    out.append(await asyncio.to_thread(self._opening, position))
                else:
                    out.append(self._opening(position))
            text = answer.feed(delta)
            if answer.traced:
                entries = choice.take()
                if text or entries:
                    offset = len(answer.echo(delta.index // answer.prepared.n))
                    out.append(self._counted(chunks.told(delta.index, text, entries, offset)))
            elif text:
                out.append(self._counted(chunks.text(delta.index, text)))
            if choice.finish is not None:
                end = chunks.finish(delta.index, choice.finish, choice.stop_reason)
                out.append(self._counted(end))
        return b"".join(out)

    def _counted(self, chunk: bytes) -> bytes:
        if not self._reply.continuous_usage:
            return chunk
        return self._chunks.with_usage(chunk, self._answer.usage())

    def _last(self) -> bytes:
        self._answer.check()
        if self._reply.include_usage:
            return self._chunks.usage(self._answer.usage()) + DONE
        return DONE


@asynccontextmanager
async def watch_client(receive: Receive, tokens: TokenStream) -> AsyncIterator[None]:
    """While inside, a closed connection ends `tokens` with ClientGone."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        tokens.fail(ClientGone(f"status {CLIENT_GONE}: the client closed the connection"))

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
