"""What stands at a worker, by leases: counts, the rate that is learned, the work that is left."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.gateway.load import Lease, Load


def test_a_life() -> None:
    load = Load()
    lease = Lease(load, 1000, 600, 7, 0.0)
    assert (load.waiting, load.pending_tokens, load.decode_tokens) == (1, 600, 0)
    assert load.last_placed == 7
    lease.begin(1.0)
    lease.begin(2.0)
    assert (load.waiting, load.pending_tokens, load.decode_tokens) == (0, 0, 1000)
    lease.end()
    lease.end()
    lease.begin(3.0)
    assert (len(load.leases), load.waiting, load.decode_tokens) == (0, 0, 0)


def test_the_rate_is_of_the_time_at_work() -> None:
    """Neither idle time nor the wait behind another prompt counts."""
    load = Load()
    Lease(load, 8000, 8000, 1, 0.0).begin(1.0)
    first, second = Lease(load, 4000, 4000, 2, 100.0), Lease(load, 16000, 16000, 3, 100.0)
    first.begin(100.5)
    second.begin(102.5)
    assert load.prefill_tokens_per_s == pytest.approx(8000)


def test_prompts_of_one_step_make_one_measurement() -> None:
    load = Load()
    for lease in [Lease(load, 4000, 4000, n, 0.0) for n in range(2)]:
        lease.begin(1.0)
    Lease(load, 4000, 4000, 3, 1.0).begin(2.0)
    assert load.prefill_tokens_per_s == pytest.approx(6000, rel=0.05)


def test_what_is_left_of_the_oldest_prompt() -> None:
    load = Load()
    Lease(load, 1000, 1000, 1, 0.0).begin(1.0)
    Lease(load, 10_000, 10_000, 2, 5.0)
    Lease(load, 500, 500, 3, 5.0)
    assert load.left_tokens(5.0) == 10_500
    assert load.left_tokens(9.0) == 6_500
    assert load.left_tokens(999.0) == 500, "the next one has begun only when the oldest is done"
    assert load.pending_tokens == 10_500


def test_a_silent_one_decodes_when_its_prompt_must_be_done() -> None:
    load = Load()
    Lease(load, 1000, 1000, 1, 0.0).begin(1.0)
    silent = Lease(load, 5000, 4000, 2, 10.0, silent=True)
    silent.assume(13.9)
    assert (load.waiting, load.left_tokens(13.9)) == (1, 100)
    silent.assume(14.0)
    silent.assume(15.0)
    assert (load.waiting, load.pending_tokens, load.decode_tokens) == (0, 0, 6000)
    assert load.prefill_tokens_per_s == pytest.approx(1000), "nothing was measured"
    silent.end()
    assert load.decode_tokens == 1000


def test_without_a_rate_nothing_is_guessed() -> None:
    load = Load()
    Lease(load, 10_000, 10_000, 1, 0.0)
    assert load.left_tokens(50.0) == 10_000


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from("abe"), st.integers(1, 5000))))
def test_counts_never_drift(steps: list[tuple[int, str, int]]) -> None:
    load = Load()
    leases: dict[int, Lease] = {}
    for now, (key, act, tokens) in enumerate(steps):
        if act == "a":
            if key in leases:
                leases[key].end()
            leases[key] = Lease(load, tokens, tokens // 2, now, float(now))
        elif key in leases:
            leases[key].begin(float(now)) if act == "b" else leases[key].end()
        assert load.waiting <= len(load.leases)
        assert 0 <= load.left_tokens(float(now)) <= load.pending_tokens
    for lease in leases.values():
        lease.end()
    assert (load.waiting, load.pending_tokens, load.decode_tokens) == (0, 0, 0)
