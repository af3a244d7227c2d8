"""The outermost layer: request ids, API keys, counting, the access log, send times.

Pure ASGI: a task and a queue a request, as BaseHTTPMiddleware needs, would cost more than the rest.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Collection, Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.api import chat_socket, page
from headrace.api.connection import CYCLE
from headrace.api.errors import response_of
from headrace.api.exchange import Exchange, Exchanges
from headrace.api.keys import Keys
from headrace.api.recorder import HEADER as RECORD
from headrace.api.recorder import Recorder
from headrace.api.seats import Seats
from headrace.api.spans import begin_trace, end_trace
from headrace.errors import Forbidden, HeadraceError, Unauthorized
from headrace.observe.metrics import ApiMetrics
from headrace.observe.trace_context import trace_context
from headrace.observe.tracing import Tracer
from headrace.request_path import one_spelling
from headrace.web_page import same_origin

access = logging.getLogger("headrace.access")

OPEN_PATHS = frozenset({"/health", "/ready"})  # probes carry no key
# Other POSTs are answered by the engine.
SEATLESS_PATHS = frozenset({"/tokenize", "/detokenize", "/v1/messages/count_tokens"})
LAST_EVENT = b"last-event-id"
QUIET_PATHS = OPEN_PATHS | {"/metrics"}  # asked every few seconds: logged at debug level
REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class Edge:
    """Wraps the Starlette app; knows every exchange from its first header to its last byte."""

    def __init__(
        self,
        app: ASGIApp,
        paths: Iterable[str],
        metrics: ApiMetrics,
        exchanges: Exchanges,
        keys: Keys,
        seats: Seats,
        origins: Collection[str] = (),
        recorder: Recorder | None = None,
        tracer: Tracer | None = None,
        *,
        resumes: Collection[str] = (),
    ) -> None:
        """origins: of pages that may open a WebSocket, beside the server's own. resumes: paths
        whose streams outlive their connection. recorder, tracer: hear of every request that takes a
        seat."""
        self._app = app
        self._paths = frozenset(paths)  # known routes: other paths share one label
        self._metrics = metrics
        self._exchanges = exchanges
        self._keys = keys
        self._seats = seats
        self._origins = origins
        self._recorder = recorder
        self._tracer = tracer
        self._resumes = resumes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._open_socket(scope, receive, send)
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["path"] = one_spelling(scope["raw_path"])  # decoded, `%2F` would part names
        headers = dict(scope["headers"])
        transport = scope.get("state", {}).get("transport")
        exchange = Exchange(_request_id(headers), send, transport, scope["path"], scope.get(CYCLE))
        scope["headrace.exchange"] = exchange
        id_header = (b"x-request-id", exchange.request_id.encode())

        seated = settled = False
        whole = False  # the answer has been sent

        def settle() -> None:
            nonlocal settled
            if settled:
                return
            settled = True
            if seated:
                self._seats.leave()
            self._record(scope, exchange)

        async def timed_send(message: Message) -> None:
            nonlocal whole
            last = message["type"] == "http.response.body" and not message.get("more_body")
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                message["headers"] = [*message.get("headers", ()), id_header]
            elif last:
                settle()  # who has seen the end finds it counted, and the seat free
            exchange.sending_since_s = time.monotonic()
            await send(message)
            exchange.sending_since_s = 0.0
            exchange.sent_s = time.monotonic()
            whole = last

        self._exchanges.add(exchange)
        answer = self._app
        try:
            seated = self._let_in(scope, headers)
            exchange.key = self._keys.name(headers)
            exchange.admin = page.is_data(scope["path"]) and self._keys.is_admin(headers)
            self._follow(exchange, scope, headers, seated=seated)
        except HeadraceError as error:
            answer = response_of(error, scope)
        try:
            await answer(scope, receive, timed_send)
        except Exception:
            if not whole:
                raise  # the server cuts the connection: all that can still be said
            # It was logged and answered; the connection is as good as ever.
        finally:
            settle()
            self._exchanges.remove(exchange)

    async def _open_socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A WebSocket: its requests come back here as HTTP. Without a key it is never opened."""
        headers = dict(scope["headers"])
        try:
            self._check_key(headers)
            if not same_origin(headers, self._origins):
                raise Forbidden("a page of another origin may not open a WebSocket here")
        except HeadraceError as error:
            await response_of(error, scope)(scope, receive, send)
            return
        await chat_socket.ChatSocket(self, scope, receive, send).run()

    def _let_in(self, scope: Scope, headers: dict[bytes, bytes]) -> bool:
        """Before the body is read. Whether a seat was taken; raises Unauthorized or Busy."""
        path = scope["path"]
        if path not in OPEN_PATHS and (page.is_data(path) or not page.is_page(path)):
            self._check_key(headers)
        if scope["method"] != "POST" or path not in self._paths or path in SEATLESS_PATHS:
            return False
        if path in self._resumes and any(n == LAST_EVENT and v for n, v in scope["headers"]):
            return False  # back to a stream that has its seat
        self._seats.take()
        return True

    def _follow(
        self, exchange: Exchange, scope: Scope, headers: dict[bytes, bytes], *, seated: bool
    ) -> None:
        """Note what becomes of it. Raises InvalidRequest for what a header asks in vain."""
        if seated and self._tracer is not None:
            facts = exchange.path, exchange.request_id, exchange.arrived_s
            exchange.trace = begin_trace(self._tracer, scope["headers"], *facts)
            exchange.trace_id = exchange.trace.id
        elif (context := trace_context(scope["headers"])) is not None:
            exchange.trace_id = context.id
        if seated and self._recorder is not None:
            admin = RECORD in headers and self._keys.is_admin(headers)
            exchange.record = self._recorder.open(exchange, headers, admin=admin)

    def _check_key(self, headers: dict[bytes, bytes]) -> None:
        if not self._keys.admit(headers):
            raise Unauthorized("send `Authorization: Bearer KEY` or `x-api-key: KEY`")

    def _record(self, scope: Scope, exchange: Exchange) -> None:
        path = scope["path"] if scope["path"] in self._paths else "other"
        status = exchange.error.status if exchange.error else exchange.status or 500
        if exchange.record is not None and self._recorder is not None:
            code = exchange.error.code if exchange.error is not None else ""
            self._recorder.close(exchange.record, status, code)
        if exchange.trace is not None:
            end_trace(exchange.trace, exchange.record, status)
        of_page = page.is_page(scope["path"])
        if not of_page:  # it looks every second: its own requests would be most of all
            self._metrics.count_request(path, status)
        access.log(
            logging.DEBUG if of_page or path in QUIET_PATHS else logging.INFO,
            "%s %s %d %.1f ms id=%s%s",
            scope["method"],
            path,
            status,
            (time.monotonic() - exchange.arrived_s) * 1000,
            exchange.request_id,
            exchange.detail + (f" trace={exchange.trace_id}" if exchange.trace_id else ""),
        )


def _request_id(headers: dict[bytes, bytes]) -> str:
    given = headers.get(b"x-request-id", b"")
    return given.decode() if REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
