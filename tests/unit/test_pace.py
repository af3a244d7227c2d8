"""How long a launch may wait for arrivals: never so long that the device runs dry."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

import msgspec
import pytest

from headrace.backends.fake import FakeRunner
from headrace.backends.fake.runner import FakeTicket
from headrace.config import Settings
from headrace.engine.loop import Engine
from headrace.engine.pace import LEAST_SLACK_S, Pace
from headrace.engine.protocol import StepCost
from headrace.kv.cache import KVCache
from headrace.messages import StepPlan, Submit
from tests.unit.engine_rig import GREEDY

COST = StepCost(floor_s=0.02, token_s=1e-5, base_s=0, pair_s=0, read_s=0, tile=16)


def plan_of(step: int, counts: list[int]) -> StepPlan:
    rows = list(range(len(counts)))
    ids: list[list[int] | None] = [None if count == 1 else [1] * count for count in counts]
    starts = [100] * len(counts)
    return StepPlan(step, [], [], [], [[]], rows, starts, counts, ids, rows, [], rows, rows)


def steady(pace: Pace, busy_s: float, waited_s: float, steps: int) -> float:
    """Decode steps of two rows, each landing as the next is in flight; the spare after the last."""
    now_s, spare_s = 0.0, 0.0
    for step in range(1, steps + 1):
        pace.launched(plan_of(step + 1, [1, 1]), now_s, now_s)
        pace.landed(plan_of(step, [1, 1]), busy_s, waited_s, now_s)
        spare_s = pace.spare_s(now_s)
        now_s += busy_s
    return spare_s


def test_a_steady_step_takes_what_the_last_one_took() -> None:
    assert abs(steady(Pace(), 0.010, 0.005, 3) - (0.010 - LEAST_SLACK_S)) < 1e-9
    assert steady(Pace(), LEAST_SLACK_S, 0.0005, 3) == 0.0, "too short to wait for anybody"


def test_nothing_is_known_of_another_step() -> None:
    pace = Pace()
    assert steady(pace, 0.010, 0.005, 3) > 0
    for before, after in ([[1], [1, 1]], [[1, 1], [1]], [[1, 1], [1, 40]], [[1, 40], [1, 40]]):
        pace.launched(plan_of(9, after), 0.1, 0.1)
        pace.landed(plan_of(8, before), 0.010, 0.005, 0.1)
        assert pace.spare_s(0.1) == 0.0, (before, after)


def test_a_step_that_was_long_for_once_is_not_expected_again() -> None:
    pace = Pace()
    steady(pace, 0.010, 0.005, 3)
    pace.launched(plan_of(5, [1, 1]), 0.030, 0.030)
    pace.landed(plan_of(4, [1, 1]), 60.0, 60.0, 60.030)
    assert pace.spare_s(60.030) == pytest.approx(0.010 - LEAST_SLACK_S)


def test_nothing_is_known_of_the_first_steps() -> None:
    assert steady(Pace(), 0.010, 0.005, 1) == 0.0
    assert steady(Pace(), 0.010, 0.005, 2) > 0.0
    assert steady(Pace(), 0.0, 0.0, 3) == 0.0, "nor where nobody measures"


def test_who_waits_already_must_be_planned_too() -> None:
    pace = Pace()
    steady(pace, 0.010, 0.005, 3)
    now_s = 0.020
    alone_s = pace.spare_s(now_s)
    assert 0 < pace.spare_s(now_s, waiting=2, tokens=8000) < alone_s
    assert pace.spare_s(now_s, waiting=500, tokens=8000) == 0.0


def test_a_long_launch_is_remembered_for_a_while() -> None:
    pace = Pace()
    pace.launched(plan_of(1, [1, 1]), -0.004, 0.0)
    assert steady(pace, 0.020, 0.005, 2) < 0.020 - 0.0037 - LEAST_SLACK_S
    assert steady(pace, 0.020, 0.005, 100) > 0.020 - 0.001 - LEAST_SLACK_S


def test_a_long_launch_of_prompts_says_nothing_of_single_tokens() -> None:
    pace = Pace()
    pace.launched(plan_of(1, [400]), -0.008, 0.0)
    spare_s = steady(pace, 0.020, 0.005, 3)
    assert spare_s == pytest.approx(0.020 - LEAST_SLACK_S)
    assert pace.spare_s(0.040, waiting=1) < spare_s - 0.007, "who waits brings such a launch"


def test_a_device_found_dry_gets_its_steps_earlier() -> None:
    pace = Pace()
    before_s = steady(pace, 0.020, 0.005, 3)
    late_s = steady(pace, 0.020, 0.0, 3)  # its results are there before anybody asks
    assert late_s < before_s - 2 * LEAST_SLACK_S
    assert steady(pace, 0.020, 0.0, 30) == 0.0
    assert abs(steady(pace, 0.020, 0.005, 200) - before_s) < 1e-9


class Halting(FakeRunner):
    """A device that stands still for a while in one step, with a host that takes its time to read
    what each step gave."""

    halts_s: Mapping[int, float] = {}  # step -> how long
    reads_s = 0.0

    def _modelled_s(self, plan: StepPlan) -> float:
        return super()._modelled_s(plan) + self.halts_s.get(plan.step, 0.0)

    def _await(self, ticket: FakeTicket) -> float:
        waited_s = super()._await(ticket)
        self._sleep(self.reads_s)
        return waited_s


class Served:
    """An overlapped engine as `engine.server` drives it, on modelled time."""

    def __init__(
        self,
        *,
        waits: bool,
        cost: StepCost = COST,
        halts_s: Mapping[int, float] = {},
        reads_s: float = 0.0,
    ) -> None:
        self.now_s, self.waits = 0.0, waits
        self.busy_s = 0.0
        runner = Halting(
            400, 16, 8, 6000, cost=cost, eos_ids=(), clock=self.clock, sleep=self.sleep
        )
        runner.halts_s, runner.reads_s = halts_s, reads_s
        settings = Settings(max_num_seqs=8, max_num_batched_tokens=512)
        cache = KVCache(400, 16, True)
        self.engine = Engine(settings, cache, runner, overlap=True, clock=self.clock)
        self.engine.watch(lambda times: self.add(times.busy_s))

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def add(self, busy_s: float) -> None:
        self.busy_s += busy_s

    def turn(self) -> set[int]:
        """When no more time is to spare; who was told of a token."""
        while self.waits and (spare_s := self.engine.spare_s()) > 0:
            self.now_s += spare_s
        out = self.engine.turn().get(0)
        return set() if out is None else set(out.handles)

    def first_token_s(self, handle: int, after_s: float) -> float:
        """From its arrival, `after_s` after a turn ended."""
        arrives_s, left_s = self.now_s + after_s, after_s
        while True:
            while self.waits and (spare_s := self.engine.spare_s()) > 0:
                self.now_s += min(spare_s, left_s)
                left_s = self.arrived(handle, arrives_s, left_s)
            left_s = self.arrived(handle, arrives_s, left_s)
            if handle in self.engine.turn()[0].handles:
                return self.now_s - arrives_s

    def arrived(self, handle: int, arrives_s: float, left_s: float) -> float:
        """Seconds until it does: inf when it has."""
        if left_s < inf and self.now_s >= arrives_s:
            self.engine.submit(0, Submit(handle, [handle] * 40, 4, GREEDY))
            return inf
        return left_s if left_s == inf else arrives_s - self.now_s


@pytest.mark.parametrize("reads_s", [0.0, 0.004])
def test_who_arrives_while_a_step_runs_is_in_the_next_one(reads_s: float) -> None:
    """At no cost to those that decode: the device is never idle."""
    first_s = {}
    for waits in (False, True):
        served = Served(waits=waits, reads_s=reads_s)
        for handle in range(3):
            served.engine.submit(0, Submit(handle, [handle + 1] * 16, 2000, GREEDY))
        for _ in range(8):
            served.engine.turn()
        began_s, served.busy_s = served.now_s, 0.0
        first_s[waits] = served.first_token_s(100, 0.006)
        assert served.busy_s >= served.now_s - began_s - 1e-9, "the device was idle"
    step_s = COST.floor_s
    assert first_s[False] > 2 * step_s
    assert first_s[True] < first_s[False] - 0.9 * step_s


@pytest.mark.parametrize("waits", [False, True])
def test_a_halt_of_the_device_is_one_gap_between_tokens(*, waits: bool) -> None:
    served, gaps_s = Served(waits=waits, halts_s={15: 2.0}), []
    served.engine.submit(0, Submit(1, [1] * 16, 40, GREEDY))
    while served.engine.has_work:
        before_s = served.now_s
        served.turn()
        gaps_s.append(served.now_s - before_s)
    assert sum(gap_s > 1.5 * COST.floor_s for gap_s in gaps_s) == 1


@pytest.mark.parametrize("waits", [False, True])
def test_a_cached_prompt_is_not_taken_for_the_long_one_before_it(*, waits: bool) -> None:
    """Both are steps of one token, and its result is there much sooner."""
    served = Served(waits=waits, cost=msgspec.structs.replace(COST, read_s=2e-5))
    for handle, prompt in ((1, [1] * 32), (2, [2] * 5000)):
        served.engine.submit(0, Submit(handle, prompt, 5, GREEDY))
        while served.engine.has_work:
            served.turn()
    arrived_s = served.now_s
    served.engine.submit(0, Submit(3, [1] * 32, 5, GREEDY))
    while 3 not in served.turn():
        pass
    assert served.now_s - arrived_s < 1.1 * COST.floor_s
