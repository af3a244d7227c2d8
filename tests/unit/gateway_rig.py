"""A gateway in this process, workers that do what a test tells them, and a plain client."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec

from headrace.gateway.app import Gateway
from headrace.gateway.board import Board
from headrace.gateway.registry import Registry, StaticRegistry
from headrace.gateway.settings import GatewaySettings, WorkerSpec
from headrace.gateway.siblings import Siblings
from headrace.gateway.tenants import Doorkeeper
from headrace.gateway.tokenising import ModelTokens

PATIENCE_S = 30.0  # for what should come at once


class Reply(msgspec.Struct):
    """An answer, whole."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Out:
    """What a mock's handler writes to."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def raw(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def head(
        self, status: int = 200, kind: str = "text/event-stream", extra: str = ""
    ) -> None:
        """Of an answer in chunks."""
        text = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\n{extra}"
        await self.raw(f"{text}transfer-encoding: chunked\r\n\r\n".encode())

    async def chunk(self, data: bytes) -> None:
        await self.raw(b"%x\r\n%b\r\n" % (len(data), data))

    async def event(self, said: Any) -> None:
        data = said if isinstance(said, str) else json.dumps(said)
        await self.chunk(f"data: {data}\n\n".encode())

    async def end(self) -> None:
        await self.raw(b"0\r\n\r\n")

    async def json(self, said: Any, status: int = 200, extra: str = "") -> None:
        body = json.dumps(said).encode()
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n{extra}"
        await self.raw(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)

    def kill(self) -> None:
        """As if the process died."""
        self._writer.transport.abort()

    async def gone(self) -> None:
        """Until the other side closes the connection."""
        async with asyncio.timeout(PATIENCE_S):
            with suppress(ConnectionError):
                while await self._reader.read(1024):
                    pass


class Asked(msgspec.Struct):
    """A request that reached a mock."""

    target: str
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


Handler = Callable[[Asked, Out], Awaitable[None]]


def chunk_of(text: str, **more: Any) -> dict[str, Any]:
    """A chat chunk."""
    return {"object": "chat.completion.chunk", "choices": [{"delta": {"content": text}}], **more}


def usage_of(prompt: int, output: int, cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


async def answer_well(asked: Asked, out: Out) -> None:
    """What a worker in good health says."""
    body = asked.json()
    usage = usage_of(10, 2, 0)
    if not body.get("stream"):
        await out.json({"choices": [{"message": {"content": "ab"}}], "usage": usage})
        return
    await out.head()
    for text in "ab":
        await out.event(chunk_of(text))
    if (body.get("stream_options") or {}).get("include_usage"):
        await out.event({"choices": [], "usage": usage})
    await out.event("[DONE]")
    await out.end()


class Mock:
    """`async with Mock(handler) as worker`: an HTTP server with one model."""

    def __init__(
        self,
        handler: Handler = answer_well,
        model: str = "m",
        card: dict[str, Any] | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """card: what it says of its model beside the usual. host, port: where it listens."""
        self.handler, self.model, self.card = handler, model, card or {}
        self.asked: list[Asked] = []
        self.connections = 0
        self.health = 200
        self.page: str | None = None  # of metrics; None: it has none
        self.checks = self.pages = 0  # times that it was asked for its health, its metrics
        self.stays = False  # leaves connections open that were to be closed
        self.frozen = False  # takes connections, says nothing, as a stopped process does
        self._host, self.port, self._tls = host, port, tls
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._dead = False

    async def __aenter__(self) -> Mock:
        await self.listen()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.die()

    @property
    def url(self) -> str:
        return f"http{'s' if self._tls else ''}://{self._host}:{self.port}"

    async def listen(self) -> None:
        """On the port of before, if there was one."""
        self._dead = False
        self._server = await asyncio.start_server(self._came, self._host, self.port, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]

    async def die(self) -> None:
        """As kill -9: nobody listens, every connection is cut."""
        self._dead = True
        loop = asyncio.get_running_loop()
        for listening in self._server.sockets:
            loop.remove_reader(listening.fileno())
        for _ in range(4):  # whom the loop has accepted comes to `_came`; a closed server loses it
            await asyncio.sleep(0)
        self._server.close()
        for writer in list(self._open):
            writer.transport.abort()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    def _came(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A connection, known from its first moment: a task that has not begun closes nothing."""
        if self._dead:  # it was accepted before
            writer.transport.abort()
            return
        self._open.add(writer)
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            self._open.discard(writer)

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
        if self.frozen:
            await asyncio.Event().wait()
        pairs = [line.partition(": ") for line in lines if line]
        headers = {name: value for name, _, value in pairs}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        target, out = first.split()[1], Out(reader, writer)
        if target == "/health":
            self.checks += 1
            await out.json({}, self.health)
        elif target == "/v1/models":
            card = {"id": self.model, "object": "model", "owned_by": "mock", **self.card}
            await out.json({"data": [card]})
        elif target == "/metrics":
            self.pages += 1
            status, text = (404, "") if self.page is None else (200, self.page)
            head = f"HTTP/1.1 {status} X\r\ncontent-length: {len(text.encode())}\r\n\r\n"
            await out.raw(f"{head}{text}".encode())
        else:
            self.connections += 1
            asked = Asked(target, headers, body)
            self.asked.append(asked)
            await self.handler(asked, out)
        close = headers.get("connection") == "close" and not self.stays
        return not close and not writer.transport.is_closing()


