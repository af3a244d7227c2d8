"""The client's side: one TCP connection, HTTP/1.1, bounded in time and bytes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, cast

import httptools
import msgspec

from headrace.error_bodies import body_of
from headrace.errors import ClientError, HeadraceError, InvalidRequest, TooLarge, TooSlow
from headrace.gateway.answers import head, headers_of
from headrace.gateway.upstream import Headers, no_delay
from headrace.request_path import parts_of, target_of

log = logging.getLogger("headrace.gateway")

MAX_HEAD_BYTES = 64 * 1024
MAX_PIPELINED = 64
READ_BYTES = 256 * 1024  # most that one read gives
KEEP_ALIVE_S = 75.0
JSON = (b"content-type", b"application/json")


class Request(msgspec.Struct):
    """A whole request. Header names are in lower case; of a repeated one, `known` has the last."""

    method: bytes
    target: bytes  # path and query; the path in the spelling of `path`
    path: str  # see headrace.request_path
    headers: Headers
    known: dict[bytes, bytes]
    body: bytes
    chunks: bool  # the client knows chunked bodies (HTTP/1.1)
    bare: bool = False  # HEAD: as GET, and the answer's body stays here


class Serving(Protocol):
    """Whoever answers a request: it calls `answer`, or `begin`, `send` and `finish`."""

    def client_gone(self) -> None: ...
    def client_slow(self, slow: bool) -> None: ...


class Client(asyncio.Protocol):
    """Requests come in whole, one after another; the next waits for the end of an answer."""

    def __init__(
        self,
        handle: Callable[[Client, Request], Serving | None],
        open_: set[Client],
        max_body_bytes: int,
    ) -> None:
        self._handle, self._open, self._max_body_bytes = handle, open_, max_body_bytes
        self._parser = httptools.HttpRequestParser(self)
        self._waiting: deque[Request] = deque()
        self._waiting_bytes = 0
        self._serving: Serving | None = None
        self._answering = self._chunked = self._chunks = self._bare = False
        self._keep, self._last = True, False  # last: nothing behind this answer
        self._since_s = time.monotonic()
        self._receiving = False
        self._unparsed_bytes = 0
        self._in_head = True
        self._fed = False  # a part of a body came in this read
        self._behind = False  # more is written than the client takes
        self._target, self._headers = b"", Headers()
        self._taken_s, self._unsent_bytes = self._since_s, 0

    # ------------------------------------------------------------ asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        no_delay(self._transport)
        self._open.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._open.discard(self)
        self._waiting.clear()
        serving, self._serving = self._serving, None
        if serving is not None:
            serving.client_gone()

    def pause_writing(self) -> None:
        self._behind = True
        if self._serving is not None:
            self._serving.client_slow(True)

    def resume_writing(self) -> None:
        self._behind = False
        if self._serving is not None:
            self._serving.client_slow(False)

    def data_received(self, data: bytes) -> None:
        while data and not self._last:
            data = self._read(data)

    def _read(self, data: bytes) -> bytes:
        """Returns what has to be read yet."""
        self._large = self._unparsed_bytes + len(data) > MAX_HEAD_BYTES  # a head may be too large
        self._fed = False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            return self._declined(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            inner = error.__context__  # what a callback raised
            if inner is None or isinstance(inner, ClientError):
                self._refuse(inner or InvalidRequest("this is no HTTP request"))
            else:
                log.error("a request failed", exc_info=inner)
                self.abort()
        else:
            # Of a head that is not whole, or behind a body: trailers, which nobody asked for.
            beside = self._in_head or (self._receiving and not self._fed)
            self._unparsed_bytes = self._unparsed_bytes + len(data) if beside else 0
            if self._large and beside and self._head_too_large():
                self._refuse(InvalidRequest("the headers are too large"))
        return b""

    # ------------------------------------------------------------ httptools

    def on_message_begin(self) -> None:
        self._target, self._headers = b"", Headers()
        self._parts: list[bytes] = []
        self._body_bytes = 0
        self._in_head = self._receiving = True
        self._since_s = time.monotonic()

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # else it is a trailer, and could pass for a header
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._parser.should_upgrade():
            return  # the parser stops here and raises HttpParserUpgrade
        self._in_head = False
        if self._large and self._head_too_large():
            raise InvalidRequest("the headers are too large")
        self._known = dict(self._headers)
        size = self._known.get(b"content-length", b"0")
        if size.isdigit() and int(size) > self._max_body_bytes:
            raise TooLarge(f"the body has more than {self._max_body_bytes} bytes")
        if self._known.get(b"expect", b"").lower() == b"100-continue" and not self._answering:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)
        self._fed = True
        self._body_bytes += len(body)
        if self._body_bytes + self._waiting_bytes > self._max_body_bytes:
            raise TooLarge(f"the body has more than {self._max_body_bytes} bytes")

    def on_message_complete(self) -> None:
        if self._parser.should_upgrade():
            return
        self._receiving = False
        if len(self._waiting) >= MAX_PIPELINED:
            raise InvalidRequest("too many pipelined requests")
        self._keep = self._keep and self._parser.should_keep_alive()
        body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts = []
        self._waiting_bytes += len(body)
        path, query = parts_of(self._target)
        method = self._parser.get_method()
        request = Request(
            b"GET" if method == b"HEAD" else method,
            target_of(path, query),
            path,
            self._headers,
            self._known,
            body,
            self._parser.get_http_version() == "1.1",
            method == b"HEAD",
        )
        self._waiting.append(request)
        if not self._answering:
            self._next()

    def _head_too_large(self) -> bool:
        """Counted only where so much came without a whole head, not header by header."""
        head_bytes = len(self._target) + sum(len(n) + len(v) + 4 for n, v in self._headers)
        return head_bytes > MAX_HEAD_BYTES or self._unparsed_bytes > MAX_HEAD_BYTES + READ_BYTES

    def _declined(self, rest: bytes) -> bytes:
        """The client would also speak another protocol: go on in this one (RFC 9110, 7.8). Returns
        its request without the offer, and what came behind it."""
        method = self._parser.get_method()
        if method == b"CONNECT":
            self._refuse(InvalidRequest("this server is no proxy"))
            return b""
        lines = [b"%b %b HTTP/1.1" % (method, self._target)]
        offers = (b"upgrade", b"connection", b"http2-settings")
        lines += [b"%b: %b" % pair for pair in self._headers if pair[0] not in offers]
        self._parser = httptools.HttpRequestParser(self)
        return b"\r\n".join(lines) + b"\r\n\r\n" + rest

    # ------------------------------------------------------------ answering

    def _next(self) -> None:
        request = self._waiting.popleft()
        self._waiting_bytes -= len(request.body)
        self._answering, self._chunks, self._bare = True, request.chunks, request.bare
        self._taken_s = time.monotonic()
        serving = self._handle(self, request)
        if self._answering:
            self._serving = serving
            if self._behind and serving is not None:
                serving.client_slow(True)

    def answer(self, status: int, headers: Headers, body: bytes, more: bytes = b"") -> None:
        """A whole answer. more: headers as they are written, each with its end of line."""
        last = b"content-length: %d\r\n" % len(body)
        whole = head(status, headers, more, last + self._connection())
        self._transport.write(whole if self._bare else whole + body)
        self._over()

    def refuse(
        self,
        error: HeadraceError,
        path: str,
        more: bytes = b"",
        request_id: str | None = None,
    ) -> None:
        """A whole answer that says what is wrong. more: see `answer`."""
        body = msgspec.json.encode(body_of(error, path, request_id))
        self.answer(error.status, [JSON, *headers_of(error)], body, more)

    def begin(self, status: int, headers: Headers, data: bytes, more: bytes = b"") -> None:
        """The head of an answer whose length nobody knows, and its first bytes. more: see
        `answer`.
        """
        self._chunked = self._chunks
        self._keep = self._keep and self._chunks
        last = (b"transfer-encoding: chunked\r\n" if self._chunked else b"") + self._connection()
        self._transport.write(head(status, headers, more, last) + self._frame(data))

    def send(self, data: bytes) -> None:
        """More of it."""
        if data:
            self._transport.write(self._frame(data))

    def finish(self, data: bytes = b"") -> None:
        """The end of it."""
        self._transport.write(self._frame(data) + (b"0\r\n\r\n" if self._chunked else b""))
        self._over()

    def abort(self) -> None:
        """Cut it: what was sent cannot be completed."""
        self._serving = None
        self._transport.abort()

    def _frame(self, data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data) if self._chunked and data else data

    def _connection(self) -> bytes:
        return b"" if self._keep or self._waiting else b"connection: close\r\n"

    def _over(self) -> None:
        self._serving, self._answering, self._chunked = None, False, False
        self._since_s = time.monotonic()
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._next_if_open)
        elif not self._keep or self._last:
            self._transport.close()

    def _next_if_open(self) -> None:
        if self._waiting and not self._answering and not self._transport.is_closing():
            self._next()

    def _refuse(self, error: ClientError) -> None:
        """What came is no request: answer and close. An answer under way is completed first."""
        self._last, self._keep, self._receiving = True, False, False
        if self._answering or self._waiting:
            return
        self._chunked = self._bare = False
        path = ""
        if isinstance(error, TooLarge):  # its head was read
            with suppress(InvalidRequest):
                path, _ = parts_of(self._target)
        self.refuse(error, path)

    # ------------------------------------------------------------ time

    def close_idle(self) -> None:
        """The gateway stops: nothing new on this connection."""
        self._keep = False
        if not self._answering and not self._waiting:
            self._transport.close()

    def check(self, now_s: float, receive_s: float, stall_s: float) -> None:
        """End what takes too long. Called about once a second."""
        unsent = self._transport.get_write_buffer_size()
        if not unsent or unsent < self._unsent_bytes:
            self._taken_s = now_s
        self._unsent_bytes = unsent
        if now_s - self._taken_s > stall_s:
            self._transport.abort()
        elif self._answering or self._transport.is_closing():
            return
        elif self._receiving and now_s - self._since_s > receive_s:
            self._refuse(TooSlow(f"no whole request in {receive_s:g} s"))
        elif not self._receiving and now_s - self._since_s > KEEP_ALIVE_S:
            self._transport.close()
