"""Rows of a table by ids; on a GPU the table is in page-locked memory of the machine."""

from __future__ import annotations

import pytest
import torch

from headrace.backends.cuda.host_rows import page_locked
from headrace.kernels import pdl
from headrace.kernels.gather import gather_rows, gather_rows_reference
from tests.kernels.conftest import CUDA
from tests.kernels.test_elementwise import EXACT

SCALE = 53**0.5


@pytest.mark.parametrize("dtype", EXACT, ids=str)
@pytest.mark.parametrize(("tokens", "k"), [(5, 53), (1, 2050), (2, 1024)])
def test_gather(tokens: int, k: int, dtype: torch.dtype, device: torch.device) -> None:
    """Ids past the last row take the first."""
    rows = torch.randn(9, k).to(dtype)
    table = page_locked((9, k), dtype) if CUDA else rows
    table.copy_(rows)
    ids = torch.tensor([3, 8, 9, 0, 40, 1][:tokens], dtype=torch.int32)
    out = torch.full((tokens, k), float("nan"), dtype=dtype, device=device)
    gather_rows(ids.to(device), table, SCALE, out=out, with_pdl=pdl.supported(device))
    assert torch.equal(out.cpu(), gather_rows_reference(ids, rows, SCALE, dtype))


def test_a_table_of_another_type(device: torch.device) -> None:
    """What a checkpoint has is rounded to the type of the rows, then scaled."""
    rows = torch.randn(9, 40)
    table = page_locked((9, 40), torch.float32) if CUDA else rows
    table.copy_(rows)
    ids = torch.tensor([2, 8], dtype=torch.int32)
    out = torch.empty(2, 40, dtype=torch.float16, device=device)
    gather_rows(ids.to(device), table, SCALE, out=out)
    assert torch.equal(out.cpu(), gather_rows_reference(ids, rows, SCALE, torch.float16))


@pytest.mark.skipif(not CUDA, reason="NOT RUN: page-locked memory needs the GPU")
def test_page_locked_memory_comes_back() -> None:
    """As often as it is taken: pages that stayed locked would be refused a second time."""
    for _ in range(4):
        table = page_locked((64, 4096), torch.bfloat16)
        assert not table.any()
        table.fill_(1.0)
        del table
