"""Streams that outlive their connection: numbered events, and a client that comes back for more.

The handler that a request began with stays until its answer ends, whether anybody reads it or not;
so its place among the open requests, its limits and its log line stay too. Who reads is the
connection that came last: the first one, or one that named the event it saw last. A stream that
nobody reads for the grace period is aborted as if its client had just left.
"""

from __future__ import annotations

import asyncio
import copy
import re
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.api.event_buffer import EventBuffer
from headrace.api.exchange import Exchange
from headrace.engine.token_stream import TokenStream
from headrace.errors import InvalidRequest, NotFound
from headrace.homes import HEADER as HOME
from headrace.homes import STREAM, given_tag, stream_id

HEADER = b"x-headrace-stream-id"
NEVER = "headrace.never_resumed"  # in a scope: this client can come back to nothing
KEPT_ENDED = 64  # times the bytes of one stream, for those that ended within the grace period
KEEP_ALIVE = b": keep-alive\n\n"  # a comment: no event, so nobody is told it again
_EVENT = re.compile(rf"(?:({STREAM})\.)?(\d{{1,15}})")
Headers = list[tuple[bytes, bytes]]


class Live:
    """One stream: what its writer does and what its reader sees."""

    def __init__(self, name: str, route: str, grace_s: float, max_bytes: int) -> None:
        """route: the path that it began at."""
        self.name, self.route = name, route
        self.buffer = EventBuffer(name, max_bytes)
        self.headers: Headers | None = None  # None: not begun
        self.ended = False
        self._grace_s = grace_s
        self._reader = 0  # counts readers; the last one reads
        self._comment = False
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._given_up = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self.on_read: Callable[[], None] = lambda: None

    # ------------------------------------------------------------ the writer's side

    async def receive(self) -> Message:
        """The writer's client leaves when nobody came back in time."""
        await self._given_up.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """The writer's response, as ASGI has it."""
        if message["type"] == "http.response.start":
            self.headers = [*message["headers"], (HEADER, self.name.encode())]
            self._news.set()
            return
        body: bytes = message.get("body", b"")
        self.buffer.write(body)
        self._comment = body == KEEP_ALIVE
        if not message.get("more_body"):
            self.end()
        self._news.set()
        while self.buffer.full and not self._given_up.is_set() and not self.ended:
            self._room.clear()
            await self._room.wait()

    def end(self) -> None:
        """Nothing more will be written."""
        self.ended = True
        self._news.set()

    # ------------------------------------------------------------ the reader's side

    async def begun(self) -> Headers | None:
        """Wait for the headers; None if there will be none."""
        while self.headers is None and not self.ended:
            self._news.clear()
            await self._news.wait()
        return self.headers

    def check(self, after: int, route: str) -> None:
        """Whether events behind `after` can be read on that route; "" = on one that goes on with
        any stream. Raises InvalidRequest, and as `EventBuffer.after`.
        """
        if route not in ("", self.route):
            raise InvalidRequest(
                f"Last-Event-ID names a stream that began at {self.route}, and this is {route}: "
                f"come back there, or with GET /v1/streams/{self.name}",
                param="Last-Event-ID",
            )
        self.buffer.after(after)

    async def follow(self, after: int) -> AsyncGenerator[bytes, None]:
        """Events behind `after`, and a comment now and then, until the end, or until another
        reader comes. Raises as `EventBuffer.after`.
        """
        self.buffer.after(after)
        self._reader += 1
        me = self._reader
        self._stop_timer()
        self._news.set()  # who read until now looks up
        try:
            while me == self._reader:
                last = self.buffer.last
                if data := self.buffer.after(after):
                    yield data
                    after = last
                    self.buffer.mark_sent(last)
                    self._room.set()
                    self.on_read()
                elif self._comment and not self.ended:
                    self._comment = False
                    yield KEEP_ALIVE
                    self.on_read()
                elif self.ended:
                    return
                else:
                    self._news.clear()
                    await self._news.wait()
        finally:
            if me == self._reader:
                self.leave()

    def leave(self) -> None:
        """Nobody reads: the grace period begins."""
        if not self.ended:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._grace_s, self.give_up)

    @property
    def given_up(self) -> bool:
        """Nobody came back, or somebody wanted it to end."""
        return self._given_up.is_set()

    def give_up(self) -> None:
        """End the request, now."""
        self._stop_timer()
        self._given_up.set()
        self._room.set()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Streams:
    """The resumable streams that this HTTP process holds. grace_s = 0: there are none."""

    def __init__(self, worker: int, grace_s: float, max_bytes: int) -> None:
        self.worker = worker
        self.enabled = grace_s > 0
        self._grace_s, self._max_bytes = grace_s, max_bytes
        self._live: dict[str, Live] = {}
        self._ended: dict[str, Live] = {}  # oldest first
        self._ended_bytes = 0

    def find(self, name: str) -> Live:
        """Raises NotFound."""
        live = self._live.get(name) or self._ended.get(name)
        if live is None:
            raise NotFound(f"no stream {name!r} is held here (any more)", code="stream_not_found")
        return live

    def resumable(
        self,
        request: Request,
        exchange: Exchange,
        tokens: TokenStream,
        make: Callable[[Exchange], ASGIApp],
    ) -> ASGIApp:
        """The response that `make` makes for an exchange, resumable where the server is set so."""
        if not self.enabled or request.scope.get(NEVER):
            return make(exchange)

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            name = stream_id(self.worker, given_tag(request.headers.get(HOME)))
            live = Live(name, exchange.path, self._grace_s, self._max_bytes)
            inside = copy.copy(exchange)  # what the writer writes to; no client can stall it
            inside.send, inside.transport, inside.cycle = live.send, None, None
            exchange.tokens = tokens
            live.on_read = exchange.touch
            self._live[name] = live

            def take_over() -> None:
                exchange.detail, exchange.error = inside.detail, inside.error

            async def told_send(message: Message) -> None:
                if message["type"] == "http.response.body" and not message.get("more_body"):
                    take_over()  # the edge notes down how it ended before the last byte leaves
                await send(message)

            try:
                await _both(live, make(inside), exchange, scope, receive, told_send)
            finally:
                take_over()
                del self._live[name]
                self._keep(live)

        return answer

    def _keep(self, live: Live) -> None:
        """The last events may not have arrived."""
        if live.headers is None or live.given_up:
            return
        self._ended[live.name] = live
        self._ended_bytes += live.buffer.size_bytes
        while self._ended_bytes > KEPT_ENDED * self._max_bytes:
            self._forget(next(iter(self._ended)))
        asyncio.get_running_loop().call_later(self._grace_s, self._forget, live.name)

    def _forget(self, name: str) -> None:
        if (live := self._ended.pop(name, None)) is not None:
            self._ended_bytes -= live.buffer.size_bytes


