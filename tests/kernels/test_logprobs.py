"""Log-probabilities, ranks and most likely tokens are those of `sampling.reference`."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels import pdl
from headrace.kernels.logprobs import ENTRY, MOST, LogprobScratch, logprobs
from headrace.runner.entries import unpack
from headrace.sampling import reference
from tests.kernels.conftest import CUDA

DEVICE = torch.device("cuda" if CUDA else "cpu")
VOCAB = 152064 if CUDA else 701
CHUNK = 4096 if CUDA else 64
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def check(
    dtype: torch.dtype,
    *,
    listed: bool,
    vocab: int = VOCAB,
    ties: bool = False,
    sizes: tuple[int, int] = (64, 1024) if CUDA else (8, 1024),
) -> None:
    """Ask i: row rows[i] of the logits, target targets[which[i]]; memory is poisoned."""
    logits = 4 * torch.randn(5, vocab, generator=torch.Generator().manual_seed(6))
    logits = (logits.round() if ties else logits).to(dtype)
    logits[2, 5:] = float("-inf")
    rows, which = [4, 2, 0, 4], [3, 0, 1, 2]
    targets = [3, vocab - 1, int(logits[4].argmax()), -1]
    entries = torch.full((6, ENTRY), -123, dtype=torch.int32, device=DEVICE)
    scratch = LogprobScratch.allocate(7, vocab, DEVICE, chunk=CHUNK, group=sizes[0], room=sizes[1])
    for part in (scratch.peaks, scratch.sums):
        part.fill_(float("nan"))
    for part in (scratch.above, scratch.tops, scratch.keys, scratch.ids):
        part.fill_(12345)

    def column(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    logprobs(
        logits.to(DEVICE), column(rows), column(targets), column(which), entries[:4],
        listed=listed, scratch=scratch, with_pdl=pdl.supported(DEVICE),
    )  # fmt: skip
    assert (entries[4:] == -123).all(), "another entry was written"
    most = [MOST, 9, 0, 1] if listed else [0] * 4
    said = unpack(entries[:4].cpu().numpy(), most)
    for i, one in enumerate(said):
        token = max(targets[which[i]], 0)
        want = reference.logprobs(logits[rows[i]].double().numpy(), token, most[i])
        assert one.logprob == pytest.approx(want.logprob, abs=2e-6)
        assert one.rank == want.rank
        assert one.top_ids == want.top_ids
        assert one.top == pytest.approx(want.top, abs=2e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("listed", [True, False])
def test_equals_the_reference(dtype: torch.dtype, listed: bool) -> None:
    check(dtype, listed=listed)


def test_among_equals_the_lowest_id_comes_first() -> None:
    """Also where they are more than are held, or than there is room for."""
    for sizes in ((64, 1024), (8, 128)):
        check(torch.float32, listed=True, ties=True, sizes=sizes)


def test_a_vocabulary_that_ends_in_a_small_chunk() -> None:
    check(torch.float32, listed=True, vocab=2 * CHUNK + 3)
