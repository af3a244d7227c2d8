"""Workers that fail, hang, come back or leave: nothing hangs, and every request gets an answer."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.gateway.breaker import Breaker
from headrace.gateway.kv_usage import read_kv_usage
from headrace.gateway.load import Lease
from headrace.gateway.registry import Apply, StaticRegistry
from headrace.gateway.settings import GatewaySettings, WorkerSpec
from headrace.gateway.upstream import MAX_FETCHED_BYTES
from headrace.gateway.worker import MIN_WARM, Worker
from tests.unit.gateway_rig import (
    Asked,
    Call,
    Handler,
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
)

FAST: dict[str, Any] = {"check_timeout_s": 0.4, "hung_after_s": 1.2}


def slowly(begins: asyncio.Event, events: int, gap_s: float) -> Handler:
    """An answer of so many events, from `begins` on."""

    async def answer(asked: Asked, out: Out) -> None:
        await out.head()
        await begins.wait()
        for i in range(events):
            await out.event(chunk_of(str(i)))
            await asyncio.sleep(gap_s)
        await out.event("[DONE]")
        await out.end()

    return answer


async def hang(asked: Asked, out: Out) -> None:
    """Begins, then says nothing more."""
    await out.head()
    await out.event(chunk_of("a"))
    await out.gone()


# ------------------------------------------------------------ breaker


@given(st.integers(1, 4), st.lists(st.sampled_from(["ok", "fail", "release", "wait"])))
def test_the_breaker_lets_one_try_at_a_time_when_it_is_open(most: int, steps: list[str]) -> None:
    breaker, now_s, failures, until_s, trying = Breaker(most, 2.0), 0.0, 0, 0.0, False
    for step in steps:
        if step == "wait":
            now_s += 1.0
            continue
        admitted = failures < most or (now_s >= until_s and not trying)
        assert breaker.admits(now_s) is admitted
        assert (breaker.state == "closed") is (failures < most)
        if not admitted:
            continue
        breaker.placed()
        trying = failures >= most
        assert not (trying and breaker.admits(now_s))
        if step == "ok":
            breaker.succeeded()
            failures, trying = 0, False
        elif step == "fail":
            breaker.failed(now_s)
            failures, until_s, trying = failures + 1, now_s + 2.0, False
        else:
            breaker.released()
            trying = False


async def test_b095_client_errors_do_not_open_the_breaker() -> None:
    status = 400

    async def answer(asked: Asked, out: Out) -> None:
        if status == 200:
            await answer_well(asked, out)
        else:
            await out.json({"error": {"message": "no"}}, status, extra)

    extra = ""
    async with Mock(answer) as worker, gateway(worker, retries=0) as made:
        breaker = made.fleet.workers[worker.url].breaker
        for _ in range(50):
            assert (await call(made.port, chat())).status == 400
        assert breaker.state == "closed"
        status, extra = 503, "retry-after: 1\r\n"  # busy is not ill
        for _ in range(10):
            assert (await call(made.port, chat())).status == 503
        assert breaker.state == "closed"
        status, extra = 500, ""
        for _ in range(5):
            assert (await call(made.port, chat())).status == 500
        assert breaker.state == "open"
        reply = await call(made.port, chat())
        assert (reply.status, reply.json()["error"]["code"]) == (503, "no_worker")
        assert reply.headers["retry-after"] == "1"
        assert await metric(made, "worker_breaker_open") == 1


# ------------------------------------------------------------ leases


@given(st.lists(st.tuples(st.sampled_from(["place", "begin", "end"]), st.integers(0, 5))))
def test_leases_never_leak_nor_count_twice(steps: list[tuple[str, int]]) -> None:
    worker = Worker(WorkerSpec(url="http://x"), GatewaySettings())
    leases: list[Lease] = []
    state: list[str] = []
    for now_s, (step, which) in enumerate(steps, start=1):
        if step == "place":
            leases.append(Lease(worker, 100, 60, len(leases) + 1, now_s))
            state.append("placed")
        elif leases:
            i = which % len(leases)
            if step == "end":
                leases[i].end()
                state[i] = "ended"
            else:
                leases[i].begin(now_s)
                state[i] = "begun" if state[i] == "placed" else state[i]
        placed, begun = state.count("placed"), state.count("begun")
        view = worker.view(0.0)
        assert (view.requests, view.waiting) == (placed + begun, placed)
        assert (view.pending_tokens, view.decode_tokens) == (60 * placed, 100 * begun)


def test_a_worker_that_came_gets_its_share_little_by_little() -> None:
    worker = Worker(WorkerSpec(url="http://x"), GatewaySettings(slow_start_s=10))
    worker.up_since_s = 100.0
    assert [worker.view(t).warm for t in (100.0, 105.0, 110.0, 200.0)] == [MIN_WARM, 0.5, 1.0, 1.0]


def test_the_prefill_rate_is_measured() -> None:
    worker = Worker(WorkerSpec(url="http://x"), GatewaySettings())
    Lease(worker, 1000, 1000, 1, 0.0).begin(0.5)
    assert worker.prefill_tokens_per_s == 2000.0
    Lease(worker, 10, 10, 2, 0.0).begin(0.5)  # short ones say nothing
    assert worker.prefill_tokens_per_s == 2000.0


# ------------------------------------------------------------ KV memory


@pytest.mark.parametrize(
    ("page", "found"),
    [
        ("", None),
        ("nothing of ours\n", None),
        ('vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25\n', 0.25),
        ("vllm:kv_cache_usage_perc 1\n# EOF\n", 1.0),
        ('sglang:token_usage{model_name="m"} 0.5\n', 0.5),
        ('vllm:gpu_cache_usage_perc{engine="0"} 0.2\nvllm:gpu_cache_usage_perc{engine="1"} 0.4\n',
         pytest.approx(0.3)),
        ("vllm:kv_cache_usage_perc_total 0.5\n", None),
        ("vllm:kv_cache_usage_perc NaN\n", None),
        ("vllm:kv_cache_usage_perc 7\n", None),
        ("vllm:kv_cache_usage_perc{ 0.5\n", None),
        ("vllm:kv_cache_usage_perc much\nsglang:token_usage 0.5\n", 0.5),
    ],
)  # fmt: skip
def test_what_a_page_says_of_kv_memory(page: str, found: float | None) -> None:
    assert read_kv_usage(page.encode() + b"\xff") == found


async def test_kv_memory_counts_where_the_policy_goes_by_it() -> None:
    usage = "vllm:kv_cache_usage_perc {}\n"
    async with (
        Mock() as full,
        Mock() as free,
        gateway(full, free, policy="weighted", check_interval_s=0.05) as made,
    ):
        full.page, free.page = usage.format(0.9), usage.format(0.2)
        workers = made.fleet.workers
        await until(lambda: workers[full.url].kv_usage == 0.9, "as its metrics say")
        await until(lambda: workers[free.url].kv_usage == 0.2, "as its metrics say")
        for _ in range(3):
            assert (await call(made.port, chat("hello"))).status == 200
        assert (len(full.asked), len(free.asked)) == (0, 3)
        said = (await get(made.port, "/gateway/workers")).json()["workers"]
        assert [one["kv_usage"] for one in said] == [0.9, 0.2]
        free.page = None  # a worker without metrics serves all the same
        await until(lambda: workers[free.url].kv_usage is None, "as its metrics say")
        assert workers[free.url].up
        full.page = "x" * (MAX_FETCHED_BYTES + 1)
        await until(lambda: workers[full.url].kv_usage is None, "as its metrics say")
        assert workers[full.url].up


async def test_no_worker_is_asked_for_metrics_that_no_policy_needs() -> None:
    async with Mock() as worker, gateway(worker, check_interval_s=0.05) as made:
        worker.page = "vllm:kv_cache_usage_perc 0.5\n"
        checks = worker.checks
        await until(lambda: worker.checks > checks + 2, "checks")
        assert worker.pages == 0
        assert made.fleet.workers[worker.url].kv_usage is None


# ------------------------------------------------------------ hung, dead, back


async def test_a_hung_worker_is_out_and_its_streams_end_with_an_error() -> None:
    async with (
        Mock(hang) as worker,
        Mock() as other,
        gateway(worker, other, policy="round_robin", **FAST) as made,
    ):
        async with Call(made.port) as one, Call(made.port) as two:
            await one.send(chat(stream=True))
            await one.see(b'"a"')
            await two.send(chat(stream=True))  # the other worker takes this one
            assert (await two.whole()).body.endswith(b"data: [DONE]\n\n")
            worker.frozen = True
            reply = await one.whole()
        assert b'"worker_lost"' in reply.body
        assert b"[DONE]" not in reply.body
        assert not made.fleet.workers[worker.url].up
        for _ in range(4):
            assert (await call(made.port, chat())).status == 200
        assert len(worker.asked) == 1
        assert await metric(made, "worker_failures_total", kind="hung") == 1


async def test_requests_that_wait_at_a_hung_worker_go_elsewhere() -> None:
    async def wait(asked: Asked, out: Out) -> None:
        await out.gone()

    async with (
        Mock(wait) as worker,
        Mock() as other,
        gateway(worker, other, policy="round_robin", **FAST) as made,
        Call(made.port) as one,
    ):
        await one.send(chat())
        await until(lambda: bool(worker.asked), "it waits there")
        worker.frozen = True
        assert (await one.whole()).status == 200


async def test_a_gateway_that_was_held_up_takes_no_worker_for_hung() -> None:
    """Its process stood still for longer than `hung_after_s`, and so did all of its machine."""
    frozen = asyncio.Event()
    slow = slowly(frozen, 4, 0.3)
    async with Mock(slow) as worker, gateway(worker, **FAST) as made, Call(made.port) as one:
        await one.send(chat(stream=True))
        await until(lambda: bool(worker.asked), "it is there")
        worker.frozen = True
        await until(lambda: not made.fleet.workers[worker.url].up, "checks get no answer")
        frozen.set()
        for i in range(3):
            await one.see(b'"%d"' % i)
            time.sleep(1.5)  # noqa: ASYNC251  the gateway's thread, and the worker's
        assert (await one.whole()).body.endswith(b"data: [DONE]\n\n")


async def test_busy_is_not_dead() -> None:
    """Health does not answer while a stream goes on: no new requests, but the stream goes on."""
    frozen = asyncio.Event()
    slow = slowly(frozen, 25, 0.1)  # 2.5 s, more than twice hung_after_s
    async with Mock(slow) as worker, gateway(worker, **FAST) as made, Call(made.port) as one:
        await one.send(chat(stream=True))
        await until(lambda: bool(worker.asked), "it is there")
        worker.frozen = True
        frozen.set()
        reply = await one.whole()
        assert reply.body.endswith(b"data: [DONE]\n\n")
        assert not made.fleet.workers[worker.url].up
        worker.frozen = False
        await until(lambda: made.fleet.workers[worker.url].up, "it is back")


async def test_b094_all_workers_down_then_one_is_back() -> None:
    async with Mock() as worker, Mock() as other, gateway(worker, other) as made:
        running = [asyncio.create_task(call(made.port, chat())) for _ in range(10)]
        await worker.die()
        await other.die()
        for reply in await asyncio.gather(*running):
            assert reply.status in (200, 502, 503)
        await until(lambda: not any(w.up for w in made.fleet.workers.values()), "all are down")
        reply = await call(made.port, chat())
        assert (reply.status, reply.headers["retry-after"]) == (503, "1")
        assert (await get(made.port, "/ready")).status == 503
        assert (await get(made.port, "/health")).status == 200
        made.fleet.index.insert([1, 2, 3], worker.url)
        await worker.listen()
        await until(lambda: made.fleet.workers[worker.url].up, "it is back")
        assert (await call(made.port, chat())).status == 200
        assert made.fleet.index.match([1, 2, 3], [worker.url]) == (0,)  # its cache is gone
        assert (await get(made.port, "/ready")).status == 200


async def test_a_worker_that_never_answered_is_named_in_the_log_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with Mock() as worker:
        await worker.die()
        async with gateway(worker, up=False) as made:
            out = f"worker {worker.url} is out: no connection"
            await until(lambda: out in caplog.text, "it is named")
            await asyncio.sleep(0.2)  # some checks more
            await worker.listen()
            await until(lambda: made.fleet.workers[worker.url].up, "it is there")
        assert caplog.text.count(" is out: ") == 1


async def test_flapping_workers_lose_no_request() -> None:
    async with (
        Mock() as one,
        Mock() as two,
        Mock() as three,
        Mock() as four,
        Mock() as five,
        gateway(one, two, three, four, five, breaker_open_s=0.1) as made,
    ):
        done = False

        async def flap() -> None:
            while not done:
                await five.die()
                await five.listen()
                await asyncio.sleep(0.01)

        async def load(n: int) -> list[int]:
            return [
                (await call(made.port, chat(f"{n} {i}", stream=bool(i % 2)))).status
                for i in range(25)
            ]

        flapping = asyncio.create_task(flap())
        statuses = await asyncio.gather(*map(load, range(4)))
        done = True
        await flapping
        assert {status for some in statuses for status in some} == {200}


# ------------------------------------------------------------ drain, leave


async def test_a_drained_worker_ends_what_it_has() -> None:
    go_on = asyncio.Event()

    async def slow(asked: Asked, out: Out) -> None:
        await go_on.wait()
        await answer_well(asked, out)

    async with Mock(slow) as worker, Mock() as other, gateway(worker, other) as made:

        async def drain(on: bool) -> int:
            body = {"worker": worker.url + "/", "drain": on}
            return int((await call(made.port, body, "/gateway/drain")).json()["requests"])

        async with Call(made.port) as one:
            await one.send(chat())
            await until(lambda: bool(worker.asked or other.asked), "it is placed")
            held = int(bool(worker.asked))
            assert await drain(True) == held
            for _ in range(4):
                assert (await call(made.port, chat())).status == 200
            assert len(worker.asked) == held
            states = (await get(made.port, "/gateway/workers")).json()["workers"]
            assert sorted(row["state"] for row in states) == ["draining", "up"]
            go_on.set()
            assert (await one.whole()).status == 200
        assert await drain(True) == 0
        assert await drain(False) == 0
        for _ in range(4):
            await call(made.port, chat())
        assert len(worker.asked) > held
        reply = await call(made.port, {"worker": "http://no"}, "/gateway/drain")
        assert (reply.status, reply.json()["error"]["param"]) == (404, "worker")
        assert (await call(made.port, b"{", "/gateway/drain")).status == 400


class Changing(StaticRegistry):
    """A registry that a test changes: it calls `apply`."""

    def start(self, apply: Apply) -> None:
        self.apply = apply
        super().start(apply)


async def test_a_worker_that_leaves_the_list_ends_what_it_has() -> None:
    go_on = asyncio.Event()

    async def slow(asked: Asked, out: Out) -> None:
        await out.head()
        await out.event(chunk_of("a"))
        await go_on.wait()
        await out.event("[DONE]")
        await out.end()

    async with Mock(slow) as worker, Mock() as other:
        registry = Changing([WorkerSpec(url=worker.url)])
        async with gateway(registry=registry) as made, Call(made.port) as one:
            await one.send(chat(stream=True))
            await one.see(b'"a"')
            registry.apply([WorkerSpec(url=other.url)])
            await until(lambda: made.fleet.workers[other.url].up, "the other is up")
            assert (await call(made.port, chat())).status == 200
            assert list(made.fleet.workers) == [other.url]
            go_on.set()
            assert (await one.whole()).body.endswith(b"data: [DONE]\n\n")
        assert (len(worker.asked), len(other.asked)) == (1, 1)


async def test_a_gateway_that_is_its_own_worker_sends_itself_nothing() -> None:
    async with Mock() as worker:
        registry = Changing([WorkerSpec(url=worker.url)])
        async with gateway(registry=registry) as made:
            own = f"http://127.0.0.1:{made.port}"
            registry.apply([WorkerSpec(url=url) for url in (worker.url, own)])
            await until(lambda: "this gateway" in made.fleet.workers[own].why, "it is found out")
            for _ in range(3):
                assert (await call(made.port, chat())).status == 200
            assert len(worker.asked) == 3
            assert await metric(made, "placements_total", worker=own) == 0
            registry.apply([WorkerSpec(url=worker.url)])
            await until(lambda: not made.clients, "no check of its own is under way")


async def test_what_comes_back_is_refused() -> None:
    """Another gateway between may have sent it: whose names stand before ours does not matter."""
    async with Mock() as worker, gateway(worker) as made:
        assert (await call(made.port, chat(), headers={"via": "1.1 theirs"})).status == 200
        assert worker.asked[0].headers["via"] == f"1.1 {made.mark.decode()}"
        back = {"Via": "1.0 first", "via": f"1.1 {made.mark.decode()}, 1.1 theirs"}
        reply = await call(made.port, chat(), headers=back)
        assert (reply.status, reply.json()["error"]["code"]) == (508, "loop")
        assert len(worker.asked) == 1


@pytest.mark.parametrize("patient", [True, False])
async def test_the_gateway_stops_when_its_requests_have_ended(patient: bool) -> None:
    go_on = asyncio.Event()

    async def slow(asked: Asked, out: Out) -> None:
        await out.head()
        await out.event(chunk_of("a"))
        await go_on.wait()
        await out.event("[DONE]")
        await out.end()

    async with Mock(slow) as worker, gateway(worker) as made, Call(made.port) as one:
        async with Call(made.port) as idle:
            await idle.send(method="GET", path="/health", headers={"connection": "keep-alive"})
            await idle.see(b"ok")
            await one.send(chat(stream=True))
            await one.see(b'"a"')
            made.stop()
            await idle.whole()  # nothing new comes over it: it is closed
        if patient:
            go_on.set()
            assert (await one.whole()).body.endswith(b"data: [DONE]\n\n")
        else:
            made.stop()
            assert b'"shutting_down"' in (await one.whole()).body
        go_on.set()


async def test_an_answer_that_takes_too_long_is_ended() -> None:
    async with Mock(hang) as worker, gateway(worker, request_timeout_s=0.5) as made:
        reply = await call(made.port, chat(stream=True))
        assert b'"timed_out"' in reply.body
        assert b"[DONE]" not in reply.body


async def test_clients_that_send_nothing_whole_are_dropped() -> None:
    async with gateway(receive_timeout_s=0.3, up=False) as made, Call(made.port) as one:
        one._writer.write(b"POST /v1/completions HTTP/1.1\r\ncontent-length: 5\r\n\r\n{")
        reply = await one.whole()
        assert (reply.status, reply.json()["error"]["code"]) == (408, "request_timeout")
