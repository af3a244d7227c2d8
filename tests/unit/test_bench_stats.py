"""The formulas of the load generator, on stamps made by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.bench.stats import (
    Record,
    chunk_gaps_s,
    e2e_s,
    level,
    summarise,
    token_gaps_s,
    tpot_s,
    ttft_s,
)


def record(*chunks: float, tokens: int, sent: float = 10.0, end: float | None = None) -> Record:
    return Record(
        sent_s=sent,
        chunks_s=list(chunks),
        end_s=chunks[-1] if end is None else end,
        output_tokens=tokens,
        prompt_tokens=5,
        cached_tokens=2,
    )


def test_one_request() -> None:
    one = record(10.5, 10.7, 11.1, tokens=3, end=11.3)
    assert ttft_s(one) == pytest.approx(0.5)
    assert e2e_s(one) == pytest.approx(1.3)
    assert tpot_s(one) == pytest.approx((1.3 - 0.5) / 2)
    assert chunk_gaps_s(one) == pytest.approx([0.2, 0.4])
    assert token_gaps_s(one) == pytest.approx([0.2, 0.4])


def test_a_request_without_chunks_or_with_one_token() -> None:
    silent = Record(sent_s=1.0, end_s=2.0, output_tokens=7)
    assert ttft_s(silent) is None
    assert tpot_s(silent) is None
    assert token_gaps_s(silent) == chunk_gaps_s(silent) == []
    single = record(10.5, tokens=1, end=10.6)
    assert ttft_s(single) == pytest.approx(0.5)
    assert tpot_s(single) is None
    assert token_gaps_s(single) == []


def test_chunks_of_several_tokens_are_not_token_gaps() -> None:
    """5 tokens in 3 chunks, 1 s apart: four gaps of half a second, but chunk gaps of one."""
    merged = record(11.0, 12.0, 13.0, tokens=5)
    assert chunk_gaps_s(merged) == [1.0, 1.0]
    assert token_gaps_s(merged) == pytest.approx([0.5] * 4)


@given(
    gaps=st.lists(st.floats(0, 10), min_size=1, max_size=30),
    tokens=st.integers(2, 60),
)
def test_token_gaps_add_up(gaps: list[float], tokens: int) -> None:
    chunks = [100.0]
    for gap in gaps:
        chunks.append(chunks[-1] + gap)
    found = token_gaps_s(record(*chunks, tokens=tokens))
    assert len(found) == tokens - 1
    assert math.isclose(sum(found), chunks[-1] - chunks[0], abs_tol=1e-9)
    assert min(found) >= -1e-9
    if tokens == len(chunks):
        assert found == pytest.approx(chunk_gaps_s(record(*chunks, tokens=tokens)))


def test_percentiles_interpolate_linearly() -> None:
    found = summarise([4.0, None, 1.0, 2.0, 3.0, 5.0])
    assert found is not None
    assert (found.count, found.mean, found.p50) == (5, 3.0, 3.0)
    assert (found.p90, found.p99) == pytest.approx((4.6, 4.96))
    assert summarise([None]) is None


def test_itl_weighs_tokens_and_tpot_weighs_requests() -> None:
    """A short slow answer and a long fast one: 1 gap of 1.0 s, 9 gaps of 0.1 s."""
    slow = record(1.0, 2.0, tokens=2, sent=0.0)
    fast = record(*(1.0 + i / 10 for i in range(10)), tokens=10, sent=0.0)
    both = level([slow, fast], 2)
    assert both.tpot_s is not None
    assert both.tpot_s.mean == pytest.approx((1.0 + 0.1) / 2)
    assert both.itl_s is not None
    assert both.itl_s.mean == pytest.approx((1.0 + 9 * 0.1) / 10)
    assert both.itl_s.count == 10


def test_level_counts_good_requests_and_names_the_errors() -> None:
    good = [record(1.0, 2.0, tokens=4, sent=0.0, end=2.0), record(3.0, 4.0, tokens=6, sent=2.0)]
    bad = record(2.5, tokens=99, sent=2.0, end=5.0)
    bad.error = "HTTP 503 queue_full"
    total = level([*good, bad], 2, server_cores=1.5)
    assert total.requests == 3
    assert total.errors == {"HTTP 503 queue_full": 1}
    assert total.duration_s == 5.0
    assert total.output_tokens == 10
    assert total.output_tokens_per_s == pytest.approx(2.0)
    assert total.requests_per_s == pytest.approx(0.4)
    assert (total.prompt_tokens, total.cached_tokens) == (10, 4)
    assert total.in_flight == pytest.approx((2 + 2 + 3) / 5)
    assert total.ttft_s is not None
    assert total.ttft_s.count == 2
    assert total.server_cores == 1.5


def test_a_level_of_errors_only() -> None:
    bad = Record(sent_s=0.0, end_s=1.0, error="TimeoutError")
    total = level([bad], 1)
    assert total.e2e_s is None
    assert total.itl_s is None
    assert total.output_tokens_per_s == 0.0
