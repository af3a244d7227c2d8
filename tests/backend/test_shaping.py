"""Rules, penalties and masks of the CPU pipeline, each and all together, against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.messages import Dry, Join, Lz, Repetition, Rules, Sampling
from headrace.sampling import reference
from headrace.sampling.history import History
from headrace.sampling.matches import suffix_matches
from headrace.sampling.params import Columns
from headrace.sampling.pipeline import NO_TOKEN, STAGES, inverse_cdf, run_stages, sample
from headrace.sampling.rng import uniform
from headrace.sampling.shaper import Shaper
from headrace.sampling.shaping import Line, shape

VOCAB = 37
ids_of = st.lists(st.integers(0, VOCAB - 1), max_size=6, unique=True)
few = st.integers(0, 4)  # ids that come again and again
sequences = st.lists(few, min_size=1, max_size=40) | st.lists(
    st.integers(0, VOCAB - 1), min_size=1, max_size=40
)
rules = st.builds(
    Rules,
    bias=st.dictionaries(
        st.integers(0, VOCAB - 1), st.sampled_from([-100.0, -1.5, 0.25, 100.0]), max_size=5
    ).map(lambda d: list(d.items())),
    allowed=ids_of,
    banned=ids_of,
    bad_words=st.lists(st.lists(few, min_size=1, max_size=3), max_size=4),
    min_tokens=st.integers(0, 20),
    held=ids_of,
)
repetitions = st.builds(
    Repetition,
    repetition=st.sampled_from([0.5, 1.0, 1.3, 10.0]),
    frequency=st.sampled_from([-2.0, 0.0, 0.7]),
    presence=st.sampled_from([-1.0, 0.0, 0.4]),
    window=st.sampled_from([0, 1, 5, 1000]),
)
drys = st.builds(
    Dry,
    multiplier=st.sampled_from([0.1, 0.8, 1e9]),
    base=st.sampled_from([1.0, 1.75, 40.0]),
    allowed_length=st.integers(0, 4),
    window=st.sampled_from([0, 2, 9, 1000]),
    breakers=st.lists(few, max_size=2, unique=True),
)
lzs = st.builds(Lz, strength=st.sampled_from([0.15, 2.0]), window=st.sampled_from([1, 7, 33, 512]))
samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    top_k=st.sampled_from([0, 3]),
    top_p=st.sampled_from([0.8, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    rules=st.none() | rules,
    repetition=st.none() | repetitions,
    dry=st.none() | drys,
    lz=st.none() | lzs,
)
masks_of = st.none() | st.lists(st.booleans(), min_size=VOCAB, max_size=VOCAB)


def shaper_of(sampling: Sampling, ids: list[int], prompt_tokens: int) -> Shaper | None:
    """As a device row holds it: the join brings some ids, draws and forward rows the rest."""
    history = ids if sampling.needs_history else []
    shaper = Shaper.of(Join(0, sampling, 0, [[]], "", prompt_tokens, history[:prompt_tokens]))
    if shaper is not None and shaper.history is not None:
        shaper.history.put(prompt_tokens - 1, ids[prompt_tokens - 1 :])
    return shaper


def bits_of(mask: list[bool]) -> npt.NDArray[np.int32]:
    words = np.zeros(-(-VOCAB // 32), np.int64)
    for token, allowed in enumerate(mask):
        words[token // 32] |= int(allowed) << (token % 32)
    return words.astype(np.uint32).view(np.int32)


def check_stage(field: str, value: Any, ids: list[int], seed: int) -> None:
    """One stage alone changes every logit as the reference says, to the last bits."""
    sampling = Sampling(**{field: value})
    prompt_tokens = 1 + seed % len(ids)
    z = 3 * np.random.default_rng(seed).normal(size=VOCAB)
    want = reference.shaped(z, sampling, ids, prompt_tokens)
    grid = np.stack((z, z, z))
    shape(grid, [Line(1, shaper_of(sampling, ids, prompt_tokens), len(ids))])
    np.testing.assert_allclose(grid[1], want, rtol=1e-13, atol=1e-13)
    assert np.array_equal(grid[[0, 2]], [z, z])


@settings(max_examples=60, deadline=None)
@given(rules, sequences, st.integers(0, 10**6))
def test_rules(value: Rules, ids: list[int], seed: int) -> None:
    check_stage("rules", value, ids, seed)


@settings(max_examples=60, deadline=None)
@given(repetitions, sequences, st.integers(0, 10**6))
def test_repetition(value: Repetition, ids: list[int], seed: int) -> None:
    check_stage("repetition", value, ids, seed)


@settings(max_examples=60, deadline=None)
@given(drys, sequences, st.integers(0, 10**6))
def test_dry(value: Dry, ids: list[int], seed: int) -> None:
    check_stage("dry", value, ids, seed)


@settings(max_examples=60, deadline=None)
@given(lzs, sequences, st.integers(0, 10**6))
def test_lz(value: Lz, ids: list[int], seed: int) -> None:
    check_stage("lz", value, ids, seed)


rows_of = st.lists(
    st.tuples(samplings, sequences, masks_of, st.integers(0, 3)), min_size=1, max_size=9
)


@settings(max_examples=80, deadline=None)
@given(rows=rows_of, seed=st.integers(0, 10**6))
def test_everything_alone_and_among_others(rows: list[Any], seed: int) -> None:
    """A row's token is the reference's, whatever stands beside it."""
    logits = np.random.default_rng(seed).normal(0, 3, (len(rows), VOCAB)).astype(np.float32)
    kept = logits.copy()

    def draw(some: list[int]) -> list[int]:
        mine = [rows[i] for i in some]
        columns = Columns.of([(s, choice, len(ids)) for s, ids, _, choice in mine])
        shapers = [shaper_of(s, ids, 1 + len(ids) // 2) for s, ids, _, _ in mine]
        masks = {j: bits_of(row[2]) for j, row in enumerate(mine) if row[2] is not None}
        best = kept[some].argmax(-1)
        out: list[int] = sample(
            kept[some], columns, best=best, shapers=shapers, masks=masks
        ).tolist()
        return out

    together = draw(list(range(len(rows))))
    wanted = []
    for row, (sampling, ids, mask, choice) in zip(logits, rows, strict=True):
        allowed = None if mask is None else np.array(mask)
        prompt_tokens = 1 + len(ids) // 2
        token = reference.draw(
            row.astype(np.float64), sampling, choice, ids, prompt_tokens, allowed
        )
        wanted.append(NO_TOKEN if token is None else token)
    assert together == wanted
    assert together == [draw([i])[0] for i in range(len(rows))]
    assert np.array_equal(kept, logits), "logits belong to the caller"


IDS = [3, 1, 4, 1, 5, 2, 6, 5, 3, 5, 1, 4]
SHAPED = [
    Sampling(),
    Sampling(temperature=1.5, top_k=9, top_p=0.9),
    Sampling(temperature=0.7, typical_p=0.8, repetition=Repetition(1.5, 0.3, 0.2)),
    Sampling(rules=Rules([(3, 2.0)], [], [7, 8], [[1, 4, 9], [10]], 99, [11]), lz=Lz(0.2)),
    Sampling(temperature=1.2, min_p=0.02, top_n_sigma=2.0, dry=Dry(0.8, 1.75, 1)),
]


@pytest.mark.parametrize("sampling", SHAPED)
@pytest.mark.parametrize("vary", ["seed", "choice", "position"])
def test_100k_draws_follow_the_reference(sampling: Sampling, vary: str) -> None:
    """Chi-square; the bound is the mean plus six standard deviations of its distribution."""
    z, draws = 1.5 * np.random.default_rng(8).normal(size=12), 100_000
    p = reference.softmax(reference.truncated(reference.shaped(z, sampling, IDS, 4), sampling))
    grid = z[None].copy()
    shape(grid, [Line(0, shaper_of(sampling, IDS, 4), len(IDS))])
    kept = run_stages(grid, Columns.of([(sampling, 0, len(IDS))]), STAGES)
    at = {name: np.full(draws, 5, np.uint64) for name in ("seed", "choice", "position")}
    at[vary] = np.arange(draws, dtype=np.uint64)
    u = uniform(at["seed"], at["choice"], at["position"])
    counts = np.bincount(inverse_cdf(np.broadcast_to(kept, (draws, 12)), u), minlength=12)
    possible = p > 0
    assert not counts[~possible].any()
    expected = draws * p[possible]
    chi = float(((counts[possible] - expected) ** 2 / expected).sum())
    degrees = max(1, possible.sum() - 1)
    assert chi < degrees + 6 * np.sqrt(2 * degrees)


# ---------------------------------------------------------------- by hand


def test_penalties_count_prompt_and_output_as_said() -> None:
    """repetition: prompt and output; frequency and presence: output alone; the window cuts both."""
    z, ids = np.array([2.0, -2.0, 2.0, 2.0, 2.0]), [0, 1, 2, 2, 3]
    how = Repetition(2.0, 0.25, 0.5)
    assert reference.repeated(z, how, ids, 2).tolist() == [1.0, -4.0, 1 - 1.0, 1 - 0.75, 2.0]
    windowed = Repetition(2.0, 0.25, 0.5, window=2)
    assert reference.repeated(z, windowed, ids, 2).tolist() == [2.0, -2.0, 0.25, 0.25, 2.0]


def test_dry_by_hand() -> None:
    """1 2 3 9 1 2: 3 would lengthen a repeat of two; after a breaker, of fewer."""
    z, ids = np.zeros(10), [1, 2, 3, 9, 1, 2]
    assert reference.dried(z, Dry(0.8, 1.75, 2), ids)[3] == -0.8
    assert reference.dried(z, Dry(0.8, 1.75, 1), ids)[3] == -0.8 * 1.75
    assert not reference.dried(z, Dry(0.8, 1.75, 3), ids).any()
    assert not reference.dried(z, Dry(0.8, 1.75, 2, breakers=[1]), ids).any()
    assert not reference.dried(z, Dry(0.8, 1.75, 1, breakers=[3]), ids).any()
    loop = [5] * 2000
    assert reference.dried(z, Dry(0.8), loop)[5] == -reference.MOST_DRY
    assert reference.dried(z, Dry(0.5, 1.0), loop)[5] == -0.5


def test_lz_by_hand() -> None:
    """Nothing for what is new; all of log2(vocab) for the last token again."""
    z = np.zeros(16)
    assert not reference.compressed(z, Lz(1.0), []).any()
    out = reference.compressed(z, Lz(0.5), [3, 4, 9, 4, 3])
    assert out[3] == -0.5 * 4  # distance 1
    assert out[9] == pytest.approx(-0.5 * (4 - np.log2(3)))
    assert out[4] == -0.5 * 2  # distance 4: there it goes on with "3"; the nearer one does not
    assert out[5] == 0


def test_a_bad_word_is_banned_where_it_would_be_complete() -> None:
    z, how = np.zeros(5), Rules(bad_words=[[1, 2, 3], [4]])
    banned = {
        tuple(ids): set(np.flatnonzero(np.isinf(reference.ruled(z, how, ids, 1))))
        for ids in ([1, 2], [2], [0, 1, 2], [1, 2, 0])
    }
    assert banned == {(1, 2): {3, 4}, (2,): {4}, (0, 1, 2): {3, 4}, (1, 2, 0): {4}}


def test_held_ids_are_free_after_min_tokens() -> None:
    z, how = np.zeros(3), Rules(min_tokens=2, held=[1])
    inf = [bool(np.isinf(reference.ruled(z, how, [0] * n, 4)[1])) for n in (4, 5, 6, 7)]
    assert inf == [True, True, False, False]


@settings(max_examples=60, deadline=None)
@given(st.lists(few, max_size=30), st.integers(0, 12))
def test_suffix_matches(ids: list[int], longest: int) -> None:
    want = [reference.match_length(ids, i, longest) for i in range(len(ids))]
    assert suffix_matches(np.array(ids, np.int64), longest).tolist() == want


def test_history_grows_and_is_rewritten() -> None:
    history, ids = History([7]), [7]
    for i in range(1, 2000):
        history.put(i, [i % 50])
        ids.append(i % 50)
    history.put(300, ids[300:700])
    assert history.last(2000, 0).tolist() == ids
    assert history.last(1000, 5).tolist() == ids[995:1000]
    with pytest.raises(AssertionError, match="only 2000 are known"):
        history.put(2001, [1])


def test_rows_without_shaping_keep_no_history() -> None:
    plain = Sampling(top_k=5, top_p=0.5, typical_p=0.5, top_n_sigma=1.0)
    assert Shaper.of(Join(0, plain, 0, [[]], "", 3, [])) is None
    biased = Shaper.of(Join(0, Sampling(rules=Rules(bias=[(1, 2.0)])), 0, [[]], "", 3, []))
    assert biased is not None
    assert biased.history is None


def test_a_greedy_row_under_a_mask_alone_takes_the_first_largest_that_is_allowed() -> None:
    logits = np.array([[1.0, 3.0, 3.0, -np.inf]] * 5, np.float32)
    masks = {
        j: np.array([bits], np.int32) for j, bits in enumerate([0b1111, 0b1100, 0b0001, 0b1000, 0])
    }
    for best in (None, logits.argmax(-1)):
        tokens = sample(logits.copy(), Columns.empty(5), best=best, masks=masks)
        assert tokens.tolist() == [1, 2, 0, -1, -1]
