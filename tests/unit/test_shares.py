"""A step's time among its rows: exact in sum, fair in its parts."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from headrace.engine.protocol import StepWork
from headrace.engine.shares import FS, Costs, Shares, modelled, split
from headrace.messages import Output, StepPlan

# Reading all weights takes 5 ms, and so do the products of 250 tokens; 100 tokens of KV take 10 us.
CARD = StepWork(
    weights_s=4e-3, token_s=16e-6, head_s=1e-3, head_token_s=4e-6, pair_s=1e-9, read_s=1e-7
)

parts = st.floats(0, 1e-2, allow_nan=False)
works = st.builds(
    StepWork,
    weights_s=st.floats(1e-9, 10),
    token_s=parts,
    head_s=parts,
    head_token_s=parts,
    pair_s=parts,
    read_s=parts,
)
chunks = st.tuples(
    st.integers(0, 5000),
    st.integers(1, 3000),
    st.sampled_from([Output.NONE, Output.SAMPLE, Output.POOL, Output.PROMPT_LOGPROBS]),
)


def step(decodes: list[int], chunks: list[tuple[int, int, int]]) -> StepPlan:
    """Decode rows at these positions, then chunks: start, count, output."""
    rows = len(decodes) + len(chunks)
    starts, counts, outputs = zip(*[(p, 1, Output.SAMPLE) for p in decodes], *chunks, strict=True)
    return StepPlan(
        1, [], [], [], [[]], list(range(rows)), list(starts), list(counts), [None] * rows,
        list(outputs), [], [], [],
    )  # fmt: skip


def shared(
    work: StepWork, decodes: list[int], chunks: list[tuple[int, int, int]], busy_s: float
) -> tuple[list[float], list[float]]:
    """Seconds of the decode rows and of the chunks."""
    costs = modelled(work, step(decodes, chunks), len(decodes))
    shares = split(costs, len(decodes), round(busy_s * FS))
    return (
        [(shares.row_fs + shares.read_fs * (p + 1)) / FS for p in decodes],
        [chunk_fs / FS for chunk_fs in shares.chunks_fs],
    )


def modelled_s(decodes: list[int], chunks: list[tuple[int, int, int]]) -> float:
    """How long the card takes for a step: as long as the model says."""
    return modelled(CARD, step(decodes, chunks), len(decodes)).total_s


@given(
    works,
    st.lists(st.integers(0, 5000), max_size=20),
    st.lists(chunks, max_size=4),
    st.integers(0, 10 * FS),
)
def test_the_parts_add_up_to_the_step_exactly(
    work: StepWork, decodes: list[int], chunks: list[tuple[int, int, int]], busy_fs: int
) -> None:
    if not decodes and not chunks:
        return
    costs = modelled(work, step(decodes, chunks), len(decodes))
    shares = split(costs, len(decodes), busy_fs)
    rows = [shares.row_fs + shares.read_fs * (p + 1) for p in decodes]
    assert sum(rows) + sum(shares.chunks_fs) + shares.rest_fs == busy_fs
    assert min(shares.row_fs, shares.read_fs, *shares.chunks_fs) >= 0
    # What rounding leaves is a femtosecond for each part that was rounded, and a float's own error.
    most = len(rows) + costs.reads + len(chunks) + 1 + busy_fs * 1e-12
    assert abs(shares.rest_fs) <= most


@pytest.mark.parametrize("count", [128, 2048])
def test_a_decode_beside_a_chunk_pays_its_part_of_the_weights(count: int) -> None:
    """Not 1/2049 of the step: half of the reading. And never more than alone."""
    chunk = (0, count, Output.SAMPLE)
    alone_s = modelled_s([500], [])
    (decode_s,), (chunk_s,) = shared(CARD, [500], [chunk], modelled_s([500], [chunk]))
    assert alone_s / 2 <= decode_s <= alone_s
    assert chunk_s <= modelled_s([], [chunk])
    assert decode_s > 10 * (decode_s + chunk_s) / (count + 1) or count < 2048


def test_decodes_do_not_pay_for_a_chunk_among_them() -> None:
    """255 of them, and a prompt that takes eight times as long as they do."""
    decodes = [500] * 255
    chunk = (0, 2048, Output.SAMPLE)
    quiet, _ = shared(CARD, decodes, [], modelled_s(decodes, []))
    beside, (chunk_s,) = shared(CARD, decodes, [chunk], modelled_s(decodes, [chunk]))
    assert sum(beside) < 2 * sum(quiet)
    assert chunk_s > 0.8 * (modelled_s([], [chunk]) - CARD.weights_s - CARD.head_s)


def test_a_crowd_saves_each_of_it_the_same() -> None:
    alone_s = modelled_s([500], [])
    for n in (2, 16, 128):
        together, _ = shared(CARD, [500] * n, [], modelled_s([500] * n, []))
        assert together == pytest.approx([together[0]] * n)
        saved = alone_s * n / modelled_s([500] * n, [])
        assert together[0] == pytest.approx(alone_s / saved, rel=1e-9)


def test_long_contexts_pay_for_the_kv_they_read() -> None:
    (short_s, long_s), _ = shared(CARD, [99, 20_099], [], modelled_s([99, 20_099], []))
    assert long_s - short_s == pytest.approx(20_000 * CARD.read_s, rel=1e-9)


def test_only_rows_with_logits_pay_for_the_head() -> None:
    chunks = [(0, 16, Output.NONE), (0, 16, Output.SAMPLE), (0, 16, Output.PROMPT_LOGPROBS)]
    _, (middle_s, last_s, reported_s) = shared(CARD, [], chunks, modelled_s([], chunks))
    assert last_s - middle_s == pytest.approx(CARD.head_s / 2, rel=1e-6)
    assert reported_s == pytest.approx(last_s, rel=1e-6)  # 17 positions: reading is longer
    many = [(0, 16, Output.SAMPLE), (0, 1000, Output.PROMPT_LOGPROBS)]
    costs = modelled(CARD, step([], many), 0)
    assert costs.chunks_s[1] - costs.chunks_s[0] > 900 * CARD.head_token_s


def test_who_knows_nothing_of_the_device_parts_by_rows() -> None:
    decodes, chunks = shared(StepWork(), [5, 900], [(0, 64, Output.SAMPLE)], 0.9)
    assert decodes + chunks == pytest.approx([0.3] * 3)


def test_nothing_was_done_and_nobody_pays() -> None:
    costs = Costs(1.0, 0.5, [2.0], 4.5, 3)
    assert split(costs, 1, 0) == Shares(0, 0, [0], 0)
