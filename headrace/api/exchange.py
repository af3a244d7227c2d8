"""One HTTP request as the edge sees it, and the sweep that finds silent and stuck ones."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from starlette.requests import Request
from starlette.types import Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from headrace.api.connection import reset, takes_chunks, write_chunk
from headrace.api.record import Record
from headrace.engine.token_stream import TokenStream
from headrace.errors import HeadraceError, TimedOut
from headrace.observe.tracing import Trace

log = logging.getLogger("headrace.api")


class Exchange:
    """From the first header to the last byte. Times are time.monotonic()."""

    __slots__ = (
        "admin",
        "arrived_s",
        "cycle",
        "detail",
        "error",
        "key",
        "path",
        "record",
        "request_id",
        "send",
        "sending_since_s",
        "sent_s",
        "status",
        "tokens",
        "trace",
        "trace_id",
        "transport",
    )

    def __init__(
        self,
        request_id: str,
        send: Send,
        transport: asyncio.Transport | None = None,
        path: str = "",
        cycle: RequestResponseCycle | None = None,
    ) -> None:
        self.send = send  # the server's own
        self.cycle = cycle  # what `send` belongs to; None: nothing can be written past it
        self.request_id = request_id
        self.path = path
        self.key = ""  # the name of the API key that let it in; see `api.keys`
        self.admin = False  # it may see the requests of others
        self.record: Record | None = None  # of a request of the model
        self.trace: Trace | None = None  # where spans are exported
        self.trace_id = ""  # of that, or of the caller's
        self.transport = transport  # None in an in-process test: nothing can get stuck there
        self.arrived_s = time.monotonic()
        self.sent_s = self.arrived_s  # when the last bytes went out
        self.sending_since_s = 0.0  # a send that has not returned; 0 = none
        self.status = 0
        self.error: HeadraceError | None = None  # ended the stream after its start
        self.detail = ""  # for the access log: counts, never text
        self.tokens: TokenStream | None = None  # set while a stream may want keep-alives

    async def write(self, data: bytes) -> None:
        """One piece of a body that has begun, past the layers that only care for its start."""
        self.sending_since_s = time.monotonic()
        await self.send({"type": "http.response.body", "body": data, "more_body": True})
        self.sending_since_s = 0.0
        self.sent_s = time.monotonic()

    @property
    def writable(self) -> bool:
        """A piece of the body can be written without waiting: `write_now`."""
        return self.cycle is not None and takes_chunks(self.cycle)

    def write_now(self, data: bytes) -> None:
        """As `write`, at once. Needs: `writable`."""
        assert self.cycle is not None, "writable"
        write_chunk(self.cycle, data)
        self.sent_s = time.monotonic()

    def touch(self) -> None:
        """Its client got something by another connection."""
        self.sent_s = time.monotonic()


def exchange_of(request: Request) -> Exchange:
    """The Exchange that the edge made for this request."""
    exchange = request.scope["headrace.exchange"]
    assert isinstance(exchange, Exchange), "the edge wraps every request"
    return exchange


class Exchanges:
    """All open exchanges of this process."""

    def __init__(
        self,
        stall_timeout_s: float,
        keepalive_s: float,
        on_sweep: Callable[[], None],
        *,
        request_timeout_s: float = 0.0,
        first_token_timeout_s: float = 0.0,
    ) -> None:
        """A time of 0 is no limit, but for `stall_timeout_s`."""
        self._on_sweep = on_sweep
        self.open: set[Exchange] = set()
        self._left = asyncio.Event()  # one was removed
        self._stall_timeout_s = stall_timeout_s
        self._keepalive_s = keepalive_s
        self._request_timeout_s = request_timeout_s
        self._first_token_timeout_s = first_token_timeout_s
        times_s = (stall_timeout_s, keepalive_s, request_timeout_s, first_token_timeout_s)
        self._period_s = max(0.01, min(1.0, *(time_s / 4 for time_s in times_s if time_s)))

    def add(self, exchange: Exchange) -> None:
        """A request came."""
        self.open.add(exchange)

    def remove(self, exchange: Exchange) -> None:
        """Its last byte was handed over."""
        self.open.discard(exchange)
        self._left.set()

    async def empty(self, timeout_s: float) -> None:
        """Return when none is open, or after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.open:
                    self._left.clear()
                    await self._left.wait()

    async def sweep(self) -> None:
        """Run for ever: nudge silent streams, end late ones, cut clients that take no bytes.

        One sweep for all streams costs less than a timer on every send and every token.
        """
        while True:
            await asyncio.sleep(self._period_s)
            self._on_sweep()
            now_s = time.monotonic()
            for exchange in list(self.open):
                since_s = exchange.sending_since_s
                if since_s and now_s - since_s > self._stall_timeout_s:
                    self._cut(exchange, now_s - since_s)
                elif exchange.tokens is None:
                    continue
                elif late := self._late(exchange, now_s):
                    exchange.tokens.fail(late)
                elif now_s - exchange.sent_s >= self._keepalive_s:
                    exchange.tokens.nudge()

    def _late(self, exchange: Exchange, now_s: float) -> TimedOut | None:
        """What to tell a request whose time is up."""
        assert exchange.tokens is not None, "nothing runs"
        took_s = now_s - exchange.arrived_s
        if self._request_timeout_s and took_s > self._request_timeout_s:
            return TimedOut(f"no whole answer in {self._request_timeout_s:g} s")
        limit_s = self._first_token_timeout_s
        if limit_s and took_s > limit_s and not exchange.tokens.first_token_s:
            return TimedOut(f"no first token in {limit_s:g} s", code="first_token_timed_out")
        return None

    def end_all(self, error: HeadraceError) -> None:
        """End every open stream with an error; the drain deadline has come."""
        for exchange in list(self.open):
            if exchange.tokens is not None:
                exchange.tokens.fail(type(error)(error.message))

    def _cut(self, exchange: Exchange, stuck_s: float) -> None:
        log.warning("%s: the client took no bytes for %.1f s", exchange.request_id, stuck_s)
        exchange.sending_since_s = 0.0
        if exchange.transport is not None:
            reset(exchange.transport)
