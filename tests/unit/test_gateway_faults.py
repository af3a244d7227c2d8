"""All that can go wrong at once: nothing hangs, every request has its answer, nothing is left.

The rig checks at the end of each test that no request, no lease and no place in the queue is left.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from contextlib import suppress
from typing import Any

import pytest

from headrace.gateway.tenants import Doorkeeper, TierSpec
from tests.unit.gateway_rig import (
    PATIENCE_S,
    Asked,
    Call,
    Mock,
    Out,
    Reply,
    answer_well,
    chat,
    chunk_of,
    gateway,
    until,
)

LIMIT = 60
FAST: dict[str, Any] = {"check_timeout_s": 0.5, "breaker_open_s": 0.1, "connect_timeout_s": 0.5}


class Moody:
    """A worker's handler that answers well, badly, in pieces or not at all."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self.seen: set[str] = set()  # request ids: the reference counter of what was let in

    async def __call__(self, asked: Asked, out: Out) -> None:
        self.seen.add(asked.headers["x-request-id"])
        mood = self._draw.random()
        if mood < 0.1:
            out.kill()
        elif mood < 0.2:
            await out.json({"error": {"message": "broken"}}, 500)
        elif mood < 0.3 and asked.json().get("stream"):
            await out.head()
            await out.event(chunk_of("half"))
            out.kill()
        else:
            await asyncio.sleep(self._draw.random() / 100)
            await answer_well(asked, out)


def is_answered(reply: Reply, stream: bool) -> bool:
    """It has an end that a client can tell: whole, or with an error."""
    if reply.status != 200 or not stream:
        return "error" in reply.json() if reply.status != 200 else "choices" in reply.json()
    last = reply.body.rstrip().rsplit(b"\n\n", 1)[-1]
    return last == b"data: [DONE]" or "error" in json.loads(last.removeprefix(b"data: "))


async def client(port: int, draw: random.Random) -> Reply | None:
    """One request: whole, or left at some byte of the question or of the answer."""
    stream = draw.random() < 0.5
    body = json.dumps(chat(f"{draw.random()} " * 30, stream=stream)).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
    whole = f"{head}connection: close\r\n\r\n".encode() + body
    leaves = draw.random()
    async with Call(port) as made:
        with suppress(ConnectionError):
            if leaves < 0.2:
                made._writer.write(whole[: draw.randrange(len(whole))])
                await made._writer.drain()
                await asyncio.sleep(draw.random() / 200)
                return None
            made._writer.write(whole)
            if leaves < 0.5:
                async with asyncio.timeout(PATIENCE_S):
                    await made._reader.read(draw.randrange(1, 400))
                return None
        reply = await made.whole()
        assert is_answered(reply, stream), reply
        return reply


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_clients_leave_anywhere_and_a_fifth_of_the_workers_flaps(seed: int) -> None:
    draw = random.Random(seed)
    moody = Moody(draw)
    tiers = {"default": TierSpec(requests_per_min=LIMIT, parallel=12)}
    begun_s = time.monotonic()
    async with (
        Mock(moody) as one,
        Mock(moody) as two,
        Mock(moody) as three,
        Mock(moody) as four,
        Mock(moody) as five,
        gateway(one, two, three, four, five, doorkeeper=Doorkeeper((), tiers), **FAST) as made,
    ):
        stop = asyncio.Event()

        async def flap() -> None:
            while not stop.is_set():
                await five.die()
                await asyncio.sleep(0.01)
                await five.listen()
                await asyncio.sleep(0.01)

        async def load() -> list[Reply | None]:
            return [await client(made.port, draw) for _ in range(6)]

        flapping = asyncio.create_task(flap())
        some = await asyncio.gather(*(load() for _ in range(16)))
        stop.set()
        await flapping
        replies = [reply for replies in some for reply in replies if reply is not None]
        assert {reply.status for reply in replies} <= {200, 429, 500, 502, 503}
        assert any(reply.status == 200 for reply in replies)
        assert len(moody.seen) <= LIMIT * (1 + (time.monotonic() - begun_s) / 60)
        await until(lambda: not made.exchanges, "all are over")
        assert made.doorkeeper.admit({}).account.running == 0
