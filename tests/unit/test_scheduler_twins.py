"""Prompts that begin alike: who waits for a step that computes its beginning, and who does not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from headrace.engine.draft import Flight
from headrace.engine.request import Sequence
from headrace.engine.scheduler import MOST_ASIDE
from tests.unit.engine_rig import LOOPS, Rig, first_tokens
from tests.unit.test_scheduler import prefill_tokens

SHARED = [i * i % 256 for i in range(100)]


def plan_of(rig: Rig, handle: int) -> int:
    """The plan that computes the first of a request's prompt, or of what no cache has of it. Needs:
    no other prompt ends alike, and one chunk is enough."""
    prompt = rig.submits[0, handle].prompt
    for number, plan in enumerate(rig.plans):
        if any(ids and ids == prompt[-len(ids) :] for ids in plan.ids):
            return number
    raise AssertionError(f"{handle} never joined")


def twins(overlap: bool, blocks: int = 400, rows: int = 8, **options: Any) -> Rig:
    """An engine where 20 tokens are worth waiting for."""
    rig = Rig(blocks, rows=rows, overlap=overlap, max_num_batched_tokens=512, **options)
    rig.engine.scheduler.twin_tokens = 20
    return rig


@LOOPS
@pytest.mark.parametrize("chunk", [512, 60])
def test_who_comes_while_its_beginning_is_computed_waits_for_it(overlap: bool, chunk: int) -> None:
    """One step later, and then it computes its own end alone; so do all that came with it."""
    rig = Rig(400, overlap=overlap, max_num_batched_tokens=chunk)
    rig.engine.scheduler.twin_tokens = 20
    shared = [i * i % 256 for i in range(200)]
    rig.submit([*shared, 1, 2, 3], 6)
    rig.turn()
    for i in range(3):
        rig.submit([*shared, 4 + i, 5, 6, 7], 6)
    rig.run()
    assert sum(prefill_tokens(plan) for plan in rig.plans) == 203 + 3 * 4
    assert [done.cached_tokens for done in rig.dones.values()] == [0, 200, 200, 200]
    rig.check_tokens()
    rig.check_idle()


@LOOPS
def test_who_has_little_in_common_or_another_salt_does_not_wait(overlap: bool) -> None:
    rig = Rig(400, overlap=overlap, max_num_batched_tokens=512)
    rig.engine.scheduler.twin_tokens = 40
    shared = [i * i % 256 for i in range(100)]
    rig.submit([*shared, 1], 6)
    rig.submit([*shared[:44], *range(160)], 6)  # less than a quarter of what it computes
    rig.submit([*shared, 2], 6, cache_salt="other")
    rig.submit([*shared, 3], 6, prompt_logprobs=0)  # every token of its prompt is computed
    rig.run()
    assert len(rig.plans[0].joins) == 4
    rig.check_tokens()


@LOOPS
def test_a_better_class_waits_for_nobody_behind_it(overlap: bool) -> None:
    rig = Rig(400, overlap=overlap, max_num_batched_tokens=60, scheduling_policy="priority")
    rig.engine.scheduler.twin_tokens = 40
    shared = [i * i % 256 for i in range(200)]
    rig.submit([*shared, 1], 2, priority=5)
    rig.turn()
    rig.turn()
    urgent = rig.submit([*shared, 2], 2, priority=0)
    rig.run()
    assert first_tokens(rig)[0] == urgent
    rig.check_tokens()


@LOOPS
@pytest.mark.parametrize("windows", [(0,), (0, 7), (9,)])
def test_others_are_admitted_past_who_waits(overlap: bool, windows: tuple[int, ...]) -> None:
    """It is admitted in the first plan after its beginning was computed, before who came later."""
    rig = twins(overlap, windows=windows)
    first, waits = rig.submit([*SHARED, 1], 6), rig.submit([*SHARED, 2], 6)
    other = rig.submit(30, 6)
    rig.turn()
    last = rig.submit(31, 6)
    rig.run()
    assert [plan_of(rig, handle) for handle in (first, other, waits)] == [0, 0, 1 + overlap]
    assert plan_of(rig, last) == 1
    assert rig.dones[0, waits].cached_tokens == 100
    rig.check_tokens()
    rig.check_idle()


@LOOPS
@pytest.mark.parametrize("choices", [1, 2])
def test_the_rows_of_who_waits_stay_free(overlap: bool, choices: int) -> None:
    rig = twins(overlap, rows=2 + choices)
    rig.submit([*SHARED, 1], 20)
    waits = rig.submit([*SHARED, 2], 20, n=choices)
    passes, stays = rig.submit(30, 20), rig.submit(31, 20)
    rig.run()
    assert plan_of(rig, passes) == 0
    assert plan_of(rig, waits) == 1 + overlap
    assert plan_of(rig, stays) > 15, "a row became free"
    rig.check_tokens()


@LOOPS
@pytest.mark.parametrize(("blocks", "passes"), [(70, False), (90, True)])
def test_the_blocks_of_who_waits_stay_free(overlap: bool, blocks: int, passes: bool) -> None:
    """All that it would take if its beginning were never computed, and what may be drawn until
    then."""
    rig = twins(overlap, blocks)
    rig.submit([*SHARED, 1, 2, 3], 8)
    waits, other = rig.submit([*SHARED, 4, 5], 8), rig.submit(40, 8)
    rig.run()
    assert plan_of(rig, waits) == 1 + overlap
    assert plan_of(rig, other) == (0 if passes else 1 + overlap)
    rig.check_tokens()


@LOOPS
@pytest.mark.parametrize(
    ("headroom_tokens", "free", "wait", "passes"),
    [  # each lacks a few blocks, less than what it is named for
        pytest.param(128, 60, [(80, 1)], (40, 1), id="growth of who waits"),
        pytest.param(64, 110, [(320, 1)], (44, 1), id="next tokens of who waits"),
        pytest.param(48, 110, [(320, 1)], (40, 3), id="next tokens of the choices of who passes"),
        pytest.param(48, 110, [(320, 3), (320, 1)], (26, 1), id="and of another who waits"),
    ],
)
def test_what_who_waits_has_to_leave_free_stays_free(
    overlap: bool,
    headroom_tokens: int,
    free: int,
    wait: list[tuple[int, int]],
    passes: tuple[int, int],
) -> None:
    """An admission leaves room for later tokens of all that run: nobody passes who would take that.

    free: blocks that are left of 400 when the first two run. wait: tokens of the answer, choices.
    passes: blocks of its prompt, choices.
    """
    rig = twins(overlap, 400, rows=12, max_model_len=2000)
    rig.engine.scheduler.headroom_tokens = headroom_tokens
    rig.submit((400 - free - 7) * 4 - 3, 9)
    for _ in range(4):
        rig.turn()
    first = rig.submit([*SHARED[:24], 1], 4)
    waits = [
        rig.submit([*SHARED[:24], 2 + i], tokens, n=choices)
        for i, (tokens, choices) in enumerate(wait)
    ]
    other = rig.submit(passes[0] * 4 - 3, 4, n=passes[1])
    rig.run(turns=3000)
    soon = plan_of(rig, first) + 1 + overlap
    assert [plan_of(rig, one) for one in waits] == [soon] * len(waits)
    assert plan_of(rig, other) >= soon
    rig.check_tokens()


@LOOPS
def test_nobody_passes_who_does_not_fit(overlap: bool) -> None:
    """It would wait without a twin as well, for memory."""
    rig = twins(overlap, 40)
    rig.submit([*SHARED, 1], 8)
    waits, other = rig.submit([*SHARED, *range(40)], 8), rig.submit(9, 8)
    rig.run()
    assert plan_of(rig, other) >= plan_of(rig, waits)
    rig.check_tokens()


@LOOPS
def test_of_many_that_wait_few_are_looked_at(overlap: bool) -> None:
    rig = twins(overlap, 4000, rows=100)
    for last in range(MOST_ASIDE + 2):
        rig.submit([*SHARED, last], 2)
    other = rig.submit(9, 2)
    looked: list[Sequence] = []
    has_twin = rig.engine.scheduler._has_twin
    rig.engine.scheduler._has_twin = lambda one: looked.append(one) or has_twin(one)  # type: ignore
    rig.turn()
    assert len(looked) == 1 + MOST_ASIDE
    rig.run()
    assert plan_of(rig, other) == 1 + overlap
    cached = [rig.dones[0, handle].cached_tokens for handle in range(2, MOST_ASIDE + 3)]
    assert cached == [100] * (MOST_ASIDE + 1)
    rig.check_tokens()


class Unread(list[Sequence]):
    """Running sequences that nobody looks at one by one."""

    def __iter__(self) -> Iterator[Sequence]:
        raise AssertionError("every running sequence is looked at")


def test_who_is_looked_at_costs_its_own_blocks_alone() -> None:
    """However many run: a digest of the whole prefix is looked up, twice at most."""
    rig = twins(overlap=True)
    rig.submit([*SHARED, 1], 6)
    rig.turn()
    scheduler = rig.engine.scheduler
    rig.submit([*SHARED, 2], 6)
    alike = scheduler.queue.first()
    assert alike is not None
    running, scheduler.running = scheduler.running, Unread(scheduler.running)
    assert scheduler._has_twin(alike)
    scheduler.running = running
    rig.run()


def test_nothing_is_hashed_for_prompts_that_begin_otherwise() -> None:
    rig = twins(overlap=True)
    rig.submit([*SHARED, 1], 6)
    rig.turn()
    rig.submit([7, *SHARED], 6)
    other = rig.engine.scheduler.queue.first()
    assert other is not None
    assert not rig.engine.scheduler._has_twin(other)
    assert len(other.table.digests) == 1
    rig.run()


@LOOPS
def test_who_waits_for_one_that_is_gone_waits_no_longer(overlap: bool) -> None:
    rig = twins(overlap)
    rig.submit(9, 20)
    gone = rig.submit([*SHARED, 1], 6)
    rig.turn()
    waits = rig.submit([*SHARED, 2], 6)
    rig.abort(gone)
    rig.run()
    assert plan_of(rig, waits) == 1
    rig.check_tokens()
    rig.check_idle()


@LOOPS
def test_who_waited_too_long_is_passed_like_any_other(overlap: bool) -> None:
    """By age a third comes next, where the oldest waits for a twin."""
    rig = twins(overlap, scheduling_policy="priority", max_wait_s=5.0)
    rig.submit([*SHARED, 1], 6, priority=0)
    waits = rig.submit([*SHARED, 2], 6, priority=3)
    old = rig.submit(30, 6, priority=2)
    rig.clock.now += 6.0
    new = rig.submit(31, 6, priority=1)
    rig.run()
    assert [plan_of(rig, handle) for handle in (old, new, waits)] == [0, 0, 1 + overlap]
    rig.check_tokens()


# ---------------------------------------------------------------- never late


class Watch:
    """Asserts of each plan: whoever was passed, and waits for no twin now, is admitted."""

    MOST_PLANS = 6  # what is kept free is meant for a wait of a few steps

    def __init__(self, rig: Rig) -> None:
        self.rig, self.scheduler = rig, rig.engine.scheduler
        self.passed: dict[Sequence, int] = {}  # when somebody was first admitted past it
        self.aside: set[Sequence] = set()  # of the plan
        self._plan, self._set_aside = self.scheduler.schedule, self.scheduler._set_aside
        self.scheduler.schedule = self.schedule  # type: ignore[method-assign]
        self.scheduler._set_aside = self.set_aside  # type: ignore[method-assign]

    def set_aside(self, sequence: Sequence) -> None:
        self.aside.add(sequence)
        self._set_aside(sequence)

    def schedule(self, now: float) -> Flight | None:
        scheduler, before = self.scheduler, self.scheduler._tally.preemptions
        self.aside.clear()
        flight = self._plan(now)
        if scheduler._tally.preemptions != before:  # memory ran out: every promise is off
            self.passed.clear()
            return flight
        plans = len(self.rig.plans)
        for one, since in self.passed.items():
            late = one.queued is not None and one not in self.aside and scheduler.budget.open
            assert not late or plans - since > self.MOST_PLANS, f"{one.key} is late"
        rows = {join.row for join in flight.plan.joins} if flight is not None else set()
        joined = [one.key for one in scheduler.running if one.row in rows]
        for one in self.aside:
            if any(key > one.key for key in joined):
                self.passed.setdefault(one, plans)
        return flight


asked = st.tuples(
    st.sampled_from([0, 0, 20, 80, 80, 80]),  # tokens that all of these share
    st.integers(1, 30),  # tokens of its own
    st.integers(1, 40),  # tokens of its answer
    st.sampled_from([1, 1, 1, 2, 3]),  # choices
    st.sampled_from([0, 0, 0, 1, 2]),  # turns until the next comes
)


@settings(
    max_examples=300,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(
    requests=st.lists(asked, min_size=4, max_size=14),
    pool_tokens=st.integers(130, 600),
    block_size=st.sampled_from([1, 2, 4, 8]),
    rows=st.integers(3, 8),
    budget=st.integers(20, 200),
    overlap=st.booleans(),
    windows=st.sampled_from([(0,), (0,), (0, 7), (9,)]),
    twin_tokens=st.sampled_from([1, 4, 16]),
)
def test_who_was_passed_is_never_late_for_it(
    requests: list[tuple[int, int, int, int, int]],
    pool_tokens: int,
    block_size: int,
    rows: int,
    budget: int,
    overlap: bool,
    windows: tuple[int, ...],
    twin_tokens: int,
) -> None:
    rig = Rig(
        pool_tokens // block_size * len(windows),
        block_size,
        rows,
        overlap=overlap,
        windows=windows,
        max_num_batched_tokens=budget,
        max_queue=99,
    )
    rig.engine.scheduler.twin_tokens = twin_tokens
    Watch(rig)
    for shared, own, max_tokens, choices, turns in requests:
        mine = [(own * 7 + i * 3 + len(rig.submits) * 11) % 256 for i in range(own)]
        rig.submit([*SHARED[:shared], *mine], max_tokens, n=min(choices, rows))
        for _ in range(turns):
            rig.turn()
    rig.run(turns=3000)
    rig.check_tokens()
    rig.check_idle()
