"""The worker's side: a TCP connection asks one thing at a time, then waits for the next."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from typing import Any, Protocol, cast

import httptools

MAX_HEAD_BYTES = 64 * 1024
MAX_FETCHED_BYTES = 4 * 2**20  # of an answer that the gateway itself asked for
MOST_IDLE = 256  # connections to one worker that are kept open
SIZES = (b"content-length", b"transfer-encoding")  # say where a body ends
Headers = list[tuple[bytes, bytes]]  # names in lower case


class Answer(Protocol):
    """Who gets what a worker says. After `ended` or `broken` nothing more comes."""

    def began(self, status: int, headers: Headers) -> None: ...
    def said(self, data: bytes) -> None: ...
    def ended(self) -> None: ...
    def broken(self, reason: str, stale: bool) -> None:
        """stale: an idle connection was closed by the worker just as it was used; ask again."""


class Upstream(asyncio.Protocol):
    """One connection. It belongs to its pool while idle, to one `Answer` from `ask` to its end."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._answer: Answer | None = None
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)  # of all its answers, one by one
        self._used = False
        self._heard = False  # a byte of this answer came

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        no_delay(self._transport)

    def ask(self, request: bytes, answer: Answer, *, last: bool = False) -> None:
        """Send a whole request. last: the connection is whoever asks's own, and ends with it."""
        assert self._answer is None, "one request at a time"
        assert self._transport is not None, "connected"
        self._answer, self._heard, self._last = answer, False, last
        self._status = 0
        self._parts: list[bytes] = []
        self._headers: Headers = []
        self._head_bytes = 0
        self._sized = self._complete = self._keep = False
        self._transport.write(request)

    def close(self) -> None:
        """Cut it at once; its answer is told nothing more."""
        self._answer = None
        if self._transport is not None:
            self._transport.abort()

    def pause(self, paused: bool) -> None:
        """The client does not keep up, or does again."""
        if self._transport is not None and not self._transport.is_closing():
            if paused:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    # ------------------------------------------------------------ asyncio

    def data_received(self, data: bytes) -> None:
        self._pool.heard()
        if self._answer is None:
            self.close()  # an idle worker has nothing to say
            return
        self._heard = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            if not self._complete:
                self._break("the worker's answer is not HTTP")
                return
            self._keep = False  # what stands behind an answer was asked by nobody
        if self._parts and self._answer is not None:
            parts, self._parts = self._parts, []
            self._answer.said(parts[0] if len(parts) == 1 else b"".join(parts))
        if self._complete and self._answer is not None:
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.discard(self)
        if self._answer is None:
            return
        if self._status and not self._sized:
            self._keep = False
            self._end()  # the end of the connection is the end of the body
        else:
            stale = self._used and not self._heard
            self._break("the worker closed the connection", stale)

    def _break(self, reason: str, stale: bool = False) -> None:
        answer = self._answer
        self.close()
        if answer is not None:
            answer.broken(reason, stale)

    def _end(self) -> None:
        answer, self._answer = self._answer, None
        self._used = True
        if self._keep:
            self._pool.give_back(self)
        elif self._transport is not None:
            self._transport.close()
        if answer is not None:
            answer.ended()

    # ------------------------------------------------------------ httptools

    def on_message_begin(self) -> None:
        if self._complete:
            raise ValueError("more than one answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > MAX_HEAD_BYTES:
            raise ValueError("the head is too large")
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            self._headers.clear()
            return
        self._status = status
        self._sized = status in (204, 304)
        for name, _ in self._headers:
            if name in SIZES:
                self._sized = True
        if self._answer is not None:
            self._answer.began(status, self._headers)

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_message_complete(self) -> None:
        if self._status:
            self._complete = True
            self._keep = self._parser.should_keep_alive() and not self._last


class Pool:
    """Connections to one worker."""

    def __init__(
        self,
        host: str,
        port: int,
        timeout_s: float,
        tls: ssl.SSLContext | None = None,
        name: str = "",
    ) -> None:
        """tls: who is trusted to be called `name`; None: plain text."""
        self._host, self._port, self._timeout_s = host, port, timeout_s
        self._tls, self._name = tls, name if tls is not None else None
        self._idle: list[Upstream] = []
        self.heard_s = 0.0  # loop time of the last byte of this worker

    def heard(self) -> None:
        """A byte came: whoever sends lives."""
        self.heard_s = time.monotonic()

    def take(self) -> Upstream | None:
        """An idle connection, the one used last."""
        return self._idle.pop() if self._idle else None

    async def connect(self) -> Upstream:
        """A new connection. Raises OSError or TimeoutError."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._timeout_s):
                _, made = await loop.create_connection(
                    lambda: Upstream(self),
                    self._host,
                    self._port,
                    ssl=self._tls,
                    server_hostname=self._name,
                )
        except ValueError as error:  # as for a label of 64 characters
            raise OSError(f"{self._name or self._host!r} is no name of a host: {error}") from None
        return made

    def give_back(self, connection: Upstream) -> None:
        """It has no request now."""
        if len(self._idle) < MOST_IDLE:
            self._idle.append(connection)
        else:
            connection.close()

    def discard(self, connection: Upstream) -> None:
        """It is lost."""
        if connection in self._idle:
            self._idle.remove(connection)

    def close(self) -> None:
        """Close what is idle."""
        for connection in self._idle[:]:
            connection.close()
        self._idle.clear()


def no_delay(transport: asyncio.Transport) -> None:
    """No waiting for acknowledgements: it costs tens of milliseconds on every first token."""
    tcp: Any = transport.get_extra_info("socket")
    if tcp is not None and tcp.family in (socket.AF_INET, socket.AF_INET6):
        tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class _Whole:
    """An answer that is wanted whole."""

    def __init__(self) -> None:
        self.status = 0
        self.body = bytearray()
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def began(self, status: int, headers: Headers) -> None:
        self.status = status

    def said(self, data: bytes) -> None:
        if len(self.body) + len(data) > MAX_FETCHED_BYTES:
            self.broken(f"the answer has more than {MAX_FETCHED_BYTES} bytes", False)
        elif not self.done.done():
            self.body += data

    def ended(self) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def broken(self, reason: str, stale: bool) -> None:
        if not self.done.done():
            self.done.set_exception(ConnectionError(reason))


async def fetch(pool: Pool, request: bytes, timeout_s: float) -> tuple[int, bytes]:
    """Status and body of one request on a connection of its own. Raises OSError, TimeoutError."""
    async with asyncio.timeout(timeout_s):
        connection = await pool.connect()
        try:
            answer = _Whole()
            connection.ask(request, answer, last=True)
            await answer.done
            return answer.status, bytes(answer.body)
        finally:
            connection.close()
