"""WebSocket /v1/chat/ws: many chat requests over one connection. docs/http.md has the frames.

A frame becomes a POST to /v1/chat/completions inside this process, and what that answers becomes
frames: checks, limits, log lines and counts of the HTTP route hold here because it is that route.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.utils import ClientDisconnected

from headrace.api.body import decode
from headrace.api.errors import CLIENT_GONE, as_ours
from headrace.api.generate import IGNORED
from headrace.api.resume import NEVER
from headrace.error_bodies import openai_body
from headrace.errors import ClientError, HeadraceError, InvalidRequest, RequestFailed

log = logging.getLogger("headrace.api")

TARGET = "/v1/chat/completions"
MAX_REQUESTS = 32  # that run at once over one connection
MAX_ID_CHARS = 64
DONE = b"[DONE]"
_HANDSHAKE = frozenset(  # headers of the socket, not of its requests
    b"connection upgrade content-length content-type x-request-id last-event-id".split()
)
_encode = msgspec.json.Encoder().encode


class Asked(msgspec.Struct):
    """One request of the connection."""

    id: str
    left: asyncio.Event  # the client gave it up, or is gone
    task: asyncio.Task[None] | None = None


class ChatSocket:
    """One connection. `run` returns when the client is gone and nothing of it runs any more."""

    def __init__(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        self._app, self._scope, self._receive, self._send = app, scope, receive, send
        self._open: dict[str, Asked] = {}
        self._count = 0

    async def run(self) -> None:
        """Accept, then serve frames until the connection ends."""
        if (await self._receive())["type"] != "websocket.connect":
            return
        await self._send({"type": "websocket.accept"})
        try:
            while (message := await self._receive())["type"] == "websocket.receive":
                await self._hear(message)
        except ClientDisconnected:
            pass  # while it was told of a mistake
        finally:
            for asked in self._open.values():
                asked.left.set()
            tasks = [asked.task for asked in self._open.values() if asked.task is not None]
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _hear(self, message: Message) -> None:
        """One frame: a request, or the end of one. What is neither is answered with an error."""
        text = message.get("text")
        try:
            if text is None:
                raise InvalidRequest("send text frames: each a JSON object")
            body = decode(text.encode())
            if body.get("type") == "abort":
                self._abort(body)
            else:
                self._begin(body)
        except ClientError as error:  # of no request that runs: it has no id
            await self.tell({"type": "error", "request_id": None, "status": error.status}, error)

    def _abort(self, body: Mapping[str, Any]) -> None:
        name = body.get("request_id")
        if not isinstance(name, str):
            raise InvalidRequest("abort needs the request_id of a request", param="request_id")
        if (asked := self._open.get(name)) is not None:
            asked.left.set()  # one that has ended needs no answer: its last frame was sent

    def _begin(self, body: dict[str, Any]) -> None:
        self._count += 1
        name = body.pop("request_id", None)
        name = str(self._count) if name is None else name
        if not isinstance(name, str) or not 1 <= len(name) <= MAX_ID_CHARS:
            raise InvalidRequest(
                f"request_id: a string of 1 to {MAX_ID_CHARS} characters", param="request_id"
            )
        if name in self._open:
            raise InvalidRequest(f"request_id {name!r} is in use", param="request_id")
        if len(self._open) >= MAX_REQUESTS:
            raise InvalidRequest(f"{MAX_REQUESTS} requests run over this connection already")
        body.setdefault("stream", True)
        asked = Asked(name, asyncio.Event())
        self._open[name] = asked
        asked.task = asyncio.create_task(self._serve(asked, _encode(body)))

    async def _serve(self, asked: Asked, body: bytes) -> None:
        """Every request gets one last frame: done, error or aborted."""
        answer = Frames(self, asked)
        kept = [pair for pair in self._scope["headers"] if pair[0] not in _HANDSHAKE]
        kept = [pair for pair in kept if not pair[0].startswith(b"sec-websocket-")]
        scope = {
            **{key: value for key, value in self._scope.items() if key != "subprotocols"},
            "type": "http",
            "method": "POST",
            "scheme": {"ws": "http", "wss": "https"}[self._scope["scheme"]],
            "path": TARGET,
            "raw_path": TARGET.encode(),
            "query_string": b"",
            "headers": [*kept, (b"content-type", b"application/json")],
            "extensions": {},
            NEVER: True,  # an abort is one at once
        }
        bodies = [body]

        async def receive() -> Message:
            if bodies:
                return {"type": "http.request", "body": bodies.pop(), "more_body": False}
            await asked.left.wait()
            return {"type": "http.disconnect"}

        try:
            await self._app(scope, receive, answer.send)
        except Exception as error:
            if as_ours(error) is not error:
                log.exception("unexpected error in a request of a WebSocket")
            answer.error = as_ours(error)
        finally:
            del self._open[asked.id]
        await answer.end()

    async def tell(self, frame: dict[str, Any], error: HeadraceError | None = None) -> None:
        """Send one frame; of an error, its body."""
        if error is not None:
            frame |= openai_body(error)
        await self._send({"type": "websocket.send", "text": _encode(frame).decode()})


class Frames:
    """What the HTTP route sends, as frames of one request."""

    def __init__(self, socket: ChatSocket, asked: Asked) -> None:
        self._socket, self._asked = socket, asked
        self._status = 0
        self._ignored = ""
        self._events = False  # the body is a stream of events
        self._rest = b""  # of a body that is not whole yet
        self._closed = False  # the last frame was sent
        self.error: HeadraceError | None = None

    async def send(self, message: Message) -> None:
        """An ASGI `send` of the HTTP kind."""
        if message["type"] == "http.response.start":
            headers = dict(message["headers"])
            self._status = message["status"]
            self._ignored = headers.get(IGNORED.encode(), b"").decode()
            self._events = headers[b"content-type"].startswith(b"text/event-stream")
            return
        self._rest += message.get("body", b"")
        if self._events:
            *events, self._rest = self._rest.split(b"\n\n")
            for event in events:
                await self._event(event)
        elif not message.get("more_body"):
            await self._whole(self._rest)

    async def _event(self, event: bytes) -> None:
        data = b"".join(
            line.removeprefix(b"data: ") for line in event.split(b"\n") if line[:5] == b"data:"
        )
        if not data:
            return  # a comment: this connection has pings of its own
        if data == DONE:
            await self._last("done")
        elif data.startswith(b'{"error"'):
            await self._last("error", **msgspec.json.decode(data))
        else:
            await self._tell("chunk", data=msgspec.Raw(data))

    async def _whole(self, body: bytes) -> None:
        if self._status == CLIENT_GONE:
            return  # `end` says why
        if self._status != 200:
            await self._last("error", status=self._status, **msgspec.json.decode(body))
            return
        await self._tell("response", data=msgspec.Raw(body))
        await self._last("done")

    async def end(self) -> None:
        """The route has returned. Nothing follows."""
        if self._closed:
            return
        if self._asked.left.is_set():
            await self._last("aborted")
        else:
            error = self.error or RequestFailed("the answer ended early")
            await self._last("error", status=error.status, **openai_body(error))

    async def _tell(self, kind: str, **members: Any) -> None:
        try:
            await self._socket.tell({"type": kind, "request_id": self._asked.id, **members})
        except ClientDisconnected:
            self._asked.left.set()  # the route hears of it as of any client that leaves

    async def _last(self, kind: str, **members: Any) -> None:
        self._closed = True
        if self._ignored:
            members["ignored_fields"] = self._ignored.split(", ")
        await self._tell(kind, **members)
