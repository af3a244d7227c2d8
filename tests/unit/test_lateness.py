"""The factor between predicted and measured steps."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from headrace.engine.budget import CostBudget, Prediction, StaticBudget
from headrace.engine.lateness import Lateness
from tests.unit.test_budget import COST, MAX_TOKENS, TARGET_S, fill, step_s


def test_late_at_once_early_little_by_little() -> None:
    lateness = Lateness()
    assert lateness.factor(0.0) == 1.0
    for _ in range(4):
        lateness.learn(0.0, 0.04, 0.044)
    assert lateness.factor(0.0) == pytest.approx(1.1, abs=0.01)
    lateness.learn(0.0, 0.04, 0.038)
    assert lateness.factor(0.0) > 1.06, "one fast step says little"
    for _ in range(100):
        lateness.learn(0.0, 0.04, 0.038)
    assert lateness.factor(0.0) == pytest.approx(0.95, abs=0.01)


def test_a_card_is_slower_the_longer_it_is_loaded() -> None:
    lateness = Lateness()
    for _ in range(8):
        lateness.learn(0.0, 0.04, 0.036)
        lateness.learn(0.2, 0.04, 0.044)
    assert lateness.factor(0.0) < 0.95, "what comes late does not count for the first steps"
    assert lateness.factor(0.19) == 1.0, "nor for any before it"
    assert lateness.factor(0.2) == pytest.approx(1.1, abs=0.01)
    assert lateness.factor(100.0) == lateness.factor(0.2), "longer loads are no faster"
    lateness.learn(0.4, 0.04, 0.038)
    assert lateness.factor(0.4) < lateness.factor(0.2), "unless they were seen to be"


def test_a_load_grows_with_prompts_and_goes_with_other_steps() -> None:
    load_s = Lateness.loaded(0.0, 0.01, prompts=False)
    assert load_s == 0.0, "there is no less"
    load_s = Lateness.loaded(Lateness.loaded(load_s, 0.04, prompts=True), 0.03, prompts=True)
    assert load_s == pytest.approx(0.07)
    assert Lateness.loaded(load_s, 0.01, prompts=False) == pytest.approx(0.06)
    most_s = Lateness.loaded(load_s, 60.0, prompts=True)
    assert Lateness.loaded(most_s, 1.0, prompts=False) == 0.0, "a card cools within a second"


def test_what_no_clock_explains_is_not_learned() -> None:
    lateness = Lateness()
    for busy_s in (0.110, 0.0, 0.02, 0.061):  # of a capture, of a runner that does not measure
        lateness.learn(0.0, 0.04, busy_s)
    assert lateness.factor(0.0) == 1.0
    for _ in range(50):
        lateness.learn(0.0, 0.04, 0.0555)
    assert lateness.factor(0.0) == 1.35, "bounded"
    for _ in range(200):
        lateness.learn(0.0, 0.04, 0.026)
    assert lateness.factor(0.0) == 0.85, "on both sides"


def test_what_every_step_shows_counts_whatever_its_cause() -> None:
    """A card whose clock was halved, or that is shared."""
    lateness = Lateness()
    for _ in range(2):
        lateness.learn(0.0, 0.04, 0.080)
        lateness.learn(0.0, 0.04, 0.040)
    assert lateness.factor(0.0) == 1.0, "two that were alone"
    for _ in range(2):
        lateness.learn(0.0, 0.04, 0.080)
    assert lateness.factor(0.0) == 1.35
    for _ in range(9):
        lateness.learn(0.0, 0.04, 0.0)
    assert lateness.factor(0.0) == 1.35, "no step is that early"


@given(
    st.lists(
        st.tuples(
            st.floats(0.0, 1.0) | st.just(100.0),
            st.floats(1e-6, 1.0),
            st.floats(0.0, 3.0) | st.just(1000.0),
        )
    )
)
def test_whatever_is_seen_factors_are_bounded_and_no_load_is_passed_over(
    steps: list[tuple[float, float, float]],
) -> None:
    """Shorter loads keep theirs; what is late under a load is so under longer ones."""
    lateness, loads_s = Lateness(), [0.02 + 0.04 * place for place in range(16)]
    before = [1.0] * 16
    for load_s, predicted_s, late in steps:
        lateness.learn(load_s, predicted_s, predicted_s * late)
        place, factors = min(15, int(load_s / 0.04)), [lateness.factor(s) for s in loads_s]
        assert all(0.85 <= factor <= 1.35 for factor in factors)
        assert factors[:place] == before[:place]
        if factors[place] > before[place]:
            assert min(factors[place:]) == factors[place]
        before = factors


def predicted(budget: CostBudget) -> Prediction:
    assert budget.prediction is not None
    return budget.prediction


def test_a_budget_learns_of_its_limited_steps_alone() -> None:
    budget, decodes = CostBudget(COST, MAX_TOKENS, TARGET_S), [500] * 32
    before = fill(budget, decodes, [(0, 8000)])
    seconds, load_s = predicted(budget)
    assert seconds == pytest.approx(step_s(COST, decodes, before))
    assert load_s == 0.0
    for _ in range(10):
        budget.learn(predicted(budget), seconds * 1.2)
    assert 1.19 < budget.factor <= 1.2
    ((_, count),) = after = fill(budget, decodes, [(0, 8000)])
    assert count < before[0][1]
    assert step_s(COST, decodes, after) * 1.19 <= TARGET_S
    fill(budget, [], [(0, 8000)])
    assert budget.prediction is None, "no target holds it"
    fill(budget, decodes, [])
    assert budget.prediction is None, "no prompt is in it"
    fill(budget, decodes, [(0, 5)])
    assert budget.prediction is None, "too short to tell"
    assert StaticBudget(MAX_TOKENS).prediction is None


def test_a_budget_knows_the_load_behind_a_step() -> None:
    budget, decodes, loads_s = CostBudget(COST, MAX_TOKENS, TARGET_S), [500] * 32, list[float]()
    for _ in range(4):
        fill(budget, decodes, [(0, 8000)])
        loads_s.append(predicted(budget).load_s)
    assert loads_s == sorted(set(loads_s)), "each step adds to it"
    assert loads_s[-1] == pytest.approx(3 * predicted(budget).seconds)
    for _ in range(100):
        fill(budget, decodes, [])
    fill(budget, decodes, [(0, 8000)])
    assert predicted(budget).load_s == 0.0, "decode steps take it away"


@pytest.mark.parametrize(("late", "goes_on"), [(1.0, True), (1.25, False)])
def test_a_burst_ends_where_late_steps_are_long_gaps(*, late: float, goes_on: bool) -> None:
    """Its first step is below the target as predicted, and beyond it as late as steps are."""
    budget, decodes = CostBudget(COST, MAX_TOKENS, TARGET_S), [500] * 32
    for _ in range(20):
        budget.learn(Prediction(TARGET_S, 0.0), TARGET_S * late)
    first = fill(budget, decodes, [(0, 12)] * 40)
    assert TARGET_S / 1.25 < step_s(COST, decodes, first) < TARGET_S
    rest = fill(budget, decodes, [(0, 200)] * 16)
    assert (sum(count for _, count in rest) == 16 * 200) == goes_on