@asynccontextmanager
async def gateway(
    *workers: Mock,
    registry: Registry | None = None,
    doorkeeper: Doorkeeper | None = None,
    up: bool = True,
    max_requests: int = 0,
    siblings: Siblings | None = None,
    board: Board | None = None,
    models: Mapping[str, ModelTokens] | None = None,
    **settings: Any,
) -> AsyncIterator[Gateway]:
    """A gateway before `workers`, all of them up. Ends clean: no request, no lease is left."""
    made = Gateway(
        msgspec.convert(
            {"port": 0, "check_interval_s": 0.05, "slow_start_s": 0, **settings}, GatewaySettings
        ),
        registry
        or StaticRegistry(
            [WorkerSpec(url=worker.url, max_requests=max_requests) for worker in workers]
        ),
        doorkeeper or Doorkeeper((), {}),
        siblings,
        board,
        models,
    )
    ready = asyncio.Event()
    sock = socket.create_server(("127.0.0.1", 0))
    running = asyncio.create_task(made.run(sock, lambda _: ready.set()))
    await ready.wait()
    try:
        if up:
            await until(lambda: all(w.up for w in made.fleet.workers.values()), "all are up")
        yield made
        await until(lambda: not made.exchanges, "no request is left")
        for worker in made.fleet.workers.values():
            counts = (worker.waiting, worker.pending_tokens, worker.decode_tokens)
            assert (len(worker.leases), *counts) == (0, 0, 0, 0), worker.name
        assert not len(made.queue)
    finally:
        made.stop()
        made.stop()
        await running
        sock.close()


def data_of(body: bytes) -> list[Any]:
    """The events' payloads."""
    lines = [line[6:] for line in body.decode().splitlines() if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


async def until(condition: Callable[[], bool], what: str) -> None:
    """Let the loop run until `condition()`."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    assert condition(), what


class Call:
    """One request on a connection of its own, whose answer is read piece by piece."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.seen = bytearray()

    async def __aenter__(self) -> Call:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.leave()

    def leave(self) -> None:
        """The client goes away."""
        self._writer.transport.abort()

    async def send(
        self,
        body: Any = None,
        path: str = "/v1/chat/completions",
        headers: dict[str, str] | None = None,
        method: str = "POST",
    ) -> None:
        raw = (
            body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        )
        all_ = {"host": "x", "connection": "close", "content-length": len(raw), **(headers or {})}
        head = "".join(f"{name}: {value}\r\n" for name, value in all_.items())
        self._writer.write(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + raw)
        await self._writer.drain()

    async def see(self, text: bytes) -> None:
        """Until `text` is in what came."""
        async with asyncio.timeout(PATIENCE_S):
            while text not in self.seen:
                data = await self._reader.read(65536)
                assert data, f"the answer ended without {text!r}: {self.seen!r}"
                self.seen += data

    async def whole(self) -> Reply:
        """Read to the end."""
        async with asyncio.timeout(PATIENCE_S):
            while data := await self._reader.read(65536):
                self.seen += data
        head, _, body = bytes(self.seen).partition(b"\r\n\r\n")
        first, *lines = head.decode().splitlines()
        headers = {name.lower(): value for name, _, value in (x.partition(": ") for x in lines)}
        if headers.get("transfer-encoding") == "chunked":
            body = _unchunked(body)
        return Reply(int(first.split()[1]), headers, body)


def _unchunked(body: bytes) -> bytes:
    out: list[bytes] = []
    at = 0
    while True:
        end = body.index(b"\r\n", at)
        n, at = int(body[at:end], 16), end + 2
        if not n:
            assert body[at:] == b"\r\n", "the last chunk ends the body"
            return b"".join(out)
        out.append(body[at : at + n])
        assert body[at + n : at + n + 2] == b"\r\n", "a chunk has its size"
        at += n + 2


async def call(
    port: int,
    body: Any = None,
    path: str = "/v1/chat/completions",
    headers: dict[str, str] | None = None,
    method: str = "POST",
) -> Reply:
    """One request, answered whole."""
    async with Call(port) as made:
        await made.send(body, path, headers, method)
        return await made.whole()


async def get(port: int, path: str, headers: dict[str, str] | None = None) -> Reply:
    return await call(port, None, path, headers, "GET")


def chat(text: str = "hello", **more: Any) -> dict[str, Any]:
    """A chat request."""
    return {"model": "m", "messages": [{"role": "user", "content": text}], **more}


async def metric(made: Gateway, name: str, **labels: str) -> float:
    """Sum of the samples whose labels include `labels`."""
    from prometheus_client.parser import text_string_to_metric_families

    text = (await get(made.port, "/metrics")).body.decode()
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == f"headrace_gateway_{name}" and labels.items() <= sample.labels.items()
    )
