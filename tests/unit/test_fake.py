"""The fake backend: its model, its modelled time, and that its checks find what they are for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from headrace.backends.fake import FakeRunner, reference
from headrace.backends.fake.model import END_OF_TURN, draw, logits
from headrace.config import Settings
from headrace.errors import ConfigError
from headrace.launch import _fake_runner
from headrace.messages import Grow, Join, Output, Rules, Sampling, StepPlan
from headrace.sim.device import H100_14B

GREEDY = Sampling(temperature=0.0)


def plan(step: int, **fields: Any) -> StepPlan:
    """A plan with one forward row over tokens [0, 4) of row 0, unless told otherwise."""
    columns: dict[str, Any] = {
        "leaves": [],
        "joins": [],
        "grows": [],
        "copies": [[]],
        "rows": [0],
        "starts": [0],
        "counts": [4],
        "ids": [[1, 2, 3, 4]],
        "outputs": [Output.SAMPLE],
        "unwritten": [],
        "draw_from": [0],
        "draw_into": [0],
    }
    return StepPlan(step, **(columns | fields))


def join(row: int, *blocks: int) -> Join:
    return Join(row, GREEDY, 0, [list(blocks)])


def run(runner: FakeRunner, step: StepPlan) -> list[int]:
    ticket = runner.launch(step)
    ticket.finish()
    return ticket.result().tokens


def test_text_is_printable_and_ends_now_and_then() -> None:
    tokens = reference([1], Sampling(seed=4), 0, 20_000)
    counts = Counter(tokens)
    ends = counts.pop(END_OF_TURN)
    assert all(chr(token).islower() or token == ord(" ") for token in counts)
    assert 20 < ends < 20_000 / 100
    assert END_OF_TURN not in reference([1], Sampling(seed=4), 0, 5000, eos=None)


def test_draws_follow_the_documented_probabilities() -> None:
    def ranks(sampling: Sampling) -> Counter[int | None]:
        state = 12345
        tokens = [draw(state, sampling, 0, position, None) for position in range(4000)]
        return Counter(tokens)

    first = reference([1], GREEDY, 0, 1)[0]
    assert reference([1], Sampling(temperature=0.01, seed=9), 0, 1) == [first]
    shares = sorted(ranks(Sampling(seed=1)).values(), reverse=True)
    assert abs(shares[0] / 4000 - 128 / 255) < 0.05
    assert len(ranks(Sampling(seed=1, top_k=2))) <= 2
    assert len(ranks(Sampling(seed=1, top_p=0.5))) == 1
    assert len(ranks(Sampling(seed=1, min_p=0.5))) <= 2
    assert len(ranks(Sampling(seed=1, temperature=100.0))) > 2


def test_logits_and_candidates_agree() -> None:
    """Rules and penalties see the same model: greedy is candidate 0, shares are alike."""
    harmless = Rules(bias=[(0, 0.0)])
    for state in range(50):
        z = logits(state, None)
        first = draw(state, GREEDY, 0, 3, None)
        assert draw(state, Sampling(temperature=0.0, rules=harmless), 0, 3, None) == first
        assert int(z.argmax()) == first
    other = draw(1, Sampling(temperature=0.0, rules=Rules(banned=list(range(256)))), 0, 3, None)
    assert other in (256, 257, 258)
    assert draw(1, Sampling(rules=Rules(allowed=[7], banned=[7])), 0, 3, None) is None
    tokens = Counter(draw(9, Sampling(rules=harmless), 0, at, None) for at in range(3000))
    plain = Counter(draw(9, Sampling(), 0, at, None) for at in range(3000))
    assert tokens.keys() == plain.keys()
    assert all(abs(tokens[t] - plain[t]) < 200 for t in plain)


def test_choices_seeds_and_adapters_differ() -> None:
    base = reference([1, 2], Sampling(seed=1), 0, 20)
    assert reference([1, 2], Sampling(seed=1), 0, 20) == base
    assert reference([1, 2], Sampling(seed=2), 0, 20) != base
    assert reference([1, 2], Sampling(seed=1), 1, 20) != base
    assert reference([1, 2], GREEDY, 0, 20, adapter="a") != reference([1, 2], GREEDY, 0, 20)


def test_time_is_modelled_one_step_after_another() -> None:
    now = [0.0]
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(round(seconds, 6))
        now[0] += seconds

    runner = FakeRunner(
        8, 4, 2, 64, step_ms=10, token_ms=1, verify=True, clock=lambda: now[0], sleep=sleep
    )
    first = runner.launch(plan(1, joins=[join(0, 0, 1)]))
    first.finish()
    now[0] += 0.004  # the host is busy elsewhere meanwhile
    second = runner.launch(plan(2, starts=[4], counts=[1], ids=[None]))
    second.finish()
    told = [first.result(), second.result()]
    assert [result.busy_s for result in told] == pytest.approx([0.014, 0.011])
    assert [result.waited_s for result in told] == pytest.approx([0.010, 0.011])
    assert slept == [0.010, 0.011]
    third = runner.launch(plan(3, starts=[5], counts=[1], ids=[None]))
    third.finish()
    now[0] += 1
    assert third.result().waited_s == 0.0
    assert len(slept) == 2


BAD: dict[str, tuple[Callable[[FakeRunner], object], str]] = {
    "a row that does not exist": (
        lambda r: r.launch(plan(2, joins=[join(9, 3)])),
        "row 9 does not exist",
    ),
    "a row joined twice": (
        lambda r: r.launch(plan(2, joins=[join(0, 3)])),
        "row 0 is joined while it is held",
    ),
    "a hole in the KV": (
        lambda r: r.launch(plan(2, starts=[5], counts=[1], ids=[[9]])),
        "position 4: stale or foreign KV",
    ),
    "a block of others": (
        lambda r: r.launch(plan(2, rows=[1], joins=[join(1, 0, 3)])),
        "block 0 is written while row 0 holds it",
    ),
    "a draw without logits": (
        lambda r: r.launch(plan(2, outputs=[Output.NONE])).finish(),
        "without logits",
    ),
    "no token drawn yet": (
        lambda r: r.launch(
            plan(2, rows=[1], joins=[join(1, 3)], starts=[0], counts=[1], ids=[None])
        ),
        "no token was drawn into this row",
    ),
    "an unwritten row over other KV": (
        lambda r: r.launch(plan(2, starts=[3], counts=[1], ids=[[9]], unwritten=[0])),
        "unwritten, but",
    ),
    "too long": (
        lambda r: r.launch(plan(2, starts=[4], counts=[61], ids=[[1] * 61])),
        "past max_model_len",
    ),
    "an old step number": (lambda r: r.launch(plan(1)), "step 1 after step 1"),
    "a hole in a table": (
        lambda r: r.launch(plan(2, grows=[Grow(0, 0, 5, [4])])),
        "a hole in a block table",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_broken_plans_are_found(name: str) -> None:
    call, message = BAD[name]
    runner = FakeRunner(8, 4, 2, 64, verify=True)
    run(runner, plan(1, joins=[join(0, 0, 1)]))
    with pytest.raises(AssertionError, match=message):
        call(runner)


def test_stale_kv_is_found() -> None:
    """A block that changed hands under a table."""
    runner = FakeRunner(8, 4, 2, 64, verify=True)
    run(runner, plan(1, joins=[join(0, 0, 1)]))
    run(runner, plan(2, leaves=[0], joins=[join(1, 0)], rows=[1], ids=[[9] * 4], draw_into=[1]))
    run(runner, plan(3, joins=[join(0, 2, 3)], ids=[[1, 2, 3, 4]]))
    with pytest.raises(AssertionError, match="stale or foreign"):
        runner.launch(plan(4, grows=[Grow(0, 0, 0, [5])], starts=[4], counts=[1], ids=[[5]]))


def test_tickets_are_finished_once_and_read_in_order() -> None:
    runner = FakeRunner(8, 4, 2, 64)
    first = runner.launch(plan(1, joins=[join(0, 0, 1)]))
    with pytest.raises(AssertionError, match="before its finish"):
        first.result()
    with pytest.raises(AssertionError, match="launch before the last finish"):
        runner.launch(plan(2))
    first.finish()
    with pytest.raises(AssertionError, match="finished twice"):
        first.finish()
    second = runner.launch(plan(2, starts=[4], counts=[1], ids=[None]))
    second.finish()
    with pytest.raises(AssertionError, match="a third step in flight"):
        runner.launch(plan(3))
    with pytest.raises(AssertionError, match="closed with a step in flight"):
        runner.close()
    with pytest.raises(AssertionError, match="result of 2 before 1"):
        second.result()


def test_a_modelled_device_gives_steps_their_time_and_the_cache_its_size() -> None:
    settings = Settings(backend="fake", fake_device="h100-14b", block_size=16)
    capacity = _fake_runner(settings).capacity
    assert capacity.cost == H100_14B.cost
    assert capacity.kv_blocks == [H100_14B.kv_tokens // 16]
    assert _fake_runner(Settings(backend="fake")).capacity.cost is None
    with pytest.raises(ConfigError, match=r"no-such\.json"):
        _fake_runner(Settings(backend="fake", fake_device="no-such.json"))
