"""GET and DELETE /v1/streams/{id}: back to a stream, whichever HTTP process holds it.

A stream lives in the process that began it, and its id says which. Another process that gets the
request asks that one over a socket in the server's own folder and passes on what it says:

    {"op": "follow" | "end", "stream": id, "after": number, "route": path}\\n  ->
    {"headers": [[name, value], ...]}\\n  or  {"error": {...}}\\n   <-
    a length (4 bytes, big-endian) and as many bytes, again and again; the length 0 is the end
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from functools import wraps
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.api.errors import event_of
from headrace.api.exchange import Exchange, exchange_of
from headrace.api.resume import Live, Streams, deliver, split_event_id
from headrace.api.service import encode_json, named, service_of
from headrace.errors import HeadraceError, InvalidRequest, NotFound, RequestFailed, WrongMethod

LAST = "last-event-id"
_LENGTH = struct.Struct(">I")
_ERRORS: dict[int, type[HeadraceError]] = {400: InvalidRequest, 404: NotFound}
Handler = Callable[[Request], Awaitable[ASGIApp]]


class Asked(msgspec.Struct, frozen=True):
    """What one process asks another. route: the path of a POST that comes back; "" = no POST."""

    op: str
    stream: str
    after: int = 0
    route: str = ""


def socket_of(folder: Path, worker: int) -> Path:
    """Where a process answers the others."""
    return folder / f"streams-{worker}.sock"


class Relay:
    """Answers other processes for the streams of this one. folder: None = there are no others."""

    def __init__(self, streams: Streams, folder: Path | None) -> None:
        self.streams, self.folder = streams, folder
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen; the folder lets nobody else in."""
        if self.streams.enabled and self.folder is not None:
            path = socket_of(self.folder, self.streams.worker)
            path.unlink(missing_ok=True)  # of a process that died
            self._server = await asyncio.start_unix_server(self._serve, path)

    async def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            asked = msgspec.json.decode(await reader.readline(), type=Asked)
            try:
                live = self.streams.find(asked.stream)
                if asked.op == "end":
                    live.give_up()
                else:
                    live.check(asked.after, asked.route)
            except HeadraceError as error:
                told = {
                    "status": error.status,
                    "code": error.code,
                    "message": error.message,
                    "param": error.param,
                }
                writer.write(encode_json({"error": told}) + b"\n")
                return
            headers = [[n.decode(), v.decode()] for n, v in live.headers or ()]
            writer.write(encode_json({"headers": headers}) + b"\n")
            if asked.op != "end":
                await _first_of(_copy(live, asked.after, writer), reader.read(1))
        except (msgspec.MsgspecError, OSError):
            pass  # whoever asked is gone
        finally:
            writer.close()


async def _copy(live: Live, after: int, writer: asyncio.StreamWriter) -> None:
    async with aclosing(live.follow(after)) as events:
        async for data in events:
            writer.write(_LENGTH.pack(len(data)) + data)
            await writer.drain()
    writer.write(_LENGTH.pack(0))


async def _first_of(*works: Awaitable[object]) -> None:
    """Until one of them has ended, however: the others are cut short."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def resuming(handler: Handler) -> Handler:
    """A route that begins streams: a request that names the event it saw last goes on with that
    stream; its body is not read. Raises InvalidRequest where another route began it."""

    @wraps(handler)
    async def resume_or_begin(request: Request) -> ASGIApp:
        given = _given(request)
        if not given or not service_of(request).streams.enabled:
            return await handler(request)
        return await _resumed(request, *split_event_id(given, None), request.scope["path"])

    return resume_or_begin


async def follow(request: Request) -> ASGIApp:
    """GET: the events behind Last-Event-ID, all of them without one. Raises NotFound,
    InvalidRequest, WrongMethod."""
    if request.method == "HEAD":  # it would take the stream from whoever reads, and show nothing
        raise WrongMethod("a stream takes GET and DELETE")
    name = named(request)
    return await _resumed(request, *split_event_id(_given(request) or "0", name), "")


async def end(request: Request) -> Response:
    """DELETE: abort the request that the stream belongs to. Raises NotFound."""
    service, name = service_of(request), named(request)
    if _worker(name) == service.streams.worker:
        service.streams.find(name).give_up()
    else:
        _, writer, _ = await _ask(service.folder, Asked("end", name))
        writer.close()
    content = {"id": name, "object": "stream", "ended": True}
    return Response(encode_json(content), media_type="application/json")


async def _resumed(request: Request, name: str, after: int, route: str) -> ASGIApp:
    service, exchange = service_of(request), exchange_of(request)
    exchange.detail = f" resumed after={after}"
    if _worker(name) != service.streams.worker:
        asked = Asked("follow", name, after, route)
        return _passed_on(exchange, *await _ask(service.folder, asked))
    live = service.streams.find(name)
    live.check(after, route)  # raises while there is a status to tell

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await deliver(live, after, exchange, receive, send)

    return answer


def _given(request: Request) -> str:
    """The event seen last. One that is empty is none; several are no id, whatever each says."""
    return ",".join(request.headers.getlist(LAST))


def _worker(name: str) -> int:
    number = name.partition("-")[0]
    return int(number) if number.isdecimal() and len(number) < 7 else -1


async def _ask(
    folder: Path | None, asked: Asked
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, list[list[str]]]:
    """The connection to the process that holds a stream, and the stream's headers."""
    missing = NotFound(
        f"no stream {asked.stream!r} is held here (any more)", code="stream_not_found"
    )
    if folder is None:
        raise missing
    path = socket_of(folder, _worker(asked.stream))
    try:
        reader, writer = await asyncio.open_unix_connection(path)
    except OSError:
        raise missing from None
    writer.write(encode_json(asked) + b"\n")
    try:
        said: dict[str, Any] = msgspec.json.decode(await reader.readline())
    except (msgspec.MsgspecError, OSError):
        writer.close()
        raise missing from None
    if error := said.get("error"):
        writer.close()
        kind = _ERRORS.get(error["status"], RequestFailed)
        raise kind(error["message"], param=error["param"], code=error["code"])
    return reader, writer, said["headers"]


def _passed_on(
    exchange: Exchange,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    headers: list[list[str]],
) -> ASGIApp:
    """What the other process says, to this one's client."""

    async def pass_on(send: Send) -> None:
        pairs = [(name.encode(), value.encode()) for name, value in headers]
        await send({"type": "http.response.start", "status": 200, "headers": pairs})
        last = b""
        try:
            while length := _LENGTH.unpack(await reader.readexactly(_LENGTH.size))[0]:
                await exchange.write(await reader.readexactly(length))
        except (asyncio.IncompleteReadError, OSError):
            error = RequestFailed("the process that held this stream ended")
            exchange.error, last = error, event_of(error)
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        try:
            await _first_of(pass_on(send), watch())
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    return answer
