"""Keys, limits and the queue, seen from outside: what clients get and what workers see."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from headrace.gateway.tenants import Doorkeeper, KeySpec, TierSpec
from tests.unit.gateway_rig import (
    Asked,
    Call,
    Mock,
    Out,
    answer_well,
    call,
    chat,
    chunk_of,
    gateway,
    get,
    metric,
    until,
    usage_of,
)


def door(**tier: Any) -> Doorkeeper:
    """Everybody has this tier."""
    return Doorkeeper((), {"default": TierSpec(**tier)})


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_every_path_but_health_needs_a_key_and_the_worker_does_not_get_it() -> None:
    keys = [KeySpec(key="user"), KeySpec(key="root", admin=True)]
    async with Mock() as worker, gateway(worker, doorkeeper=Doorkeeper(keys, {})) as made:
        for path in ("/health", "/ready"):
            assert (await get(made.port, path)).status == 200
        for path in ("/v1/models", "/metrics", "/gateway/workers", "/version", "/nothing"):
            assert (await get(made.port, path)).status == 401
            assert (await get(made.port, path, bearer("other"))).status == 401
        refused = await call(made.port, chat())
        assert refused.json()["error"]["code"] == "invalid_api_key"
        told = await call(made.port, chat(), "/v1/messages")
        assert told.json()["error"]["type"] == "authentication_error"
        assert told.json()["type"] == "error"
        for path, status in (("/v1/models", 200), ("/metrics", 403), ("/gateway/workers", 403)):
            assert (await get(made.port, path, bearer("user"))).status == status
        assert (await get(made.port, "/gateway/workers", bearer("root"))).status == 200
        assert (await call(made.port, {}, "/gateway/drain", bearer("user"))).status == 403
        assert not worker.asked
        assert (await call(made.port, chat(), headers={"x-api-key": "user"})).status == 200
        assert not {"authorization", "x-api-key"} & set(worker.asked[0].headers)


async def test_requests_a_minute() -> None:
    async with Mock() as worker, gateway(worker, doorkeeper=door(requests_per_min=3)) as made:
        replies = [await call(made.port, chat()) for _ in range(4)]
        assert [reply.status for reply in replies] == [200, 200, 200, 429]
        left = [reply.headers["x-ratelimit-remaining-requests"] for reply in replies]
        assert left == ["2", "1", "0", "0"]
        last = replies[-1]
        assert last.json()["error"]["type"] == "rate_limit_error"
        assert 18 <= int(last.headers["retry-after"]) <= 20  # a third of a minute
        assert last.headers["x-ratelimit-limit-requests"] == "3"
        assert len(worker.asked) == 3
        assert await metric(made, "limited_total") == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_tokens_are_reserved_and_settled_with_what_was_used(stream: bool) -> None:
    """Each reserves 500 and uses 12: four run one after another, two at once do not."""
    go_on = asyncio.Event()

    async def slow(asked: Asked, out: Out) -> None:
        await go_on.wait()
        await answer_well(asked, out)

    body = chat(stream=stream, max_tokens=490)
    async with Mock() as worker, gateway(worker, doorkeeper=door(tokens_per_min=900)) as made:
        since_s = time.monotonic()
        for n in range(1, 5):
            assert (await call(made.port, body)).status == 200
            account = made.doorkeeper.admit({}).account
            assert account.tokens is not None
            left = account.tokens.told(time.monotonic())[1]
            back = min(12 * n, 15 * (time.monotonic() - since_s))  # fifteen come each second
            assert 900 - 12 * n <= left <= 900 - 12 * n + back + 1
        worker.handler = slow
        async with Call(made.port) as one:
            await one.send(body)
            await until(lambda: len(worker.asked) == 5, "it runs")
            reply = await call(made.port, body)
            assert (reply.status, reply.json()["error"]["code"]) == (429, "rate_limit_exceeded")
            go_on.set()
            assert (await one.whole()).status == 200
        assert (await call(made.port, body)).status == 200
        reply = await call(made.port, chat(max_tokens=1000))
        assert "can never run" in reply.json()["error"]["message"]
        assert "retry-after" not in reply.headers


async def test_what_was_not_used_goes_back() -> None:
    """Failed requests cost no tokens, those whose client left cost what was made."""

    async def fail(asked: Asked, out: Out) -> None:
        await out.json({"error": {"message": "no"}}, 500)

    async def three(asked: Asked, out: Out) -> None:
        await out.head()
        for text in "abc":
            await out.event(chunk_of(text))
        await out.gone()

    async with Mock(fail) as worker, gateway(worker, doorkeeper=door(tokens_per_min=600)) as made:
        account = made.doorkeeper.admit({}).account
        assert account.tokens is not None
        for _ in range(4):
            assert (await call(made.port, chat(max_tokens=500))).status == 500
        assert account.tokens.told(time.monotonic())[1] == 600
        worker.handler = three
        since_s = time.monotonic()
        async with Call(made.port) as one:
            await one.send(chat(stream=True, max_tokens=500))
            await one.see(b'"c"')
        await until(lambda: not made.exchanges, "it left")
        left, passed_s = account.tokens.told(time.monotonic())[1], time.monotonic() - since_s
        assert left > 570
        assert left < 600 or passed_s > 0.3  # ten come back each second
        assert account.running == 0


async def test_limits_hold_under_concurrency() -> None:
    """A counter at the worker knows how many were there at once and in all."""
    now = most = 0

    async def count(asked: Asked, out: Out) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.01)
        now -= 1
        await answer_well(asked, out)

    begun_s = time.monotonic()
    tier = door(parallel=4, requests_per_min=30)
    async with (
        Mock(count) as worker,
        Mock(count) as other,
        gateway(worker, other, doorkeeper=tier) as made,
    ):

        async def load() -> list[int]:
            return [(await call(made.port, chat())).status for _ in range(6)]

        some = await asyncio.gather(*(load() for _ in range(12)))
        statuses = [status for one in some for status in one]
        taken = len(worker.asked) + len(other.asked)
        assert statuses.count(200) == taken <= 30 * (1 + (time.monotonic() - begun_s) / 60)
        assert statuses.count(429) == 72 - taken
        assert most <= 4


# ------------------------------------------------------------ the queue


def held(go_on: asyncio.Event) -> Any:
    async def answer(asked: Asked, out: Out) -> None:
        await go_on.wait()
        await answer_well(asked, out)

    return answer


async def test_requests_wait_in_the_gateway_and_go_by_tier() -> None:
    go_on = asyncio.Event()
    tiers = {"low": TierSpec(priority=5), "high": TierSpec(priority=0)}
    keys = [KeySpec(key=name, tier=name) for name in tiers]
    async with (
        Mock(held(go_on)) as worker,
        gateway(worker, doorkeeper=Doorkeeper(keys, tiers), max_requests=1) as made,
    ):
        first = asyncio.create_task(call(made.port, chat("0"), headers=bearer("low")))
        await until(lambda: len(worker.asked) == 1, "the worker is full")
        tasks = []
        for n, key in enumerate(["low", "low", "high", "high"], start=1):
            tasks.append(asyncio.create_task(call(made.port, chat(str(n)), headers=bearer(key))))
            await until(lambda n=n: len(made.queue) == n, "it waits")  # type: ignore[misc]
        assert len(worker.asked) == 1
        go_on.set()
        replies = await asyncio.gather(first, *tasks)
        assert [reply.status for reply in replies] == [200] * 5
        order = [asked.json()["messages"][0]["content"] for asked in worker.asked]
        assert order == ["0", "3", "4", "1", "2"]


async def test_waiting_has_an_end() -> None:
    go_on = asyncio.Event()
    async with (
        Mock(held(go_on)) as worker,
        gateway(worker, doorkeeper=door(queue_s=0.3), max_requests=1) as made,
    ):
        first = asyncio.create_task(call(made.port, chat()))
        await until(lambda: len(worker.asked) == 1, "the worker is full")
        reply = await call(made.port, chat())
        assert (reply.status, reply.json()["error"]["code"]) == (503, "queue_full")
        assert reply.headers["retry-after"]
        go_on.set()
        assert (await first).status == 200
        assert len(worker.asked) == 1


async def test_a_full_queue_and_a_tier_that_does_not_wait() -> None:
    go_on = asyncio.Event()
    tiers = {"now": TierSpec(queue_s=0), "later": TierSpec()}
    keys = [KeySpec(key=name, tier=name) for name in tiers]
    async with (
        Mock(held(go_on)) as worker,
        gateway(worker, doorkeeper=Doorkeeper(keys, tiers), max_requests=1, max_queue=1) as made,
    ):
        later = bearer("later")
        first = asyncio.create_task(call(made.port, chat(), headers=later))
        await until(lambda: len(worker.asked) == 1, "the worker is full")
        assert (await call(made.port, chat(), headers=bearer("now"))).status == 503
        second = asyncio.create_task(call(made.port, chat(), headers=later))
        await until(lambda: len(made.queue) == 1, "one waits")
        assert (await call(made.port, chat(), headers=later)).status == 503
        go_on.set()
        assert [(await first).status, (await second).status] == [200, 200]


async def test_a_client_that_leaves_the_queue_is_never_sent() -> None:
    go_on = asyncio.Event()
    async with Mock(held(go_on)) as worker, gateway(worker, max_requests=1) as made:
        first = asyncio.create_task(call(made.port, chat()))
        await until(lambda: len(worker.asked) == 1, "the worker is full")
        async with Call(made.port) as one:
            await one.send(chat())
            await until(lambda: len(made.queue) == 1, "it waits")
            assert await metric(made, "queue_length") == 1
        await until(lambda: not len(made.queue), "it left")
        go_on.set()
        assert (await first).status == 200
        assert len(worker.asked) == 1


async def test_what_would_be_late_everywhere_is_refused_early() -> None:
    async with Mock() as worker, gateway(worker) as made:
        made.fleet.workers[worker.url].prefill_tokens_per_s = 1000.0
        text = "word " * 4000  # about 5000 tokens
        reply = await call(made.port, chat(text), headers={"x-slo-ttft-ms": "1000"})
        assert (reply.status, reply.json()["error"]["code"]) == (503, "ttft_target_missed")
        assert not worker.asked
        reply = await call(made.port, chat(text), headers={"x-slo-ttft-ms": "60000"})
        assert reply.status == 200
        reply = await call(made.port, chat(text), headers={"x-slo-ttft-ms": "soon"})
        assert (reply.status, reply.json()["error"]["param"]) == (400, "x-slo-ttft-ms")


async def test_usage_decides_what_a_tenant_was_served() -> None:
    async def answer(asked: Asked, out: Out) -> None:
        await out.json({"usage": usage_of(1000, 70, 0)})

    async with Mock(answer) as worker, gateway(worker) as made:
        await call(made.port, chat("x" * 400))
        served = made.queue._served[""]
        assert 2 * 70 + 100 <= served <= 2 * 70 + 130
