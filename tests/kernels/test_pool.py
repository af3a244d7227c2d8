"""Sums of normed rows, against float64."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels import pdl
from headrace.kernels.pool import pool, pool_reference
from headrace.kernels.rms_norm import inverse_rms
from tests.kernels.conftest import CUDA, assert_close

DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * CUDA


def check(dtype: torch.dtype, width: int, spans: list[tuple[int, int]]) -> None:
    """Rows that no span names are NaN, and so is memory that is to be written."""
    generator = torch.Generator().manual_seed(3)
    tokens = max(first + count for first, count in spans) + 2
    x = (3 * torch.randn(tokens, width, generator=generator)).to(dtype)
    weight = torch.randn(width, generator=generator).to(dtype)
    named = {row for first, count in spans for row in range(first, first + count)}
    x[[row for row in range(tokens) if row not in named]] = float("nan")
    out = torch.full((len(spans) + 1, width), float("nan"), device=DEVICE)
    with_pdl = pdl.supported(DEVICE)
    there = x.to(DEVICE)
    scale = torch.full((tokens,), float("nan"), device=DEVICE)
    inverse_rms(there, 1e-5, out=scale, with_pdl=with_pdl)
    given = torch.tensor(spans, dtype=torch.int32, device=DEVICE)
    pool(there, scale, weight.to(DEVICE), given, out=out[:-1], with_pdl=with_pdl)
    assert out[-1].isnan().all(), "another vector was written"
    assert_close(out[:-1].cpu(), pool_reference(x, 1e-5, weight, spans), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "spans", [[(0, 1)], [(5, 32), (37, 33)], [(9, 2), (4, 1), (0, 3), (0, 3)]], ids=len
)
def test_sums(dtype: torch.dtype, spans: list[tuple[int, int]]) -> None:
    check(dtype, 70, spans)


@pytest.mark.skipif(not CUDA, reason="large shapes are for a card")
def test_a_long_prompt() -> None:
    check(torch.bfloat16, 4096, [(0, 8000), (8001, 150)])


def test_a_sum_is_the_same_in_a_crowd() -> None:
    x = torch.randn(90, 40, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    weight, scale = torch.ones(40, device=DEVICE), torch.ones(90, device=DEVICE)

    def sums(*spans: tuple[int, int]) -> torch.Tensor:
        given = torch.tensor(spans, dtype=torch.int32, device=DEVICE)
        return pool(x, scale, weight, given, out=torch.empty((len(spans), 40), device=DEVICE))

    assert torch.equal(sums((7, 50))[0], sums((0, 90), (7, 50), (3, 4))[1])
