"""A closed-loop load generator for any server that speaks OpenAI's protocol.

`concurrency` requests are open at any time until the level's requests are used up: a slow server
is asked more slowly, so this measures the latency/throughput curve, not queueing under overload.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from headrace.bench.cpu import CpuMeter, measured
from headrace.bench.sse import EventReader
from headrace.bench.stats import Level, Record, level
from headrace.bench.workload import Workload
from headrace.errors import ConfigError, EngineError

try:
    import aiohttp
except ImportError:
    raise ConfigError("the load generator needs aiohttp: pip install 'headrace[bench]'") from None


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A server under load."""

    url: str  # http://host:port, without /v1
    model: str
    api_key: str = ""
    timeout_s: float = 600.0  # of one request, first byte to last
    keep_alive: bool = True  # False for servers that close a connection while it is used again

    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None

    def has_content(self) -> bool:
        delta = self.delta
        return bool(self.text or (delta and (delta.content or delta.reasoning_content)))


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Answer(msgspec.Struct):
    """A chunk of a stream, or a whole answer: only what is measured."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: dict[str, Any] | str | None = None


_ANSWER = msgspec.json.Decoder(_Answer)


class Exchange:
    """One request's answer while it arrives: a feed machine that fills a `Record`."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.complete = False
        self._events = EventReader()
        self._usage: _Usage | None = None

    def feed(self, data: bytes, now_s: float) -> None:
        """Bytes of an event stream that arrived at `now_s`."""
        for payload in self._events.feed(data):
            if payload == b"[DONE]":
                self.complete = True
            else:
                self._take(_ANSWER.decode(payload), now_s)

    def feed_whole(self, body: bytes) -> None:
        """The body of an answer that was not streamed."""
        self._take(_ANSWER.decode(body), None)
        self.complete = True

    def _take(self, answer: _Answer, now_s: float | None) -> None:
        if answer.error is not None:
            self.record.error = "error event: " + _words(answer.error)
        self._usage = answer.usage or self._usage
        for choice in answer.choices:
            if choice.finish_reason:
                self.record.finish_reason = choice.finish_reason
            if now_s is not None and choice.has_content():
                self.record.chunks_s.append(now_s)

    def flush(self) -> None:
        """The connection has ended: settle the counts, and note a stream that was cut."""
        record, usage = self.record, self._usage
        if not self.complete and not record.error:
            record.error = "stream ended without [DONE]"
        if usage:
            details = usage.prompt_tokens_details
            record.prompt_tokens, record.output_tokens = (
                usage.prompt_tokens,
                usage.completion_tokens,
            )
            record.cached_tokens = (details.cached_tokens if details else None) or 0
        else:
            record.output_tokens, record.counted_by = len(record.chunks_s), "chunks"


def _words(error: dict[str, Any] | str) -> str:
    if isinstance(error, str):
        return error
    return str(error.get("code") or error.get("message") or error)


async def send(
    session: aiohttp.ClientSession, target: Target, path: str, body: dict[str, Any]
) -> Record:
    """One request, start to end. Never raises for what the server does: see `Record.error`."""
    record = Record(sent_s=time.monotonic())
    exchange = Exchange(record)
    try:
        async with session.post(
            target.url + path, data=msgspec.json.encode(body), headers=target.headers()
        ) as response:
            if response.status != 200:
                record.error = f"HTTP {response.status}" + _reason(await response.read())
            elif body["stream"]:
                async for data in response.content.iter_any():
                    exchange.feed(data, time.monotonic())
            else:
                exchange.feed_whole(await response.read())
        if not record.error:
            exchange.flush()
    except (aiohttp.ClientError, TimeoutError, OSError, msgspec.MsgspecError) as error:
        record.error = type(error).__name__
    record.end_s = time.monotonic()
    return record


def _reason(body: bytes) -> str:
    try:
        error = _ANSWER.decode(body).error
    except msgspec.MsgspecError:
        return ""
    return f" {_words(error)}" if error else ""


async def closed_loop(
    session: aiohttp.ClientSession,
    target: Target,
    path: str,
    bodies: Iterator[dict[str, Any]],
    concurrency: int,
) -> list[Record]:
    """Send all bodies, `concurrency` at a time. Records in the order of their ends."""
    records: list[Record] = []

    async def client() -> None:
        for body in bodies:  # one iterator, shared: each body goes to the first client that is free
            records.append(await send(session, target, path, body))

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(client())
    return records


async def measure(
    target: Target,
    workload: Workload,
    levels: Sequence[int],
    *,
    warmup: int = 1,
    pid: int | None = None,
    on_level: Callable[[Level], None] = lambda level: None,
) -> list[Level]:
    """Run every level in turn. `warmup` requests go ahead of the first, uncounted.

    A level gets at least as many requests as it holds at once: with fewer it would be another.

    `pid` is the root of the server's process tree, for its CPU use. Raises EngineError when the
    warm-up fails: a server that answers nothing is not worth a measurement.
    """
    meter = CpuMeter(pid) if pid is not None else None
    done: list[Level] = []
    async with client_session(target) as session:
        ahead = msgspec.structs.replace(workload, requests=warmup, single="")
        for record in await closed_loop(
            session, target, workload.path(), ahead.bodies(target.model, "warmup"), 1
        ):
            if record.error:
                raise EngineError(f"{target.url}: the warm-up request failed: {record.error}")
        for concurrency in levels:
            enough = max(workload.requests, concurrency)
            filled = msgspec.structs.replace(workload, requests=enough)
            bodies = filled.bodies(target.model, f"level {concurrency}")
            async with measured(meter) as cores:
                records = await closed_loop(session, target, workload.path(), bodies, concurrency)
            done.append(
                level(
                    records,
                    concurrency,
                    server_cores=cores.server,
                    client_cores=cores.client,
                )
            )
            on_level(done[-1])
    return done


def client_session(target: Target) -> aiohttp.ClientSession:
    """A session without a limit of its own on open connections. Close it."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=not target.keep_alive),
        timeout=aiohttp.ClientTimeout(total=target.timeout_s, sock_connect=10),
        headers={"Content-Type": "application/json"},
    )


async def first_model(target: Target) -> str:
    """The first name in the server's /v1/models. Raises EngineError when there is none."""
    try:
        async with (
            client_session(target) as session,
            session.get(target.url + "/v1/models", headers=target.headers()) as response,
        ):
            names = [str(model["id"]) for model in (await response.json())["data"]]
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError, TypeError) as error:
        raise EngineError(f"{target.url}/v1/models: {error or type(error).__name__}") from None
    if not names:
        raise EngineError(f"{target.url} serves no model")
    return names[0]
