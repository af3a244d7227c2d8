"""What every runner must show of the draws of recorded rows: `messages.StepResult.taps`."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec
import pytest

from headrace.engine.protocol import Masks
from headrace.messages import Logprobs, Repetition, Rules, Sampling, StepResult, Tap
from tests.backend.runner_contract import MakeRunner, Steps

PROMPT, OTHER = [11, 7, 3], [33, 2]  # few tokens: it runs in Triton's interpreter too
PLAIN = Sampling(temperature=0.0, logprobs=10)
CUT = Sampling(temperature=0.9, top_k=5, top_p=0.95, seed=3)
RULES = Rules(bias=[(5, 2.0), (7, -1.0)])
EDITED = Sampling(
    temperature=0.7, seed=4, rules=RULES, repetition=Repetition(repetition=1.3), logprobs=10
)
ALLOWED = [3, 5, 11, 42]


def run(make: MakeRunner, recorded: tuple[int, ...]) -> list[StepResult]:
    """Three rows beside one that joins late; the last step has a mask."""
    steps, results = Steps(make()), []
    for row, sampling in enumerate((PLAIN, CUT, EDITED)):
        steps.join(row, [2 * row, 2 * row + 1], sampling, known=PROMPT)
        steps.joins[-1] = msgspec.structs.replace(steps.joins[-1], record=row in recorded)
        steps.forward(row, PROMPT)
    results.append(steps.launch().result())
    for at in range(3):
        for row in range(3):
            steps.forward(row, None)
        if at == 1:
            steps.join(3, [6, 7], CUT, choice=1, known=OTHER)
            steps.forward(3, OTHER)
        masks: Masks | None = steps.allow({2: ALLOWED}) if at == 2 else None
        results.append(steps.launch(masks).result())
    steps.leaves = [0, 1, 2, 3]
    steps.join(0, [8, 9], PLAIN, known=OTHER)
    steps.forward(0, OTHER)
    results.append(steps.launch().result())
    steps.runner.close()
    return results


def recording_changes_no_token(make: MakeRunner) -> None:
    plain, shown = run(make, ()), run(make, (0, 2))
    assert [result.tokens for result in shown] == [result.tokens for result in plain]
    assert [result.logprobs for result in shown] == [result.logprobs for result in plain]
    assert all(result.taps == [] for result in plain)
    draws = [[tap.draw for tap in result.taps] for result in shown]
    assert draws == [[0, 2]] * 4 + [[]], "a row that left is recorded no more"
    assert [tap.greedy for tap in shown[0].taps] == [True, False]


def taps_hold_the_values_of_the_draw(make: MakeRunner) -> None:
    runner = make()
    vocab, note = runner.capacity.vocab_size, runner.capacity.draws_note
    runner.close()
    ids = PROMPT.copy()
    for at, result in enumerate(run(make, (0, 1, 2))[:4]):
        greedy, cut, edited = (_stages(tap) for tap in result.taps)
        if not greedy:
            assert "no logits" in note
            return
        assert list(greedy) == ["logits"]
        assert greedy["logits"][0] == vocab
        assert next(iter(greedy["logits"][1])) == result.tokens[0]
        _same(greedy["logits"][1], result.logprobs[0])
        _same(edited["logits"][1], result.logprobs[2])
        if "softmax" in cut:
            _check_cut(cut, result.tokens[1], result.taps[1].uniform)
        else:
            assert "temperature" in note
        last = "mask" if at == 3 else "penalties"
        known = set(ids)
        for token, value in edited[last][1].items():
            assert at < 3 or token in ALLOWED
            if token in edited["logits"][1]:
                expected = _edited(edited["logits"][1][token], token, known)
                assert value == pytest.approx(expected, rel=1e-5)
        if at == 3:
            assert edited["mask"][0] == len(ALLOWED)
            assert result.tokens[2] in ALLOWED
        ids.append(result.tokens[2])


def _edited(logit: float, token: int, known: set[int]) -> float:
    """The rules and penalties of EDITED, by their definition."""
    z = logit + dict(RULES.bias).get(token, 0.0)
    if token not in known:
        return z
    return z / 1.3 if z > 0 else z * 1.3


def _check_cut(stages: dict[str, tuple[int, dict[int, float]]], token: int, u: float) -> None:
    assert list(stages) == ["logits", "temperature", "top_k", "top_p", "softmax"]
    assert stages["top_k"][0] == 5
    kept, odds = stages["softmax"]
    assert kept == stages["top_p"][0] <= 5
    assert math.fsum(odds.values()) == pytest.approx(1.0)
    # The uniform number leads to the token: by id, the first whose sum exceeds it.
    total = 0.0
    for one in sorted(odds):
        total += odds[one]
        if u < total:
            break
    assert one == token


def _stages(tap: Tap) -> dict[str, tuple[int, dict[int, float]]]:
    """Name -> tokens kept, and the values of the likeliest, falling."""
    out = {}
    for stage in tap.stages:
        assert stage.values == sorted(stage.values, reverse=True)
        assert len(stage.ids) == len(set(stage.ids)) == len(stage.values) == min(10, stage.kept)
        out[stage.name] = stage.kept, dict(zip(stage.ids, stage.values, strict=True))
    return out


def _same(logits: dict[int, float], said: Logprobs | None) -> None:
    """Log-probabilities are logits less one number."""
    assert said is not None
    best = max(logits.values())
    for token, logprob in zip(said.top_ids, said.top, strict=True):
        assert logits[token] - best == pytest.approx(logprob - said.top[0], abs=1e-4)


TAP_CONTRACT: list[Callable[[MakeRunner], None]] = [
    recording_changes_no_token,
    taps_hold_the_values_of_the_draw,
]
