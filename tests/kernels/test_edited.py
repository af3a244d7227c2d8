"""Rules, penalties, masks and typical_p on the device are those of `sampling.reference`."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.kernels import pdl
from headrace.kernels.draw_params import Kind
from headrace.kernels.edited import Wide
from headrace.kernels.sampling import Scratch, sample
from headrace.messages import Dry, Lz, Repetition, Rules, Sampling
from headrace.sampling import reference
from tests.kernels.conftest import CUDA
from tests.kernels.sequences import Row, Table

DEVICE = torch.device("cuda" if CUDA else "cpu")
WITH_PDL = pdl.supported(DEVICE)
VOCAB = 20003 if CUDA else 301
CHUNK = 4096 if CUDA else 128
POSITIONS = 1024 if CUDA else 16
IDS = 12  # sequences and lists are made of so many ids: they meet often
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

ids = st.integers(0, IDS - 1)
some_ids = st.lists(ids, max_size=3, unique=True)
rules = st.builds(
    Rules,
    bias=st.lists(
        st.tuples(ids, st.floats(-100, 100, width=16)), max_size=4, unique_by=lambda pair: pair[0]
    ),
    allowed=st.one_of(st.just([]), st.lists(ids, min_size=4, max_size=9, unique=True)),
    banned=some_ids,
    bad_words=st.lists(st.lists(ids, min_size=1, max_size=4), max_size=5),
    min_tokens=st.integers(0, 9),
    held=some_ids,
)
repetition = st.builds(
    Repetition,
    repetition=st.sampled_from([1.0, 0.7, 1.3, 2.0]),
    frequency=st.sampled_from([0.0, 0.5, -1.0]),
    presence=st.sampled_from([0.0, 0.25, -2.0]),
    window=st.sampled_from([0, 1, 5, 1000]),
)
dry = st.builds(
    Dry,
    multiplier=st.sampled_from([0.8, 3.0]),
    base=st.sampled_from([1.0, 1.75, 30.0]),
    allowed_length=st.integers(0, 4),
    window=st.sampled_from([0, 3, 20]),
    breakers=some_ids,
)
lz = st.builds(Lz, strength=st.sampled_from([0.15, 2.0]), window=st.sampled_from([1, 6, 512]))
samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1.0]),
    rules=st.one_of(st.none(), rules),
    repetition=st.one_of(st.none(), repetition),
    dry=st.one_of(st.none(), dry),
    lz=st.one_of(st.none(), lz),
    top_n_sigma=st.sampled_from([0.0, 0.5, 1.5]),
)
# Few ids, so that repeats are long.
sequences = st.integers(1, 4).flatmap(
    lambda kinds: st.lists(st.integers(0, kinds - 1), min_size=1, max_size=45)
)
rows = st.builds(
    Row,
    samplings,
    sequences,
    prompt_tokens=st.integers(1, 20),
    mask=st.one_of(st.none(), st.lists(st.integers(0, VOCAB - 1), max_size=40)),
)
FAST = settings(
    max_examples=60 if CUDA else 8,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.generate),  # the interpreter is too slow to shrink
)


def whole(row: Row) -> Row:
    """With a prompt that the sequence holds."""
    return dataclasses.replace(row, prompt_tokens=min(row.prompt_tokens, len(row.ids)))


def edited(table: Table, logits: Tensor, *, positions: int = POSITIONS) -> Tensor:
    """From poisoned memory; marks are clean afterwards."""
    count = logits.shape[0]
    wide = Wide.allocate(count + 1, VOCAB, DEVICE, chunk=CHUNK, positions=positions)
    wide.logits.fill_(float("nan"))
    wide.moments.fill_(float("nan"))
    table.edit(logits.to(DEVICE), wide, sigma=True, with_pdl=WITH_PDL)
    assert not wide.marks.any(), "marks are left"
    assert not wide.broken.any(), "a row is still called broken"
    assert wide.logits[count].isnan().all(), "another row was written"
    return wide.logits[:count].cpu()


def expected(row: Row, logits: Tensor) -> np.ndarray:
    z = logits.double().numpy()
    mask = None
    if row.mask is not None:
        mask = np.zeros(VOCAB, np.bool_)
        mask[row.mask] = True
    z = reference.shaped(z, row.sampling, row.ids, row.prompt_tokens, mask)
    if row.sampling.temperature > 0 and row.sampling.top_n_sigma and np.isfinite(z).any():
        z = reference.cut_n_sigma(z, row.sampling.top_n_sigma)
    return z


def check(row: Row, logits: Tensor, got: Tensor) -> None:
    want = expected(row, logits)
    found = got.double().numpy()
    # A token as near as this to the edge of top_n_sigma may fall on either side.
    wrong = np.isfinite(found) != np.isfinite(want)
    assert not wrong.any(), f"{np.flatnonzero(wrong)} of {row}"
    finite = np.isfinite(want)
    np.testing.assert_allclose(found[finite], want[finite], rtol=3e-7, atol=2e-6, err_msg=str(row))


@FAST
@given(
    asked=st.lists(rows, min_size=2, max_size=3),
    noise=st.integers(0, 2**32),
    dtype=st.sampled_from(DTYPES),
)
def test_equals_the_reference(asked: list[Row], noise: int, dtype: torch.dtype) -> None:
    asked = [whole(row) for row in asked]
    maker = torch.Generator().manual_seed(noise)
    logits = (3 * torch.randn(len(asked), VOCAB, generator=maker)).to(dtype)
    got = edited(Table.of(asked, VOCAB, DEVICE), logits)
    for j, row in enumerate(asked):
        check(row, logits[j], got[j])


def long_row(length: int) -> Row:
    """A sequence of several blocks of positions, with long repeats in it."""
    ids = [(i * i) % 7 for i in range(length // 2)]
    sampling = Sampling(
        rules=Rules(bias=[(3, 1.5)], bad_words=[[*ids[-3:], 5], [9]], min_tokens=2, held=[2]),
        repetition=Repetition(1.1, 0.01, 0.2),
        dry=Dry(0.5, 1.2, 2, breakers=[6]),
        lz=Lz(0.15, 40),
        top_n_sigma=1.0,
        typical_p=0.9,
        seed=3,
    )
    return Row(sampling, ids + ids, length // 2)


def test_long_sequences() -> None:
    """Several blocks of positions; a repeat longer than what is counted."""
    logits = 3 * torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(4))
    endless = Row(Sampling(dry=Dry(1.0, 1.01, 200)), [4] * 270, 1)
    for row, positions in ((long_row(3 * POSITIONS + 5), POSITIONS), (endless, 512)):
        check(
            row, logits[0], edited(Table.of([row], VOCAB, DEVICE), logits, positions=positions)[0]
        )


def test_a_row_without_anything_is_the_models() -> None:
    for dtype in DTYPES:
        logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(5)).to(dtype)
        asked = [Row(Sampling(), [1, 2, 3], 2), Row(Sampling(rules=Rules(banned=[3])), [1], 1)]
        got = edited(Table.of(asked, VOCAB, DEVICE), logits)
        assert torch.equal(got[0], logits[0].float())


def drawn(asked: list[Row], logits: Tensor, kind: Kind, *, candidates: int = 32768) -> list[int]:
    """Tokens of edited rows, from poisoned memory."""
    count = len(asked)
    table = Table.of(asked, VOCAB, DEVICE)
    wide = Wide.allocate(count, VOCAB, DEVICE, chunk=CHUNK, positions=POSITIONS)
    table.edit(logits.to(DEVICE), wide, sigma=True, with_pdl=WITH_PDL)
    scratch = Scratch.allocate(
        count + 1, VOCAB, DEVICE, chunk=CHUNK, sample=1024 if CUDA else 64, candidates=candidates
    )
    for field in dataclasses.fields(scratch):
        value = getattr(scratch, field.name)
        if isinstance(value, Tensor):
            value.fill_(float("nan") if value.is_floating_point() else -12345)
    tokens = torch.full((count,), -99, dtype=torch.int32, device=DEVICE)
    last = torch.full((2 * count + 1,), -77, dtype=torch.int32, device=DEVICE)
    numbers = torch.arange(count, dtype=torch.int32, device=DEVICE)
    sample(
        wide.logits, numbers, table.params, table.positions, table.draws.tokens, table.draws.rows,
        last, tokens, kind=kind, scratch=scratch, edits=table.rows.edits, with_pdl=WITH_PDL,
    )  # fmt: skip
    assert last[1::2].tolist() == [max(token, 0) for token in tokens.tolist()]
    return tokens.tolist()


truncations = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, 5, 40]),
    top_p=st.sampled_from([1.0, 0.9, 0.5]),
    min_p=st.sampled_from([0.0, 0.01]),
    typical_p=st.sampled_from([0.0, 0.2, 0.5, 0.9, 0.999, 1.0]),
    top_n_sigma=st.sampled_from([0.0, 2.0]),
    seed=st.integers(0, 2**64 - 1),
)


@settings(FAST, max_examples=60 if CUDA else 4)
@given(
    asked=st.lists(truncations, min_size=2, max_size=2),
    noise=st.integers(0, 2**32),
    spread=st.sampled_from([0.1, 1.0, 4.0]),
    ties=st.booleans(),
    candidates=st.sampled_from([16, 32768]),
)
def test_typical_p_draws_the_references_tokens(
    asked: list[Sampling], noise: int, spread: float, ties: bool, candidates: int
) -> None:
    """With ties, many tokens are at one distance: lowest ids stay."""
    maker = torch.Generator().manual_seed(noise)
    logits = torch.randn(2, VOCAB, generator=maker) * spread
    logits = logits.round() if ties else logits
    sequences = [Row(sampling, [1, 2, 3, 4][: j + 1], 1) for j, sampling in enumerate(asked)]
    few = all(sampling.top_k for sampling in asked if sampling.temperature)
    got = drawn(sequences, logits, "typical", candidates=candidates)
    if few:
        assert got == drawn(sequences, logits, "few", candidates=candidates)
    for j, row in enumerate(sequences):
        want = reference.draw(logits[j].double().numpy(), row.sampling, j, row.ids, 1)
        assert got[j] == want, f"{row}, spread {spread}, ties {ties}"


def test_a_wider_kind_gives_the_same_tokens() -> None:
    logits = 2 * torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(8))
    rules = Rules(banned=[5])
    asked = [
        Row(Sampling(rules=rules, top_p=0.8, seed=4), [1, 2], 1),
        Row(Sampling(rules=rules, seed=5), [1], 1),
        Row(Sampling(rules=rules, temperature=0.0), [1], 1),
    ]
    crowd = drawn(asked, logits, "typical")
    assert crowd == drawn(asked, logits, "full")
    narrow: list[tuple[int, Kind]] = [(1, "plain"), (2, "greedy")]
    for j, kind in narrow:
        alone = drawn([asked[0]] * j + [asked[j]], logits[[0] * j + [j]], kind)
        assert alone[j] == crowd[j]


def test_rows_that_cannot_be_drawn() -> None:
    """NaN is told from "nothing is allowed", also where the NaN itself is masked."""
    logits = torch.zeros(4, VOCAB)
    logits[0, 7] = float("nan")
    logits[1, 8] = float("inf")
    asked = [
        Row(Sampling(rules=Rules(banned=[7]), typical_p=0.9), [1], 1),
        Row(Sampling(top_n_sigma=1.0), [1], 1, mask=[3]),
        Row(Sampling(rules=Rules(allowed=[3, 4])), [1], 1, mask=[5]),
        Row(Sampling(rules=Rules(allowed=[3, 4])), [1], 1, mask=[4]),
    ]
    kinds: list[Kind] = ["plain", "typical"]
    for kind in kinds:
        assert drawn(asked, logits, kind) == [-1, -1, -2, 4]


@pytest.mark.skipif(not CUDA, reason="the interpreter takes minutes: a GPU runs it")
def test_a_whole_vocabulary() -> None:
    vocab = 152064
    row = dataclasses.replace(long_row(4000), mask=list(range(0, vocab, 3)))
    logits = 3 * torch.randn(1, vocab, generator=torch.Generator().manual_seed(4))
    table = Table.of([row], vocab, DEVICE)
    wide = Wide.allocate(1, vocab, DEVICE)
    table.edit(logits.to(DEVICE), wide, sigma=False, with_pdl=WITH_PDL)
    mask = np.zeros(vocab, np.bool_)
    mask[row.mask] = True
    want = reference.shaped(
        logits[0].double().numpy(), row.sampling, row.ids, row.prompt_tokens, mask
    )
    np.testing.assert_allclose(wide.logits[0].cpu().numpy(), want, rtol=1e-6, atol=2e-6)
