"""The factor between predicted and measured steps."""

from __future__ import annotations

import pytest

from headrace.engine.budget import CostBudget, StaticBudget
from headrace.engine.lateness import Lateness
from tests.unit.test_budget import COST, MAX_TOKENS, TARGET_S, fill, step_s


def test_late_at_once_early_little_by_little() -> None:
    lateness = Lateness()
    assert lateness.factor == 1.0
    for _ in range(4):
        lateness.learn(0.04, 0.044)
    assert lateness.factor == pytest.approx(1.1, abs=0.01)
    lateness.learn(0.04, 0.038)
    assert lateness.factor > 1.08, "one fast step says little"
    for _ in range(100):
        lateness.learn(0.04, 0.038)
    assert lateness.factor == pytest.approx(0.95, abs=0.01)


def test_what_no_clock_explains_is_not_learned() -> None:
    lateness = Lateness()
    for busy_s in (0.110, 0.0, 0.02, 0.061):  # of a capture, of a runner that does not measure
        lateness.learn(0.04, busy_s)
    assert lateness.factor == 1.0
    for _ in range(50):
        lateness.learn(0.04, 0.055)
    assert lateness.factor == 1.25, "bounded"
    for _ in range(200):
        lateness.learn(0.04, 0.026)
    assert lateness.factor == 0.9, "on both sides"


def test_a_budget_learns_of_its_limited_steps_alone() -> None:
    budget, decodes = CostBudget(COST, MAX_TOKENS, TARGET_S), [500] * 32
    before = fill(budget, decodes, [(0, 8000)])
    assert budget.predicted_s == pytest.approx(step_s(COST, decodes, before))
    for _ in range(10):
        budget.learn(budget.predicted_s, budget.predicted_s * 1.2)
    assert 1.19 < budget.factor <= 1.2
    ((_, count),) = after = fill(budget, decodes, [(0, 8000)])
    assert count < before[0][1]
    assert step_s(COST, decodes, after) * 1.19 <= TARGET_S
    fill(budget, [], [(0, 8000)])
    assert budget.predicted_s == 0.0, "no target holds it"
    fill(budget, decodes, [])
    assert budget.predicted_s == 0.0, "no prompt is in it"
    fill(budget, decodes, [(0, 5)])
    assert budget.predicted_s == 0.0, "too short to tell"
    assert StaticBudget(MAX_TOKENS).predicted_s == 0.0


@pytest.mark.parametrize(("late", "goes_on"), [(1.0, True), (1.25, False)])
def test_a_burst_ends_where_late_steps_are_long_gaps(*, late: float, goes_on: bool) -> None:
    """Its first step is below the target as predicted, and beyond it as late as steps are."""
    budget, decodes = CostBudget(COST, MAX_TOKENS, TARGET_S), [500] * 32
    for _ in range(20):
        budget.learn(TARGET_S, TARGET_S * late)
    first = fill(budget, decodes, [(0, 12)] * 40)
    assert TARGET_S / 1.25 < step_s(COST, decodes, first) < TARGET_S
    rest = fill(budget, decodes, [(0, 200)] * 16)
    assert (sum(count for _, count in rest) == 16 * 200) == goes_on
