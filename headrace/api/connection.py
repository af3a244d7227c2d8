"""One TCP connection: uvicorn's HTTP/1 protocol, bounded in time and in bytes.

What uvicorn leaves open and is closed here: a request that never becomes whole, a client that does
not take the last bytes, a head or a pipeline without end, what lies behind a pipelined request when
the client leaves, HTTP/1.0 without chunks, offers to upgrade (Java's client makes one with every
request), and errors in OpenAI's shape.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import time
from typing import Any, Protocol

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from headrace.api.errors import encoded
from headrace.errors import ClientError, InvalidRequest, TooSlow, WrongMethod
from headrace.request_path import parts_of, target_of

log = logging.getLogger("headrace.api")

SOCKET_PATH = "/v1/chat/ws"  # of the one WebSocket
CYCLE = "headrace.cycle"  # in a scope: who writes the answer, see `write_chunk`
MAX_HEAD_BYTES = 64 * 1024  # request line and headers
MAX_PIPELINED = 64  # requests sent ahead of the answer to the first
READ_BYTES = 256 * 1024  # most that one read gives
SEND_BUFFER_BYTES = 256 * 1024  # the kernel would hold megabytes for each slow reader


class Checked(Protocol):
    """A connection of either kind. See `Connections.check`."""

    def check(self, now_s: float) -> None: ...


class Connections:
    """All open connections of this process. `check` is to be called about once a second."""

    def __init__(self, receive_timeout_s: float, stall_timeout_s: float) -> None:
        self.receive_timeout_s = receive_timeout_s
        self.stall_timeout_s = stall_timeout_s
        self.open: set[Checked] = set()

    def check(self) -> None:
        """End those whose client sends no whole request, or does not take its last answer.

        One sweep over all costs less than timers on every request.
        """
        now_s = time.monotonic()
        for connection in list(self.open):
            connection.check(now_s)


class Connection(HttpToolsProtocol):
    """`cycle` is the request that came last, `_running` the one that is being answered; they differ
    when requests are pipelined.
    """

    def __init__(self, connections: Connections, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._connections = connections
        self._running: RequestResponseCycle | None = None
        self._receiving_since_s = time.monotonic()  # a request is awaited; 0 = it is here, whole
        self._head_bytes = 0  # of complete parts of the head
        self._unparsed_bytes = 0  # came while the head was not complete; may begin with a body
        self._in_head = True
        self._deaf = False  # nothing that still comes is a request
        self._unsent_bytes = 0
        self._taken_s = time.monotonic()  # when the client last took bytes or had none to take

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        tcp = transport.get_extra_info("socket")
        if tcp is not None and tcp.family in (socket.AF_INET, socket.AF_INET6):
            tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            tcp.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self.app_state = {**self.app_state, "transport": transport}
        self._connections.open.add(self)
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.open.discard(self)
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True  # uvicorn tells only `cycle`
            self._running.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)

    # ------------------------------------------------------------ receiving

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._deaf:
            return
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            rest = data[upgrade.args[0] :]
            if self._offers_socket():
                self._hand_over(rest)
            else:
                self._decline(rest)
        except httptools.HttpParserError:
            self._refuse(InvalidRequest("this is not an HTTP request that this server reads"))
        else:
            self._unparsed_bytes = self._unparsed_bytes + len(data) if self._in_head else 0
            if self._unparsed_bytes > MAX_HEAD_BYTES + READ_BYTES:
                self._refuse(InvalidRequest("the headers are too large"))

    def on_message_begin(self) -> None:
        self._receiving_since_s = time.monotonic()
        self._in_head = True
        self._head_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # the parser stops here and raises HttpParserUpgrade
        self._in_head = False
        if not self.url.startswith(b"/"):
            self.url = target_of(*parts_of(self.url))  # uvicorn takes none without a path
        super().on_headers_complete()
        if len(self.pipeline) > MAX_PIPELINED:
            raise ValueError("too many pipelined requests")  # the parser makes an error of it
        self.flow.resume_reading()  # else nobody would notice that the client leaves

    def on_body(self, body: bytes) -> None:
        if not self.parser.should_upgrade():
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            self._receiving_since_s = 0.0
            super().on_message_complete()

    def _count(self, part_bytes: int) -> None:
        """A part of the head is complete. Parts that are not are counted in `data_received`."""
        self._head_bytes += part_bytes
        if self._head_bytes > MAX_HEAD_BYTES:
            raise ValueError("the headers are too large")  # the parser makes an error of it

    def _offers_socket(self) -> bool:
        """A WebSocket is wanted, where there is one. Nowhere else: that gets a plain answer."""
        try:
            path, _ = parts_of(self.url)
        except InvalidRequest:
            return False  # it is refused as any other that is none
        return path == SOCKET_PATH and self._get_upgrade() == b"websocket"

    def _hand_over(self, rest: bytes) -> None:
        """From here on this connection speaks WebSocket. `rest`: what came behind the head."""
        running = self._running
        if running is not None and not running.response_complete:
            self._refuse(InvalidRequest("a WebSocket cannot begin behind a pipelined request"))
            return
        self.scope["method"] = self.parser.get_method().decode()
        self.flow.resume_reading()
        self._connections.open.discard(self)
        self.handle_websocket_upgrade()
        protocol = self.transport.get_protocol()
        assert isinstance(protocol, SocketConnection), "uvicorn's ws class is ours"
        protocol.watched_by(self._connections)
        if rest:
            protocol.data_received(rest)

    def _decline(self, rest: bytes) -> None:
        """The client would also speak another protocol: go on in this one (RFC 9110, 7.8).

        The parser cannot, so a new one reads the same head without the offer.
        """
        method = self.parser.get_method().decode()
        if method == "CONNECT":
            self._refuse(WrongMethod("this server is no proxy"))
            return
        version = self.parser.get_http_version()
        lines = [f"{method} ".encode() + self.url + f" HTTP/{version}".encode()]
        for name, value in self.headers:
            if name == b"connection":
                kept = [t for t in value.split(b",") if t.strip().lower() != b"upgrade"]
                lines += [name + b": " + b",".join(kept)] if kept else []
            elif name != b"upgrade":
                lines.append(name + b": " + value)
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self.data_received(b"\r\n".join(lines) + b"\r\n\r\n" + rest)

    # ------------------------------------------------------------ answering

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        cycle.scope[CYCLE] = cycle  # type: ignore[literal-required]
        if cycle.scope["http_version"] == "1.0":
            app = _unframed(app, cycle)
        super()._start_asgi_task(cycle, app)

    @property
    def _answering(self) -> bool:
        """A request that came whole has no complete answer yet."""
        running = self._running
        return running is not None and not running.response_complete and not running.more_body

    def _refuse(self, error: ClientError) -> None:
        """Answer what is no request, and close. An answer under way is completed first."""
        self._deaf = True
        self.pipeline.clear()
        running = self._running
        if self._answering and running is not None:
            running.keep_alive = False
            return
        if running is None or running.response_complete or not running.response_started:
            body = encoded(error)
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d"
            self.transport.write(STATUS_LINE[error.status] + head % len(body) + b"\r\n\r\n" + body)
        self.transport.close()

    # ------------------------------------------------------------ time

    def check(self, now_s: float) -> None:
        """See `Connections.check`."""
        limits = self._connections
        unsent = self.transport.get_write_buffer_size()
        if not unsent or unsent < self._unsent_bytes or self._answering:
            self._taken_s = now_s  # a send that waits is watched by `Exchanges`
        self._unsent_bytes = unsent
        if now_s - self._taken_s > limits.stall_timeout_s:
            log.warning("a client took none of its last %d bytes", unsent)
            reset(self.transport)
            return
        since_s = self._receiving_since_s
        if not since_s or self._answering or self.transport.is_closing():
            return
        if now_s - since_s <= limits.receive_timeout_s:
            return
        if self._in_head and not self._unparsed_bytes:
            self.transport.close()  # it never asked for anything
        else:
            log.warning("a client sent no whole request in %.1f s", now_s - since_s)
            self._refuse(TooSlow(f"no whole request in {limits.receive_timeout_s:g} s"))


class SocketConnection(WebSocketsSansIOProtocol):
    """A connection that speaks WebSocket now: uvicorn's, and dropped when its client stalls."""

    _watcher: Connections | None = None
    _unsent_bytes = 0
    _taken_s = 0.0

    def watched_by(self, connections: Connections) -> None:
        """`connections` checks it until it is lost."""
        if self.transport.is_closing():
            return  # the handshake was refused
        self._watcher, self._taken_s = connections, time.monotonic()
        connections.open.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._watcher is not None:
            self._watcher.open.discard(self)
        super().connection_lost(exc)

    def check(self, now_s: float) -> None:
        """See `Connections.check`. What a client does not take here waits in the transport."""
        assert self._watcher is not None, "checked by whoever watches"
        unsent = self.transport.get_write_buffer_size()
        if not unsent or unsent < self._unsent_bytes:
            self._taken_s = now_s
        self._unsent_bytes = unsent
        if now_s - self._taken_s > self._watcher.stall_timeout_s:
            log.warning("a WebSocket's client took none of its last %d bytes", unsent)
            reset(self.transport)


def reset(transport: asyncio.Transport) -> None:
    """Cut the connection so that the kernel drops what it still holds for this client."""
    sock = transport.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()  # the disconnect then aborts the request in the engine


def takes_chunks(cycle: RequestResponseCycle) -> bool:
    """`write_chunk` does now what the cycle's `send` would do."""
    return (
        cycle.chunked_encoding is True
        and not cycle.flow.write_paused
        and not cycle.disconnected
        and not cycle.response_complete
    )


def write_chunk(cycle: RequestResponseCycle, data: bytes) -> None:
    """A piece of a body under way, without the layers between. Needs: `takes_chunks`, data."""
    cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


def _unframed(app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
    """`app` for an HTTP/1.0 client, which knows no chunks: the end of the connection ends a body of
    unknown length.
    """

    async def unframed_app(scope: Scope, receive: Receive, send: Send) -> None:
        sized = True

        async def unframed(message: Message) -> None:
            nonlocal sized
            if message["type"] == "http.response.start":
                sized = any(name.lower() == b"content-length" for name, _ in message["headers"])
                if not sized:
                    cycle.chunked_encoding = False
            elif not sized:  # uvicorn checks what it is told to expect
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, unframed)

    return unframed_app
