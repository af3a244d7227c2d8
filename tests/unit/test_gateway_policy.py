"""Policies of the gateway: pure, total, and each rule does what it says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.gateway.policy import POLICIES, predicted_ttft_s, token_cost
from headrace.gateway.view import Ask, Choice, FleetView, Knobs, WorkerView

KNOBS = Knobs()


def workers(n: int = 3, **of_first: float) -> FleetView:
    """`n` idle workers; the first differs."""
    first = WorkerView(name="w0", **of_first)  # type: ignore[arg-type]
    return FleetView((first, *(WorkerView(name=f"w{i}") for i in range(1, n))))


def ask(cached: tuple[int, ...], prompt_tokens: int = 1000, **more: object) -> Ask:
    return Ask(prompt_tokens=prompt_tokens, cached_tokens=cached, **more)  # type: ignore[arg-type]


counts = st.integers(0, 10**6)
views = st.lists(
    st.builds(
        WorkerView,
        name=st.uuids().map(str),
        requests=counts,
        waiting=counts,
        pending_tokens=counts,
        decode_tokens=counts,
        kv_usage=st.floats(0, 1),
        warm=st.floats(0.01, 1),
        last_placed=counts,
        last_cold=counts,
    ),
    min_size=1,
    max_size=9,
).map(lambda some: FleetView(tuple(some)))
knobs = st.builds(Knobs, affinity=st.floats(0, 1), decode_weight=st.floats(0, 2))


@given(data=st.data(), view=views, some=knobs, name=st.sampled_from(sorted(POLICIES)))
def test_any_view_gets_a_worker_and_the_same_one_again(
    data: st.DataObject, view: FleetView, some: Knobs, name: str
) -> None:
    prompt_tokens = data.draw(counts)
    n = len(view.workers)
    cached = data.draw(st.lists(st.integers(0, prompt_tokens), min_size=n, max_size=n))
    wanted = Ask(
        prompt_tokens=prompt_tokens,
        cached_tokens=tuple(cached),
        draw=data.draw(st.floats(0, 1, exclude_max=True)),
        prefix_key=data.draw(st.binary(max_size=8)),
        session=data.draw(st.sampled_from(["", "anna"])),
    )
    choice = POLICIES[name](view, wanted, some)
    assert 0 <= choice.index < n
    assert len(choice.scores) == n
    assert choice == POLICIES[name](view, wanted, some)


def test_the_holder_wins_until_it_is_busier_than_its_tokens_are_worth() -> None:
    """By default a cached token is worth three that wait."""
    held = ask((800, 0, 0))
    assert token_cost(workers(pending_tokens=2399), held, KNOBS).index == 0
    busy = token_cost(workers(pending_tokens=2401), held, KNOBS)
    assert busy.index == 1
    assert busy.replicates


@pytest.mark.parametrize(("affinity", "index"), [(0.0, 1), (0.5, 1), (0.9, 0), (1.0, 0)])
def test_affinity_is_the_one_dial(affinity: float, index: int) -> None:
    view = workers(pending_tokens=2000)
    assert token_cost(view, ask((800, 0, 0)), Knobs(affinity=affinity)).index == index


def test_without_affinity_the_holder_gets_no_credit_and_all_of_it_no_load_counts() -> None:
    assert token_cost(workers(pending_tokens=1), ask((999, 0, 0)), Knobs(affinity=0)).index == 1
    loaded = workers(pending_tokens=10**9)
    assert token_cost(loaded, ask((999, 0, 0)), Knobs(affinity=1)).index == 0


def placed(view: FleetView, choice: Choice, number: int) -> FleetView:
    """The view after a placement that has ended."""
    chosen = view.workers[choice.index]
    new = WorkerView(
        name=chosen.name, last_placed=number, last_cold=number if choice.cold else chosen.last_cold
    )
    return FleetView(tuple(new if w is chosen else w for w in view.workers))


@pytest.mark.parametrize("shared_tokens", [0, 100])
def test_cold_prompts_spread_evenly_when_nobody_is_busy(shared_tokens: int) -> None:
    """One worker holds a little that all prompts share: that alone draws nothing to it."""
    view, hits = workers(4), [0] * 4
    for number in range(1, 41):
        choice = token_cost(view, ask((shared_tokens, 0, 0, 0)), KNOBS)
        assert choice.cold
        hits[choice.index] += 1
        view = placed(view, choice, number)
        warm = token_cost(view, ask((900, 0, 0, 0)), KNOBS)  # warm ones between do not disturb
        view = placed(view, warm, number)
    assert hits == [10] * 4


def test_round_robin_takes_turns() -> None:
    view, order = workers(3), []
    for number in range(1, 7):
        choice = POLICIES["round_robin"](view, ask((0, 0, 0)), KNOBS)
        order.append(choice.index)
        view = placed(view, choice, number)
    assert order == [0, 1, 2, 0, 1, 2]


def test_sglang_rule_needs_both_measures_to_balance() -> None:
    rule = POLICIES["prefix_affinity"]
    held = ask((301, 0, 0))
    assert rule(workers(requests=64), held, KNOBS).reason == "prefix"
    assert rule(workers(requests=65), held, KNOBS).reason == "balance"
    busy = FleetView(tuple(WorkerView(name=f"w{i}", requests=300 + 70 * (not i)) for i in range(3)))
    assert rule(busy, held, KNOBS).reason == "prefix"  # 370 is not above 1.5 times 300
    assert rule(workers(), ask((300, 0, 0)), KNOBS).reason == "load"  # not above the share


def test_weighted_adds_the_three_scores() -> None:
    view = workers(2, waiting=10, kv_usage=0.5)
    choice = POLICIES["weighted"](view, ask((500, 0)), KNOBS)
    assert list(choice.scores) == [-2.5, -4.0]  # -(0 + 2 * 0.5 + 3 * 0.5), -(2 + 2 + 0)
    assert choice.index == 1
    unknown = POLICIES["weighted"](workers(2, waiting=10), ask((500, 0)), KNOBS)
    assert list(unknown.scores) == [-3.5, -4.0], "nothing is taken, as far as anybody knows"


def test_p2c_takes_the_less_busy_of_two() -> None:
    view = workers(2, requests=5)
    draws = {POLICIES["p2c"](view, ask((0, 0), draw=d / 16), KNOBS).index for d in range(16)}
    assert draws == {1}
    many = workers(8)
    seen = {POLICIES["p2c"](many, ask((0,) * 8, draw=d / 64), KNOBS).index for d in range(64)}
    assert len(seen) >= 7


def test_chwbl_keeps_its_bound_and_its_keys() -> None:
    rule = POLICIES["chwbl"]
    keys = [b"%d" % i for i in range(200)]
    before = {key: rule(workers(4), ask((0,) * 4, prefix_key=key), KNOBS).index for key in keys}
    assert min(list(before.values()).count(i) for i in range(4)) > 20
    fewer = FleetView(workers(4).workers[:3])
    after = {key: rule(fewer, ask((0,) * 3, prefix_key=key), KNOBS).index for key in keys}
    assert all(after[key] == i for key, i in before.items() if i < 3)
    full = workers(4, requests=8)  # bound: ceil(1.25 * 9 / 4) = 3
    assert all(rule(full, ask((0,) * 4, prefix_key=key), KNOBS).index for key in keys)


def test_sessions_stay_when_a_worker_leaves() -> None:
    rule = POLICIES["session"]
    names = [f"user{i}" for i in range(100)]
    before = {name: rule(workers(4), ask((0,) * 4, session=name), KNOBS).index for name in names}
    fewer = FleetView(workers(4).workers[:3])
    after = {name: rule(fewer, ask((0,) * 3, session=name), KNOBS).index for name in names}
    assert all(after[name] == i for name, i in before.items() if i < 3)


@pytest.mark.parametrize("name", ["token_cost", "least_requests", "least_tokens"])
def test_a_worker_that_warms_up_gets_less(name: str) -> None:
    assert POLICIES[name](workers(2, warm=0.2), ask((0, 0)), KNOBS).index == 1


def test_predicted_time_to_first_token() -> None:
    worker = WorkerView(name="w", pending_tokens=3000, decode_tokens=10_000)
    assert predicted_ttft_s(worker, 1000, KNOBS) == 0.0
    worker = WorkerView(
        name="w", pending_tokens=3000, decode_tokens=10_000, prefill_tokens_per_s=5000.0
    )
    assert predicted_ttft_s(worker, 1000, Knobs(decode_weight=0.1)) == 1.0
