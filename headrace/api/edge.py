"""The outermost layer: request ids, API keys, counting, the access log, send times.

Pure ASGI: a task and a queue a request, as BaseHTTPMiddleware needs, would cost more than the rest.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.api import chat_socket
from headrace.api.errors import response_of
from headrace.api.exchange import Exchange, Exchanges
from headrace.errors import ClientError, Forbidden, Unauthorized
from headrace.observe.metrics import ApiMetrics

access = logging.getLogger("headrace.access")

OPEN_PATHS = frozenset({"/health", "/ready"})  # probes carry no key
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
        api_key: str,
    ) -> None:
        self._app = app
        self._paths = frozenset(paths)  # known routes: other paths share one label
        self._metrics = metrics
        self._exchanges = exchanges
        self._key = hashlib.sha256(api_key.encode()).digest() if api_key else b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._open_socket(scope, receive, send)
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        transport = scope.get("state", {}).get("transport")
        exchange = Exchange(_request_id(headers), send, transport)
        scope["headrace.exchange"] = exchange
        id_header = (b"x-request-id", exchange.request_id.encode())

        async def timed_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                message["headers"] = [*message.get("headers", ()), id_header]
            exchange.sending_since_s = time.monotonic()
            await send(message)
            exchange.sending_since_s = 0.0
            exchange.sent_s = time.monotonic()

        self._exchanges.add(exchange)
        try:
            if self._key and scope["path"] not in OPEN_PATHS and not self._knows(headers):
                await response_of(Unauthorized("send `Authorization: Bearer KEY`"))(
                    scope, receive, timed_send
                )
            else:
                await self._app(scope, receive, timed_send)
        finally:
            self._exchanges.remove(exchange)
            self._record(scope, exchange)

    async def _open_socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A WebSocket: its requests come back here as HTTP. Without a key it is never opened."""
        headers = dict(scope["headers"])
        if self._key and not self._knows(headers):
            error: ClientError | None = Unauthorized("send `Authorization: Bearer KEY`")
        elif not chat_socket.same_origin(headers):
            error = Forbidden("a page of another origin may not open a WebSocket here")
        else:
            error = None
        if error is None:
            await chat_socket.ChatSocket(self, scope, receive, send).run()
            return
        await response_of(error)(scope, receive, send)

    def _knows(self, headers: dict[bytes, bytes]) -> bool:
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        return hmac.compare_digest(digest, self._key) and scheme.lower() == b"bearer"

    def _record(self, scope: Scope, exchange: Exchange) -> None:
        path = scope["path"] if scope["path"] in self._paths else "other"
        status = exchange.error.status if exchange.error else exchange.status or 500
        self._metrics.count_request(path, status)
        access.log(
            logging.DEBUG if path in QUIET_PATHS else logging.INFO,
            "%s %s %d %.1f ms id=%s%s",
            scope["method"],
            path,
            status,
            (time.monotonic() - exchange.arrived_s) * 1000,
            exchange.request_id,
            exchange.detail,
        )


def _request_id(headers: dict[bytes, bytes]) -> str:
    given = headers.get(b"x-request-id", b"")
    return given.decode() if REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
