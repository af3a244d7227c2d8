"""Server-sent events: from merged deltas to bytes on the socket, whatever the protocol."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress

from starlette.types import Receive, Scope, Send

from headrace.api.answer import Answer
from headrace.api.errors import CLIENT_GONE, ClientGone, as_ours
from headrace.api.events import Events
from headrace.api.exchange import Exchange
from headrace.api.metering import Bill
from headrace.api.resume import KEEP_ALIVE
from headrace.engine.token_stream import Delta, TokenStream
from headrace.observe.metrics import ApiMetrics
from headrace.text.parts import joined

log = logging.getLogger("headrace.api")

HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold chunks back
)


class EventStream:
    """An ASGI response. Nothing is sent before the first event, so that an early error still gets
    its real status; after `keepalive_s` of silence the headers go out with a comment.
    """

    def __init__(
        self,
        answer: Answer,
        events: Events,
        exchange: Exchange,
        metrics: ApiMetrics,
        headers: Mapping[str, str],
        bill: Bill,
    ) -> None:
        self._answer = answer
        self._bill = bill
        self._events = events
        self._exchange = exchange
        self._metrics = metrics
        extra = [
            (name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()
        ]
        self._headers = [*HEADERS, *extra]
        opens = answer.prepared.echo or answer.prepared.shown.token_ids
        self._taken_s = 0.0  # time.monotonic(), when the news came that are written now
        self._unopened = set(range(len(answer.prepared.jobs))) if opens else set[int]()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tokens = self._answer.stream
        with self._bill.covering(self._answer):
            async with tokens, watch_client(receive, tokens):
                self._exchange.tokens = tokens  # from here on, silence nudges `take`
                try:
                    data = await self._first()
                finally:
                    self._exchange.detail = self._answer.summary()
                start = {"type": "http.response.start", "status": 200, "headers": self._headers}
                await send(start)
                last = await self._go_on(data)
                if last is not None:
                    await send({"type": "http.response.body", "body": last, "more_body": False})
                    self._metrics.emit_s.note(time.monotonic() - self._taken_s)

    async def _go_on(self, data: bytes) -> bytes | None:
        """Write `data` and all that follows; returns what ends the stream, None if nobody reads."""
        tokens = self._answer.stream
        tokens.hand_to(self._at_once)
        try:
            while not tokens.done:
                await self._exchange.write(data)
                if data is not KEEP_ALIVE:
                    self._metrics.emit_s.note(time.monotonic() - self._taken_s)
                data = b""  # was sent, whatever happens now
                data = await self._next()
                while not data and not tokens.done:
                    data = await self._next()
            return data + await self._last()  # in one piece
        except ClientGone as gone:
            self._exchange.error = gone
            self._bill.end(self._answer, gone)
            return None
        except Exception as error:
            ours = as_ours(error)
            if ours is not error:
                log.exception("unexpected error in a stream")
            self._exchange.error = ours
            self._bill.end(self._answer, ours)
            return data + self._events.failed(ours)
        finally:
            tokens.hand_to(None)
            self._exchange.detail = self._answer.summary()

    def _at_once(self, deltas: Iterable[Delta]) -> bool:
        """Write news of a stream that is under way in the turn that brought them; False: nothing
        was done, for the client is behind or something must be awaited.
        """
        if self._unopened or not self._exchange.writable:
            return False
        self._taken_s = time.monotonic()
        try:
            if data := self._written(deltas):
                self._exchange.write_now(data)
                self._metrics.emit_s.note(self._exchange.sent_s - self._taken_s)
        except Exception as error:
            ours = as_ours(error)
            if ours is not error:
                log.exception("unexpected error in a stream")
            self._answer.stream.fail(ours)  # `take` raises it
        return True

    async def _first(self) -> bytes:
        begun = b"".join(map(self._counted, self._events.begin(self._answer)))
        data = await self._next()
        while not data and not self._answer.stream.done:
            data = await self._next()
        return begun + data

    def _opening(self, position: int) -> bytes:
        """What goes before the answers to a prompt, each once a choice."""
        answer, n = self._answer, self._answer.prepared.n
        logprobs = self._events.echoed(answer.echoed(position))
        echo, prompt = answer.echo(position), answer.prepared.jobs[position].prompt
        indices = range(position * n, position * n + n)
        opened = [self._events.opened(i, echo, logprobs, prompt) for i in indices]
        return b"".join(self._counted(chunk) for chunk in opened if chunk)

    async def _next(self) -> bytes:
        """Events for all that came; a comment after a nudge; empty when text is held back."""
        answer = self._answer
        deltas = await answer.stream.take()
        if not deltas:
            return b"" if answer.stream.done else KEEP_ALIVE
        self._taken_s = time.monotonic()
        if not self._unopened:
            return self._written(deltas)
        out: list[bytes] = []
        for delta in deltas:
            position = delta.index // answer.prepared.n
            if position in self._unopened and not answer.choices[delta.index].ended:
                self._unopened.remove(position)
                if answer.prepared.shown.echo:  # of a long prompt, that takes a while
                    out.append(await asyncio.to_thread(self._opening, position))
                else:
                    out.append(self._opening(position))
            out.append(self._written((delta,)))
        return b"".join(out)

    def _written(self, deltas: Iterable[Delta]) -> bytes:
        """Events for news of choices that are open."""
        answer, events = self._answer, self._events
        out: list[bytes] = []
        for delta in deltas:
            choice = answer.choices[delta.index]
            if choice.ended:  # the overrun of a stop string
                continue
            if choice.parser is not None or answer.traced:
                out += map(self._counted, self._rich(delta))
            elif text := answer.feed(delta):
                out.append(self._counted(events.text(delta.index, text)))
            if choice.finish is not None:
                if choice.annotations and (cited := events.cited(delta.index, choice.annotations)):
                    out.append(self._counted(cited))
                end = events.finish(delta.index, choice.finish, choice.stop_reason)
                out.append(self._counted(end))
        return b"".join(out)

    def _rich(self, delta: Delta) -> list[bytes]:
        """News of a choice whose text is told apart, or of whose tokens something is said."""
        answer, events = self._answer, self._events
        parts = joined(answer.parts(delta))
        if not answer.traced:
            return events.parts(delta.index, parts)
        entries = answer.choices[delta.index].take()
        if not parts and not entries:
            return []
        offset = len(answer.echo(delta.index // answer.prepared.n))
        return events.told(delta.index, parts, entries, offset)

    def _counted(self, event: bytes) -> bytes:
        if not self._events.continuous_usage:
            return event
        return self._events.with_usage(event, self._answer.usage())

    async def _last(self) -> bytes:
        self._answer.check()
        await self._events.ended(self._answer)
        await self._bill.close(self._answer)
        return self._events.end(self._answer)


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
