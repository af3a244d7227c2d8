"""Engine over a runner that breaks: who ends, who is served, what is found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from headrace.backends.fake import FakeRunner
from headrace.backends.fake.runner import FakeTicket
from headrace.engine.protocol import Masks
from headrace.kv.cache import KVCache, Table
from headrace.messages import Sampling, StepPlan, StepResult
from tests.unit.engine_rig import LOOPS, Rig


class Faulty:
    """A runner that breaks where it is told."""

    def __init__(self, inner: FakeRunner) -> None:
        self.inner = inner
        self.capacity = inner.capacity
        self.break_launch: set[int] = set()
        self.break_result: set[int] = set()
        self.fail_draw: dict[int, int] = {}  # step -> draw

    def launch(self, plan: StepPlan) -> FaultyTicket:
        if plan.step in self.break_launch:
            raise RuntimeError(f"launch of {plan.step}")
        return FaultyTicket(self, plan, self.inner.launch(plan))

    def counters(self) -> Mapping[str, int]:
        return self.inner.counters()

    def idle(self) -> bool:
        return self.inner.idle()

    def close(self) -> None:
        self.inner.close()


class FaultyTicket:
    def __init__(self, runner: Faulty, plan: StepPlan, inner: FakeTicket) -> None:
        self.runner, self.plan, self.inner = runner, plan, inner

    def likely(self) -> Sequence[int]:
        return self.inner.likely()

    def finish(self, masks: Masks | None = None) -> None:
        self.inner.finish(masks)

    def result(self) -> StepResult:
        result = self.inner.result()
        if self.plan.step in self.runner.break_result:
            raise RuntimeError(f"result of {self.plan.step}")
        draw = self.runner.fail_draw.get(self.plan.step)
        if draw is None:
            return result
        result.tokens[draw] = -1
        return StepResult(result.step, result.tokens, [(draw, "logits are not finite")])


def faulty_rig(**fields: Any) -> tuple[Rig, Faulty]:
    """A rig and the runner in it."""
    made: list[Faulty] = []

    def wrap(inner: FakeRunner) -> Faulty:
        made.append(Faulty(inner))
        return made[0]

    return Rig(wrap=wrap, **fields), made[0]


@LOOPS
@pytest.mark.parametrize("step", [1, 4])
def test_a_failed_draw_ends_that_choice_alone(step: int, overlap: bool) -> None:
    """Its text may have ended before, at a stop string; who reads it ends the others if not."""
    rig, runner = faulty_rig(overlap=overlap)
    for _ in range(3):
        rig.submit(4, 8, n=2, sampling=Sampling(seed=3))
    runner.fail_draw[step] = 2  # choice 0 of the second request
    rig.run()
    assert [rig.dones[0, h].error for h in (1, 2, 3)] == ["", "request_failed", ""]
    assert rig.dones[0, 2].message == "logits are not finite"
    assert [rig.ends[0, 2, c].reason for c in (0, 1)] == ["error", "length"]
    assert rig.dones[0, 1].output_tokens == rig.dones[0, 3].output_tokens == 16
    rig.check_tokens()
    rig.check_idle()


@LOOPS
def test_the_end_of_the_others_tells_what_failed(overlap: bool) -> None:
    rig, runner = faulty_rig(overlap=overlap)
    handle = rig.submit(4, 50, n=2, sampling=Sampling(seed=3))
    runner.fail_draw[4] = 1
    while (0, handle, 1) not in rig.ends:
        rig.turn()
    assert (0, handle) not in rig.dones
    rig.abort(handle)
    rig.run()
    assert [rig.ends[0, handle, c].reason for c in (0, 1)] == ["abort", "error"]
    assert rig.dones[0, handle].message == "logits are not finite"
    rig.check_idle()


@LOOPS
@pytest.mark.parametrize("where", ["break_launch", "break_result"])
@pytest.mark.parametrize("step", [1, 2, 5])
def test_a_broken_step_fails_who_runs_and_serves_who_waits(
    where: str, step: int, overlap: bool
) -> None:
    rig, runner = faulty_rig(overlap=overlap, rows=2, blocks=32)
    getattr(runner, where).add(step)
    for _ in range(5):
        rig.submit(4, 8)
    rig.run()
    errors = [rig.dones[0, handle].error for handle in range(1, 6)]
    assert errors == ["request_failed", "request_failed", "", "", ""]
    assert f"of {step}" in rig.dones[0, 1].message
    rig.check_tokens()
    rig.check_idle()
    assert len(rig.fake._rows) <= 2


@LOOPS
def test_two_broken_steps_in_a_row_end_the_engine(overlap: bool) -> None:
    rig, runner = faulty_rig(overlap=overlap)
    runner.break_launch.update({3, 4, 5})
    rig.submit(4, 8)
    rig.turn()
    rig.turn()
    rig.turn()  # the first broken one
    rig.submit(4, 8)
    with pytest.raises(RuntimeError, match="launch of 4"):
        rig.turn()
    rig.engine.close()
    assert rig.fake.closed


def test_a_broken_fence_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake runner proves the fence: without it, overlap reuses blocks of a step in flight."""

    def release(self: KVCache, table: Table, step: int) -> None:
        assert step >= 0
        honest(self, table, 0)

    rig = Rig(blocks=8, rows=4, overlap=True, prefix_caching=False)
    honest = KVCache.release
    monkeypatch.setattr(KVCache, "release", release)
    for _ in range(6):
        rig.submit(8, 20, stop_ids=list(range(97, 123)))
    rig.run()
    messages = [done.message for done in rig.dones.values() if done.error == "request_failed"]
    assert messages
    assert "is reused while step" in messages[0]
