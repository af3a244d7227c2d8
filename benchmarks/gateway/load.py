"""Load for a router: plain connections, closed loop or at a rate, each answer read to its end.

It holds no more of an answer than its status and its times, so that it costs little beside what
it measures.
"""

from __future__ import annotations

import asyncio
import json
import random
import string
import time
from collections.abc import Callable, Iterator
from typing import cast

import httptools
import msgspec

KEY = "benchmark-key"
_TEXT = "".join(random.Random(1).choices(string.ascii_letters + " ", k=1_000_000))


class Seen(msgspec.Struct):
    """One answer. Times are seconds from the request's sending."""

    status: int
    first_s: float  # first byte of the body
    end_s: float


class Figures(msgspec.Struct):
    """Answers of one stretch of load."""

    seen: list[Seen]
    wall_s: float

    @property
    def failed(self) -> int:
        """Answers other than 200."""
        return sum(one.status != 200 for one in self.seen)

    @property
    def per_s(self) -> float:
        """Answers a second."""
        return len(self.seen) / self.wall_s

    def ms(self, share: float, *, first: bool = False) -> float:
        """A percentile of the times, in milliseconds."""
        times = sorted(one.first_s if first else one.end_s for one in self.seen)
        return 1e3 * times[min(len(times) - 1, int(share * len(times)))]


class Connection(asyncio.Protocol):
    """One keep-alive connection, one request at a time."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._done: asyncio.Future[Seen] | None = None

    async def ask(self, request: bytes) -> Seen:
        """Send it, wait for the whole answer."""
        self._done = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._seen = Seen(0, 0.0, 0.0)
        self._since_s = time.perf_counter()
        self._transport.write(request)
        return await self._done

    def close(self) -> None:
        """No more."""
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._seen.status = self._seen.status if self._seen.status != 200 else -1
            self._done.set_result(self._seen)

    def on_body(self, body: bytes) -> None:
        if not self._seen.first_s:
            self._seen.first_s = time.perf_counter() - self._since_s

    def on_message_complete(self) -> None:
        self._seen.status = self._parser.get_status_code()
        self._seen.end_s = time.perf_counter() - self._since_s
        if self._done is not None and not self._done.done():
            self._done.set_result(self._seen)


async def connect(port: int) -> Connection:
    """To a server on this machine."""
    loop = asyncio.get_running_loop()
    _, made = await loop.create_connection(Connection, "127.0.0.1", port)
    return made


def chats(characters: int, *, stream: bool) -> Iterator[bytes]:
    """Requests with prompts that nobody has seen, without end."""
    draw = random.Random()
    while True:
        start = draw.randrange(len(_TEXT) - characters)
        text = f"{draw.random()} {_TEXT[start : start + characters]}"
        body = json.dumps(
            {
                "model": "m",
                "messages": [{"role": "user", "content": text}],
                "max_tokens": 8,
                "stream": stream,
            }
        ).encode()
        yield (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
            b"content-type: application/json\r\nauthorization: Bearer %b\r\naccept: */*\r\n"
            b"user-agent: benchmark\r\ncontent-length: %d\r\n\r\n" % (KEY.encode(), len(body))
        ) + body


async def closed(
    port: int, requests: Iterator[bytes], at_once: int, more: Callable[[int], bool]
) -> Figures:
    """`at_once` connections that each ask again when answered, while `more(answers)`."""
    seen: list[Seen] = []

    async def one() -> None:
        connection = await connect(port)
        while more(len(seen)):
            seen.append(await connection.ask(next(requests)))
            if seen[-1].status < 0:
                connection = await connect(port)
        connection.close()

    start_s = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(at_once)))
    return Figures(seen, time.perf_counter() - start_s)


async def at_rate(port: int, requests: Iterator[bytes], per_s: float, seconds: float) -> Figures:
    """Poisson arrivals, whatever was answered; connections are made as they are needed."""
    draw, seen, free = random.Random(2), [], [await connect(port) for _ in range(16)]

    async def one(request: bytes) -> None:
        connection = free.pop() if free else await connect(port)
        answer = await connection.ask(request)
        seen.append(answer)
        if answer.status >= 0:
            free.append(connection)

    running: set[asyncio.Task[None]] = set()
    start_s = time.perf_counter()
    next_s = start_s
    while (now_s := time.perf_counter()) < start_s + seconds:
        if now_s < next_s:
            await asyncio.sleep(next_s - now_s)
            continue
        task = asyncio.create_task(one(next(requests)))
        running.add(task)
        task.add_done_callback(running.discard)
        next_s += draw.expovariate(per_s)
    await asyncio.gather(*running)
    wall_s = time.perf_counter() - start_s
    for connection in free:
        connection.close()
    return Figures(seen, wall_s)


def for_s(seconds: float) -> Callable[[int], bool]:
    """For `closed`: as long as that."""
    end_s = time.perf_counter() + seconds
    return lambda _: time.perf_counter() < end_s


def for_count(count: int) -> Callable[[int], bool]:
    """For `closed`: so many."""
    return lambda answers: answers < count
