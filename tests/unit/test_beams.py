"""Beam search: exact where the beams hold everything, and when it stops."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.beams import Beam, BeamRules, BeamSearch
from headrace.messages import Logprobs

Early = bool | Literal["never"]
EARLY: list[Early] = [False, "never"]
Model = Callable[[tuple[int, ...]], list[float]]  # tokens so far -> log-probability of each id


def model_of(seed: int, vocab: int) -> Model:
    """Some distribution after each prefix."""

    def logprobs(prefix: tuple[int, ...]) -> list[float]:
        rng = random.Random(f"{seed} {prefix}")
        weights = [rng.randint(1, 97) for _ in range(vocab)]
        return [math.log(weight / sum(weights)) for weight in weights]

    return logprobs


def search(
    model: Model, rules: BeamRules, max_tokens: int, stop_ids: tuple[int, ...] = ()
) -> BeamSearch:
    found = BeamSearch([7], rules, max_tokens, stop_ids)
    count = rules.sampling.logprobs
    steps = 0
    while not found.done:
        reports = []
        assert len(found.prompts) <= rules.width
        for prompt in found.prompts:
            assert prompt[0] == 7
            values = model(tuple(prompt[1:]))
            order = sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]
            top = [values[i] for i in order]
            reports.append(Logprobs(top[0], 1, order, top))
        found.feed(reports)
        steps += 1
    assert steps <= max_tokens
    return found


def value_of(model: Model, tokens: tuple[int, ...]) -> float:
    return math.fsum(model(tokens[:i])[token] for i, token in enumerate(tokens))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    penalty=st.sampled_from([0.0, 1.0, 2.5, -1.0]),
    early=st.sampled_from(EARLY),
    stop=st.booleans(),
)
def test_wide_enough_beams_find_the_best_there_is(
    seed: int, penalty: float, early: Early, stop: bool
) -> None:
    """Three ids, two tokens: 9 texts at most, so 9 beams forget nothing."""
    model = model_of(seed, 3)
    stop_ids = (2,) if stop else ()
    texts = {
        text if 2 not in text or not stop else text[: text.index(2) + 1]
        for text in itertools.product(range(3), repeat=2)
    }

    def score(text: tuple[int, ...]) -> float:
        return value_of(model, text) / math.pow(len(text), penalty)

    rules = BeamRules(9, penalty, early)
    best = search(model, rules, 2, stop_ids).best(3)
    want = sorted(texts, key=score, reverse=True)[:3]
    assert [score(tuple(beam.tokens)) for beam in best] == pytest.approx([score(t) for t in want])
    for beam in best:
        assert beam.total == pytest.approx(value_of(model, tuple(beam.tokens)))
        assert beam.total == pytest.approx(math.fsum(one.logprob for one in beam.said))
        assert (beam.stop_id == 2) == (stop and beam.tokens[-1] == 2)
        assert beam.reason == ("stop" if beam.stop_id >= 0 else "length")


def test_one_beam_is_greedy() -> None:
    model = model_of(5, 11)
    (beam,) = search(model, BeamRules(1), 6).best(1)
    tokens: list[int] = []
    for _ in range(6):
        values = model(tuple(tokens))
        tokens.append(values.index(max(values)))
    assert beam.tokens == tokens


def ends_often(prefix: tuple[int, ...]) -> list[float]:
    """The end is likely, but never the likeliest."""
    return [math.log(x) for x in (0.5, 0.4, 0.1)]


@pytest.mark.parametrize(
    ("early", "penalty", "steps"),
    [(True, 0.0, 2), (False, 0.0, 3), ("never", 0.0, 3), (True, 1.0, 2), ("never", 1.0, 30)],
)
def test_when_it_stops(early: Early, penalty: float, steps: int) -> None:
    taken = 0

    def counted(prefix: tuple[int, ...]) -> list[float]:
        nonlocal taken
        taken = max(taken, len(prefix) + 1)
        return ends_often(prefix)

    best = search(counted, BeamRules(2, penalty, early), 30, (1,)).best(2)
    assert taken == steps
    scores = [beam.total / math.pow(len(beam.tokens), penalty) for beam in best]
    assert scores == sorted(scores, reverse=True)


def test_an_end_past_the_width_is_passed_over() -> None:
    """As in transformers: only an end among the first `width` continuations counts."""
    found = BeamSearch([1], BeamRules(1), 3, {1})
    found.feed([Logprobs(-0.5, 1, [0, 1], [-0.5, -0.9])])
    assert not found.done
    assert found.prompts == [[1, 0]]
    second = [Logprobs(-0.1, 1, [1, 0], [-0.1, -3.0])]
    found.feed(second)
    assert found.best(1) == [
        Beam(
            [0, 1],
            [Logprobs(-0.5, 1, [0, 1], [-0.5, -0.9]), Logprobs(-0.1, 1, [1, 0], [-0.1, -3.0])],
            -0.6,
            1,
        )
    ]
