"""The load generator's network side, for any server that speaks OpenAI's protocol."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec

from headrace.bench.exchange import Exchange, message, reason
from headrace.bench.stats import Record
from headrace.bench.workload import Ask
from headrace.errors import ConfigError, EngineError
from headrace.extras import install

try:
    import aiohttp
except ImportError:
    raise ConfigError(f"the load generator needs aiohttp: {install('bench')}") from None

T = TypeVar("T")
SHED = {429, 503}  # the server refuses work that it could do at another time


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A server under load."""

    url: str  # http://host:port, without /v1
    model: str
    api_key: str = ""
    timeout_s: float = 600.0  # of one request, first byte to last
    keep_alive: bool = True  # False for servers that close a connection while it is used again

    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}


class HttpSend:
    """`Send` over one session of connections."""

    def __init__(
        self, session: aiohttp.ClientSession, target: Target, path: str, *, stream: bool
    ) -> None:
        self._session, self._stream = session, stream
        self._url, self._headers = target.url + path, target.headers()

    async def __call__(self, record: Record, body: bytes, ask: Ask, keep_text: bool) -> str:
        """See `Send`."""
        exchange = Exchange(record, keep_text=keep_text)
        try:
            async with self._session.post(self._url, data=body, headers=self._headers) as response:
                if response.status != 200:
                    refusal = await response.read()
                    record.error = f"HTTP {response.status}" + reason(refusal)
                    record.told = message(refusal)
                    record.shed = response.status in SHED
                elif self._stream:
                    await _read(response, exchange, ask.cancel_after_chunks)
                else:
                    exchange.feed_whole(await response.read())
            if not record.error:
                exchange.flush()
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.MsgspecError) as error:
            record.error = type(error).__name__
        return exchange.text


async def _read(
    response: aiohttp.ClientResponse, exchange: Exchange, cancel_after_chunks: int | None
) -> None:
    """To the end, or to the chunk at which this client goes away."""
    record = exchange.record
    if cancel_after_chunks is None:
        async for data in response.content.iter_any():
            exchange.feed(data, time.monotonic())
        return
    while len(record.chunks_s) < cancel_after_chunks:
        data = await response.content.readany()
        if not data:
            return
        exchange.feed(data, time.monotonic())
    if not exchange.complete:
        record.cancelled = True
        response.close()


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
            body = await response.read()
            if response.status != 200:
                said = f"HTTP {response.status}{reason(body)}"
                raise EngineError(f"{target.url}/v1/models: {said}")
            names = [str(model["id"]) for model in json.loads(body)["data"]]
    except (KeyError, TypeError, ValueError):
        raise EngineError(f"{target.url}/v1/models is no list of models") from None
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise EngineError(f"{target.url}/v1/models: {error or type(error).__name__}") from None
    if not names:
        raise EngineError(f"{target.url} serves no model")
    return names[0]


def run_loop(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on uvloop where there is one: half the time a chunk."""
    try:
        import uvloop
    except ImportError:  # Windows
        return asyncio.run(main)
    return uvloop.run(main)
