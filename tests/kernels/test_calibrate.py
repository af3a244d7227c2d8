"""The model of step time, measured on a modelled card: what it predicts and what the measuring
takes. The card counts seconds instead of letting them pass."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from headrace.messages import StepPlan
from headrace.runner.calibrate import Probe, measure_cost
from headrace.runner.forward import ALONE_PAIRS, MIXED_SIZES

FIRST_S = 0.5  # of a graph's first run beyond the others: no prediction may hold any of it
READ_S = 8e-3  # of the weights
WAVE_S = 0.6e-6  # of programs, for each position that their tokens see
SEQUENCE_TOKENS = 64 * 1024


class Card:
    """A forward pass that takes as long as products, and waves of programs, of a step would."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.ran: list[tuple[str, int, int]] = []  # way, start, count
        self.store = SimpleNamespace(blocks=1 << 20, block_size=16, token_bytes=196_608)
        self.state = SimpleNamespace(
            tables=torch.zeros(1, 4, SEQUENCE_TOKENS // 16 + 2), apply=lambda plan: None
        )
        weight = SimpleNamespace(is_cuda=True, numel=lambda: 14e9, element_size=lambda: 2)
        spec = SimpleNamespace(vocab_size=1000)
        self.model = SimpleNamespace(spec=spec, parameters=lambda: [weight])

    def on_stream(self) -> Any:
        return contextlib.nullcontext()

    def way(self, plan: StepPlan) -> str:
        (start,), (count,) = plan.starts, plan.counts
        if count > MIXED_SIZES[-1]:
            return "eager"
        return "alone" if count * (start + count) <= ALONE_PAIRS else "mixed"

    def run(self, plan: StepPlan) -> None:
        way, (start,), (count,) = self.way(plan), plan.starts, plan.counts
        first = not any(ran[0] == way and ran[2] == count for ran in self.ran)
        self.ran.append((way, start, count))
        self.now_s += step_s(count, count * (start + count / 2)) + FIRST_S * first


def step_s(tokens: int, pairs: float) -> float:
    """Products of whole tiles; programs of 128 queries, 8 groups of 5 heads, 132 at once."""
    waves = -(-8 * -(-tokens * 5 // 128) // 132)
    products_s = max(READ_S, -(-tokens // 128) * 128 * 36e-6)
    return products_s + waves * WAVE_S * pairs / tokens


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    made = Card()

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            self.at_s = 0.0

        def record(self) -> None:
            self.at_s = made.now_s

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, other: Event) -> float:
            return 1e3 * (other.at_s - self.at_s)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    return made


def test_predictions_hold_though_few_steps_are_timed(card: Card) -> None:
    cost = measure_cost(card, 8192, limited=True)  # type: ignore[arg-type]
    for size in MIXED_SIZES:
        for start in (0, 2000, 7000, 20_000):
            pairs = size * (start + size / 2)
            assert cost.seconds(size, pairs, 0) == pytest.approx(step_s(size, pairs), rel=0.03)
    assert cost.floor_s == pytest.approx(READ_S, rel=0.01)
    assert cost.size_s == tuple(sorted(cost.size_s))
    far = [count for _, start, count in card.ran if start]
    assert far == [32, 32, *MIXED_SIZES[4:]], "a graph that ran is not warmed again"


@pytest.mark.parametrize("max_tokens", [1, 32, 64, 256, 500])
def test_small_steps(card: Card, max_tokens: int) -> None:
    cost = measure_cost(card, max_tokens, limited=True)  # type: ignore[arg-type]
    assert cost.sizes[-1] == max_tokens
    pairs = max_tokens * (3 * max_tokens + max_tokens / 2)
    assert cost.seconds(max_tokens, pairs, 0) == pytest.approx(step_s(max_tokens, pairs), rel=0.03)


@pytest.mark.parametrize("max_tokens", [1, 64, 512, 8192])
def test_steps_without_a_limit_are_priced_alike(card: Card, max_tokens: int) -> None:
    """What parts a step's time among its rows asks for no sizes."""
    every = measure_cost(card, max_tokens, limited=True)  # type: ignore[arg-type]
    card.ran.clear()
    few = measure_cost(card, max_tokens, limited=False)  # type: ignore[arg-type]
    assert few.sizes == few.size_s == few.size_pair_s == ()
    given, wanted = (msgspec.structs.astuple(cost)[:6] for cost in (few, every))
    assert given == pytest.approx(wanted, abs=1e-12)
    assert len(card.ran) <= 8


def test_a_step_to_see_its_memory_is_one_step(card: Card) -> None:
    probe = Probe(card)  # type: ignore[arg-type]
    probe.run(0, 8192)
    assert card.ran == [("eager", 0, 8192)]
