"""Every figure of the load generator against a server with known delays, on a virtual clock.

The server writes real event-stream bytes and the driver, the feed machine and the sums are the real
ones; only the socket and the clock are not, so figures must be exact.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from headrace.bench.drive import Driver
from headrace.bench.exchange import Exchange
from headrace.bench.job import Job, arrivals_of
from headrace.bench.load import Target
from headrace.bench.saturation import saturated
from headrace.bench.stats import (
    Level,
    Record,
    Shape,
    achieved_per_s,
    level,
    steady_tokens_per_s,
)
from headrace.bench.sweep import rates_between, sweep
from headrace.bench.workload import Ask, Workload
from tests.unit.scripted_server import DONE, ROLE, Step, delta, event, usage
from tests.unit.virtual_time import run_virtual

Clock = Callable[[], float]
Script = Callable[[dict[str, Any]], list[Step]]
TARGET = Target(url="http://none", model="m")
exactly = pytest.approx


def streamed(first_s: float, gap_s: float, tokens: int, tail_s: float = 0.0) -> list[Step]:
    """The role chunk at once, which must not count; tokens; the end `tail_s` after the last."""
    steps: list[Step] = [ROLE, first_s, delta("x")]
    for _ in range(tokens - 1):
        steps += [gap_s, delta("y")]
    return [*steps, delta("", "length"), usage(10, tokens, 4), tail_s, DONE]


class Double:
    """A server of one script; `seats` requests at a time, the others wait at the door."""

    def __init__(self, clock: Clock, script: Script, seats: int = 10**6) -> None:
        self._clock, self._script = clock, script
        self._seats = asyncio.Semaphore(seats)
        self.bodies: list[dict[str, Any]] = []
        self.open = self.most_open = 0

    async def __call__(self, record: Record, body: bytes, ask: Ask, keep_text: bool) -> str:
        self.bodies.append(json.loads(body))
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        exchange = Exchange(record, keep_text=keep_text)
        async with self._seats:
            for step in self._script(self.bodies[-1]):
                if isinstance(step, bytes):
                    exchange.feed(step, self._clock())
                else:
                    await asyncio.sleep(step)
        self.open -= 1
        exchange.flush()
        return exchange.text


def closed(script: Script, load: Workload, at_once: int, **more: Any) -> tuple[Driver, Double]:
    async def main(clock: Clock) -> tuple[Driver, Double]:
        server = Double(clock, script)
        driver = Driver(server, load, "m", clock=clock)
        await driver.closed(load.sessions("x", load.requests), at_once, **more)
        return driver, server

    return run_virtual(main)


def opened(
    script: Script, load: Workload, shape: Shape, seats: int = 10**6
) -> tuple[Driver, Double]:
    async def main(clock: Clock) -> tuple[Driver, Double]:
        server = Double(clock, script, seats)
        driver = Driver(server, load, "m", clock=clock)
        job = Job(target=TARGET, workload=load, shape=shape, part="x")
        await driver.open(arrivals_of(job), clock(), shape.concurrency)
        return driver, server

    return run_virtual(main)


def test_every_figure_of_a_steady_server() -> None:
    """Two at once, 10 requests: TTFT 0.3, 4 gaps of 0.05, 0.1 from the last token to the end."""
    driver, server = closed(lambda body: streamed(0.3, 0.05, 5, 0.1), Workload(requests=10), 2)
    found = level(driver.records, 2, slo_s={"ttft": 0.31, "itl": 0.051})
    assert server.most_open == 2
    for of, value in [
        (found.ttft_s, 0.3),
        (found.ttfc_s, 0.3),
        (found.e2e_s, 0.6),
        (found.itl_s, 0.05),
        (found.icl_s, 0.05),
        (found.tpot_s, 0.3 / 4),
        (found.normalised_s, 0.6 / 5),
    ]:
        assert of is not None
        assert (of.mean, of.p50, of.p90, of.p99, of.max) == exactly((value,) * 5)
    assert found.itl_s is not None
    assert found.itl_s.count == 40
    assert found.duration_s == exactly(3.0)
    assert found.output_tokens_per_s == exactly(50 / 3)
    assert found.total_tokens_per_s == exactly(150 / 3)
    assert found.requests_per_s == exactly(10 / 3)
    assert found.in_flight == exactly(2.0)
    assert (found.prompt_tokens, found.cached_tokens, found.output_tokens) == (100, 40, 50)
    assert (found.goodput_per_s, found.good_share) == exactly((10 / 3, 1.0))


def test_percentiles_of_a_server_that_slows_down() -> None:
    """Request k takes (k + 1) * 10 ms to its first token."""
    count = iter(range(1, 101))
    driver, _ = closed(lambda body: streamed(next(count) / 100, 0.01, 2), Workload(requests=100), 1)
    found = level(driver.records, 1, slo_s={"ttft": 0.2501})
    assert found.ttft_s is not None
    assert found.ttft_s.mean == exactly(0.505)
    assert (found.ttft_s.p50, found.ttft_s.p90) == exactly((0.505, 0.901))
    assert (found.ttft_s.p99, found.ttft_s.max) == exactly((0.9901, 1.0))
    assert found.good_share == exactly(0.25)
    assert found.goodput_per_s == exactly(25 / found.duration_s)


def test_several_tokens_a_chunk() -> None:
    """8 tokens in 4 chunks 0.2 s apart: 7 token gaps that add up to 0.6 s."""

    def script(body: dict[str, Any]) -> list[Step]:
        chunks: list[Step] = [0.2, delta("cd")]
        return [0.1, delta("ab"), *chunks * 3, usage(1, 8), DONE]

    driver, _ = closed(script, Workload(requests=3), 1)
    found = level(driver.records, 1)
    assert found.icl_s is not None
    assert found.itl_s is not None
    assert (found.icl_s.mean, found.icl_s.count) == exactly((0.2, 9))
    assert (found.itl_s.mean, found.itl_s.count) == exactly((0.6 / 7, 21))


def test_reasoning_and_calls_are_tokens() -> None:
    def script(body: dict[str, Any]) -> list[Step]:
        def choice(said: dict[str, Any]) -> bytes:
            return event({"choices": [{"index": 0, "delta": said}]})

        call = {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": ""}}]}
        empty = choice({"content": "", "reasoning_content": "", "tool_calls": []})
        thought = choice({"reasoning": "hm", "content": None})
        return [ROLE, 0.1, empty, 0.1, thought, 0.1, choice(call), usage(1, 2), DONE]

    driver, _ = closed(script, Workload(requests=1), 1)
    found = level(driver.records, 1)
    assert found.ttft_s is not None
    assert found.ttfc_s is not None
    assert (found.ttft_s.mean, found.ttfc_s.mean) == exactly((0.2, 0.3))


def test_errors_sheds_and_drops_spoil_nothing() -> None:
    """One in four each of: good, failed, shed, dropped. Only the good one is in the figures."""
    load = Workload(requests=8)

    async def main(clock: Clock) -> Driver:
        good = Double(clock, lambda body: streamed(0.1, 0.1, 3))
        turn = iter(range(100))

        async def send(record: Record, body: bytes, ask: Ask, keep_text: bool) -> str:
            kind = next(turn) % 4
            if kind == 0:
                return await good(record, body, ask, keep_text)
            await asyncio.sleep(5)
            record.chunks_s = [clock()]
            record.error = ["", "HTTP 500", "HTTP 503 queue_full", ""][kind]
            record.shed, record.cancelled = kind == 2, kind == 3
            return ""

        driver = Driver(send, load, "m", clock=clock)
        await driver.closed(load.sessions("x", 8), 8)
        return driver

    found = level(run_virtual(main).records, 8, slo_s={"ttft": 1.0})
    assert (found.requests, found.cancelled) == (8, 2)
    assert found.errors == {"HTTP 500": 2}
    assert found.sheds == {"HTTP 503 queue_full": 2}
    assert found.ttft_s is not None
    assert (found.ttft_s.count, found.ttft_s.max) == exactly((2, 0.1))
    assert found.output_tokens == 6
    assert found.good_share == exactly(2 / 6)


def test_steady_throughput_leaves_out_ramp_and_drain() -> None:
    """Four at once, each 1 s to the first token and one token each 0.1 s after: staggered ends."""
    lengths = iter([10, 20, 30, 40] + [25] * 16)
    driver, _ = closed(lambda body: streamed(0.1, 0.1, next(lengths)), Workload(requests=20), 4)
    found = level(driver.records, 4)
    assert found.steady_tokens_per_s == exactly(40.0, rel=0.01)
    assert found.output_tokens_per_s < 39
    assert steady_tokens_per_s(driver.records[:1]) is None


def test_duration_ends_a_closed_loop() -> None:
    driver, _ = closed(lambda body: streamed(1.0, 0.1, 2), Workload(requests=1000), 3, until_s=10.0)
    assert len(driver.records) == 30
    assert max(record.sent_s for record in driver.records) == exactly(9.9)


class TestOpenLoop:
    def test_sends_on_time_whatever_the_server_does(self) -> None:
        load, shape = Workload(requests=50), Shape(rate=20.0, burstiness=0)
        driver, server = opened(lambda body: streamed(3.0, 0.1, 2), load, shape)
        sent = [record.sent_s for record in driver.records]
        assert sent == exactly([(k + 1) / 20 for k in range(50)])
        assert server.most_open == 50
        found = level(driver.records, 0)
        assert found.lag_s is not None
        assert found.lag_s.max == exactly(0.0)
        assert found.ttft_s is not None
        assert found.ttft_s.mean == exactly(3.0)
        assert achieved_per_s(driver.records, 0.05, 2.5) == 0  # all ended after the last send

    def test_bursts(self) -> None:
        load, shape = Workload(requests=20), Shape(rate=10.0, burstiness=0, burst=5)
        driver, _ = opened(lambda body: streamed(0.1, 0.1, 2), load, shape)
        times = sorted(record.sent_s for record in driver.records)
        assert times == exactly([0.5] * 5 + [1.0] * 5 + [1.5] * 5 + [2.0] * 5)

    def test_a_limit_makes_requests_wait_and_says_so(self) -> None:
        load, shape = Workload(requests=4), Shape(rate=4.0, burstiness=0, concurrency=1)
        driver, server = opened(lambda body: streamed(0.9, 0.1, 2), load, shape)
        assert server.most_open == 1
        found = level(driver.records, 1)
        assert found.lag_s is not None
        assert found.lag_s.max == exactly(3 * 1.0 - 0.75)

    @pytest.mark.parametrize(
        ("rate", "expected"), [(2.0, False), (8.0, False), (12.0, True), (40.0, True)]
    )
    def test_saturation(self, rate: float, expected: bool) -> None:
        """A server of 10 requests a second: one at a time, 0.1 s each."""
        load, shape = Workload(requests=400), Shape(rate=rate)
        driver, _ = opened(lambda body: streamed(0.05, 0.05, 2), load, shape, seats=1)
        last_s = max(record.sent_s for record in driver.records)
        assert saturated(driver.records, last_s) is expected
        begin_s = min(record.sent_s for record in driver.records)
        achieved = achieved_per_s(driver.records, begin_s, last_s)
        assert achieved == exactly(min(rate, 10.0), rel=0.05)

    def test_saturation_is_seen_on_the_way_and_ends_the_level(self) -> None:
        load = Workload(requests=10_000)

        async def main(clock: Clock) -> Driver:
            server = Double(clock, lambda body: streamed(0.05, 0.05, 2), seats=1)
            driver = Driver(server, load, "m", clock=clock)
            shape = Shape(rate=20.0)
            job = Job(target=TARGET, workload=load, shape=shape, part="x")

            async def look() -> None:
                while not saturated(driver.records, clock()):  # noqa: ASYNC110  virtual time
                    await asyncio.sleep(0.5)
                driver.stopped.set()

            await asyncio.gather(driver.open(arrivals_of(job), 0.0), look())
            return driver

        driver = run_virtual(main)
        assert 30 < len(driver.records) < 500
        assert all(record.end_s for record in driver.records)

    def test_too_little_says_nothing(self) -> None:
        assert not saturated([], 1.0)
        assert not saturated([Record(sent_s=0.0, end_s=5.0)] * 20, 1.0)


class TestSessions:
    def test_think_time_and_history(self) -> None:
        load = Workload(requests=3, turns=3, think_s=1.0, max_tokens=2)
        driver, server = closed(lambda body: streamed(0.1, 0.1, 2), load, 1)
        think = [turn.think_s for session in load.sessions("x", 1) for turn in session.turns]
        first, second, third = driver.records[:3]
        assert second.sent_s - first.end_s == exactly(think[1])
        assert third.sent_s - second.end_s == exactly(think[2])
        said = [m["content"] for m in server.bodies[2]["messages"]]
        assert len(said) == 5
        assert said[1] == said[3] == "xy"
        assert said[0] == server.bodies[0]["messages"][0]["content"]
        assert [record.turn for record in driver.records[:3]] == [0, 1, 2]

    def test_a_fan_out_is_sent_side_by_side(self) -> None:
        driver, server = closed(
            lambda body: streamed(0.1, 0.1, 2), Workload(requests=6, fan_out=4), 1
        )
        starts = [record.sent_s for record in driver.records[:6]]
        assert starts == exactly([0.0] + [0.2] * 4 + [0.4])
        assert server.most_open == 4
        sizes = [len(body["messages"]) for body in server.bodies[:6]]
        assert sizes == [1, 3, 3, 3, 3, 11]

    def test_a_broken_session_ends_and_is_counted(self) -> None:
        calls = iter(range(100))

        def script(body: dict[str, Any]) -> list[Step]:
            return [DONE] if next(calls) else [event({"error": {"code": "oops"}})]

        driver, server = closed(script, Workload(requests=2, turns=3), 1)
        assert driver.unsent == 2
        assert driver.records[0].error == "error event: oops"
        assert len(server.bodies) == 1 + 3


def test_a_sweep_goes_from_floor_to_ceiling_and_stops() -> None:
    seen: list[Shape] = []

    async def measure(shape: Shape) -> Level:
        seen.append(shape)
        speed = {1: 2.0, 64: 12.0}.get(shape.concurrency, shape.rate or 0.0)
        made = Record(sent_s=0.0, chunks_s=[1 / speed], end_s=1 / speed, output_tokens=1)
        return level([made], shape.concurrency, saturated=(shape.rate or 0) > 7)

    asyncio.run(sweep(measure, 7, 64, Shape(), 1))
    assert [shape.concurrency for shape in seen[:2]] == [1, 64]
    assert [shape.rate for shape in seen[2:]] == exactly([4.0, 6.0, 8.0])
    assert rates_between(2.0, 12.0, 5)[-1] == 12.0