async def _both(
    live: Live, app: ASGIApp, exchange: Exchange, scope: Scope, receive: Receive, send: Send
) -> None:
    """Write, and read for the connection that asked. Raises what came before the first byte."""

    async def write() -> None:
        try:
            await app(scope, live.receive, live.send)
        finally:
            live.end()

    writer = asyncio.create_task(write())
    reader = asyncio.create_task(deliver(live, 0, exchange, receive, send))
    try:
        await writer
        await reader
    finally:
        for task in (writer, reader):
            task.cancel()
        await asyncio.gather(writer, reader, return_exceptions=True)


async def deliver(live: Live, after: int, exchange: Exchange, receive: Receive, send: Send) -> None:
    """Read for one connection, until the end, or until it or its place is gone."""

    async def read() -> None:
        headers = await live.begun()
        if headers is None:
            return
        await send({"type": "http.response.start", "status": 200, "headers": list(headers)})
        async with aclosing(live.follow(after)) as events:
            async for data in events:
                await exchange.write(data)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.create_task(read()), asyncio.create_task(watch())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if live.headers is None:
            live.give_up()  # it left without having heard of the stream
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    if isinstance(results[0], Exception):
        raise results[0]


def split_event_id(given: str, stream: str | None) -> tuple[str, int]:
    """Stream and number of a Last-Event-ID. stream: if it is known otherwise, a number will do.

    Raises InvalidRequest.
    """
    match = _EVENT.fullmatch(given)
    name = match and (match[1] or stream)
    if match is None or name is None or (stream is not None and name != stream):
        raise InvalidRequest("Last-Event-ID is no id of such a stream", param="Last-Event-ID")
    return name, int(match[2])
