"""The CPU pipeline after the shaping of logits, against `sampling.reference`."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headrace.messages import Sampling
from headrace.sampling import reference as definition
from headrace.sampling.params import Columns
from headrace.sampling.pipeline import STAGES, Logits, inverse_cdf, run_stages, sample
from headrace.sampling.rng import philox, uniform, uniform_reference
from headrace.sampling.shaping import Grid
from headrace.sampling.truncation import TopP, keep_largest, keep_until, sums_of

Row = tuple[Sampling, int, int]


def normal(rows: int, vocab: int, spread: float = 1.0, seed: int = 0) -> Logits:
    return np.random.default_rng(seed).normal(0, spread, (rows, vocab)).astype(np.float32)


def draw(logits: Logits, rows: list[Row]) -> list[int]:
    out: list[int] = sample(logits, Columns.of(rows)).tolist()
    return out


samplings = st.builds(
    Sampling,
    typical_p=st.sampled_from([0.0, 0.2, 0.7, 0.95, 1.0]),
    top_n_sigma=st.sampled_from([0.0, 0.5, 1.0, 2.5]),
    temperature=st.sampled_from([0.0, 1e-6, 1e-4, 0.3, 1.0, 5.0, 1e6]),
    top_k=st.sampled_from([0, 1, 2, 5, 40, 10**7]),
    top_p=st.sampled_from([0.0, 1e-9, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.5, 1.0]),
    seed=st.integers(0, 2**64 - 1),
)
rows_of = st.lists(
    st.tuples(samplings, st.integers(0, 127), st.integers(1, 2**20)), min_size=1, max_size=9
)


@settings(max_examples=100, deadline=None)
@given(rows=rows_of, seed=st.integers(0, 10**6), ties=st.booleans())
def test_equals_the_reference_alone_and_among_others(
    rows: list[Row], seed: int, ties: bool
) -> None:
    logits = normal(len(rows), 61, 3, seed)
    logits = logits.round() if ties else logits
    together = draw(logits.copy(), rows)
    assert together == [
        definition.draw(logits[i].astype(np.float64), sampling, choice, range(position), 0)
        for i, (sampling, choice, position) in enumerate(rows)
    ]
    assert together == [draw(logits[i : i + 1].copy(), [row])[0] for i, row in enumerate(rows)]


@settings(max_examples=12, deadline=None)
@given(rows=rows_of, seed=st.integers(0, 10**6))
def test_row_independence_is_exact_at_real_vocabulary_sizes(rows: list[Row], seed: int) -> None:
    """Kept sets and weights agree to the last bit, whatever the batch around a row."""
    rows = [row for row in rows if row[0].temperature >= 1e-5]
    assume(rows)
    logits = normal(len(rows), 9001, 4, seed)
    whole = run_stages(logits.astype(np.float64), Columns.of(rows), STAGES)
    for i, row in enumerate(rows):
        alone = run_stages(logits[i : i + 1].astype(np.float64), Columns.of([row]), STAGES)
        assert np.array_equal(alone[0], whole[i])


def test_greedy_rows_ignore_their_neighbours() -> None:
    """bugs B040: masked tokens (-inf) next to sampled rows."""
    logits = normal(8, 50)
    logits[:4, ::2] = -np.inf
    rows = [(Sampling(temperature=0.0), 0, 5)] * 4 + [
        (Sampling(top_p=0.9, seed=s), 0, 5) for s in range(4)
    ]
    mixed = draw(logits.copy(), rows)
    assert mixed[:4] == logits[:4].argmax(-1).tolist()
    assert draw(logits[::-1], rows[::-1]) == mixed[::-1]


def test_top_p_is_taken_from_its_own_row() -> None:
    """bugs B029: alternating top_p 0.01 and 1 at temperature 1.6."""
    logits = normal(8, 500, 4, 1)
    free = set()
    for position in range(30):
        rows = [(Sampling(1.6, 0, (0.01, 1.0)[i % 2], 0.0, i), 0, position) for i in range(8)]
        tokens = draw(logits.copy(), rows)
        assert tokens[::2] == logits[::2].argmax(-1).tolist()
        free.add(tokens[1])
    assert len(free) > 5


def test_min_p_with_a_seed() -> None:
    """bugs B030: a near-tie of two, min_p 0.5, 100 seeds."""
    logits = np.array([[0.0, 5.0, 4.7, 4.2, 1.0]], np.float32)  # exp(-0.3) = 0.74, exp(-0.8) = 0.45
    rows = [(Sampling(min_p=0.5, seed=s), 0, 3) for s in range(100)]
    tokens = draw(logits.repeat(100, 0), rows)
    assert set(tokens) == {1, 2}
    assert tokens == draw(logits.repeat(100, 0), rows)
    assert draw(logits, [(Sampling(min_p=0.5, seed=17), 0, 3)]) == [tokens[17]]


@pytest.mark.parametrize("temperature", [1e-4, 1e-6, 1e-30, 0.0])
def test_tiny_temperature_is_greedy(temperature: float) -> None:
    """bugs B036."""
    logits = normal(5, 300, 10, 2)
    rows = [(Sampling(temperature=temperature, seed=s), 0, 1) for s in range(5)]
    assert draw(logits, rows) == logits.argmax(-1).tolist()


def test_huge_temperature_is_uniform() -> None:
    logits = normal(1, 4, 10).repeat(4000, 0)
    rows = [(Sampling(temperature=1e30, seed=s), 0, 1) for s in range(4000)]
    assert chi_square(draw(logits, rows), [0.25] * 4) < 16.3  # 0.999 quantile, 3 degrees


@pytest.mark.parametrize(("top_k", "distinct"), [(0, 50), (10**7, 50), (50, 50), (1, 1), (3, 3)])
def test_top_k_limits(top_k: int, distinct: int) -> None:
    """bugs B038: larger than the vocabulary, off, 1."""
    logits = np.tile(np.arange(50, dtype=np.float32) * 0.01, (3000, 1))
    rows = [(Sampling(top_k=top_k, seed=s), 0, 1) for s in range(3000)]
    assert set(draw(logits, rows)) == set(range(50 - distinct, 50))


@pytest.mark.parametrize("top_p", [0.0, 1e-9])
def test_top_p_zero_keeps_the_most_likely(top_p: float) -> None:
    """bugs B039."""
    logits = normal(20, 300, 1, 3)
    rows = [(Sampling(temperature=1.5, top_p=top_p, seed=s), 0, 1) for s in range(20)]
    assert draw(logits.copy(), rows) == logits.argmax(-1).tolist()


def test_ties_keep_the_lowest_ids() -> None:
    logits = np.array([[1.0, 3.0, 2.0, 3.0, 2.0, 2.0, 3.0]])
    kept = [np.isfinite(keep_largest(logits.copy(), np.array([n])))[0] for n in range(1, 8)]
    sets = [np.flatnonzero(mask).tolist() for mask in kept]
    assert sets[:4] == [[1], [1, 3], [1, 3, 6], [1, 2, 3, 6]]
    assert sets[4:] == [[1, 2, 3, 4, 6], [1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5, 6]]


def test_a_nucleus_wider_than_the_first_look() -> None:
    """Top-p sorts 256 candidates first; a flat row needs more, its neighbour does not."""
    logits: Grid = np.stack((np.linspace(0, 1e-3, 5000), normal(1, 5000, 9)[0]))
    rows: list[Row] = [(Sampling(top_p=0.8), 0, 1), (Sampling(top_p=0.8), 0, 1)]
    kept = np.isfinite(TopP().apply(logits.copy(), Columns.of(rows)))
    weights = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    for row in range(2):
        order = np.argsort(-weights[row], kind="stable")
        before = np.concatenate(([0.0], np.cumsum(weights[row][order])[:-1]))
        assert set(np.flatnonzero(kept[row])) == set(order[before < 0.8])
    assert int(kept[0].sum()) > 3000
    assert int(kept[1].sum()) < 256


def chi_square(tokens: list[int], expected: list[float]) -> float:
    counts = Counter(tokens)
    n = len(tokens)
    assert set(counts) <= {i for i, p in enumerate(expected) if p > 0}
    return sum((counts[i] - n * p) ** 2 / (n * p) for i, p in enumerate(expected) if p > 0)


def test_a_filtered_distribution_is_renormalised() -> None:
    p = [0.4, 0.25, 0.15, 0.1, 0.07, 0.03]
    rows = [(Sampling(top_k=4, top_p=0.85, seed=s), 0, 1) for s in range(20000)]
    tokens = draw(np.log(np.array([p], np.float32)).repeat(20000, 0), rows)
    # top_k keeps 0.9 in all; 0.4 + 0.25 + 0.15 = 0.8 >= 0.85 * 0.9, so the fourth goes.
    assert chi_square(tokens, [0.5, 0.3125, 0.1875, 0, 0, 0]) < 18.4  # 2 degrees


@pytest.mark.parametrize("spread", [1.0, 3.0, 8.0])
@pytest.mark.parametrize("p", [0.05, 0.5, 0.95, 1 - 1e-12])
def test_candidates_alone_give_what_the_whole_vocabulary_gives(spread: float, p: float) -> None:
    """Bit by bit, ties at the edge included; and so does the draw from what stays."""
    rng = np.random.default_rng(int(100 * p + spread))
    logits = rng.normal(0, spread, (6, 9001)).round(1)
    columns = Columns.of([(Sampling(top_p=p, seed=s), 0, 1) for s in range(6)])
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    wanted = columns.top_p * sums_of(weights)
    whole = keep_until(logits, weights, wanted, logits.copy())
    few = TopP().apply(logits.copy(), columns)
    assert np.array_equal(few, whole)
    for u in (np.zeros(6), rng.random(6)):
        together = inverse_cdf(
            np.tile(whole, (2, 1)), np.tile(u, 2)
        )  # too many rows to take one by one
        assert np.array_equal(inverse_cdf(whole, u), together[:6])


def test_the_ends_of_the_distribution() -> None:
    """u = 0 skips leading tokens of weight 0; the largest u stays within the vocabulary."""
    inf = math.inf
    logits = np.array([[-inf, -inf, 0.0, 0.0, -inf], [0.0, -inf, 0.0, 0.1, -inf]])
    assert inverse_cdf(logits, np.zeros(2)).tolist() == [2, 0]
    assert inverse_cdf(logits, np.full(2, 1 - 2**-53)).tolist() == [3, 3]
    assert inverse_cdf(logits, np.ones(2)).tolist() == [3, 3]


# Known answers of Random123 for philox4x32-10.
@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], answer: tuple[int, int, int, int]
) -> None:
    assert philox(counter, key) == answer


@given(
    st.lists(
        st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**63 - 1)),
        min_size=1,
        max_size=20,
    )
)
def test_uniform_equals_its_reference(draws: list[tuple[int, int, int]]) -> None:
    seeds, choices, positions = (np.array(c, np.uint64) for c in zip(*draws, strict=True))
    got = uniform(seeds, choices, positions).tolist()
    assert got == [uniform_reference(*d) for d in draws]
    many = uniform(*(np.tile(c, 5) for c in (seeds, choices, positions)))  # more than a few
    assert many.tolist() == 5 * got
    assert all(0 <= u < 1 for u in got)


def test_a_stage_nobody_uses_is_skipped() -> None:
    class Counted:
        name = "counted"
        calls = 0

        def rows(self, columns: Columns, vocab: int) -> list[int]:
            return [i for i, k in enumerate(columns.top_k) if k == 7]

        def apply(self, logits: Grid, columns: Columns) -> Grid:
            self.calls += 1
            assert logits.shape[0] == len(columns.top_k)
            return logits

    stage, logits = Counted(), normal(2, 30)
    sample(logits, Columns.of([(Sampling(top_k=0), 0, 1)] * 2), [*STAGES, stage])
    assert stage.calls == 0
    sample(logits, Columns.of([(Sampling(top_k=7), 0, 1), (Sampling(), 0, 1)]), [stage])
    assert stage.calls == 1
