"""Rows of a table by the ids of a step. The table may lie in the processor's memory, page-locked:
then each row goes over the link once, and nobody waits for the host."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels import pdl
from headrace.kernels.launch import launch
from headrace.kernels.shapes import cdiv, check_output, power_of_two

_BLOCK = 1024  # columns of a program: all its loads are on their way at once


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["ids"])
def gather_rows_kernel(
    ids, table, out, rows, scale, K: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr
) -> None:
    """Grid (tokens, groups of BK columns)."""
    pdl.release(PDL)
    token = tl.program_id(0)
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    pdl.wait(PDL)
    given = tl.load(ids + token)
    source = tl.where(given < rows, given, 0).to(tl.int64) * K
    y = tl.load(table + source + k, mask=k < K, other=0.0).to(out.dtype.element_ty)
    y = (y.to(tl.float32) * scale).to(out.dtype.element_ty)
    tl.store(out + token.to(tl.int64) * K + k, y, mask=k < K)


def gather_rows(
    ids: Tensor, table: Tensor, scale: float, *, out: Tensor, with_pdl: bool = False
) -> Tensor:
    """ids [T] int32, table [V, K] -> out [T, K]: scale * table[id]; ids from V on take row 0.

    Row, factor and product are rounded to the type of `out`, whatever that of the table.
    """
    tokens, k = out.shape
    check_output(out, (tokens, table.shape[1]))
    assert table.is_contiguous(), "table: rows lie one after another"
    assert ids.shape == (tokens,), "an id a token"
    if tokens:
        block = min(_BLOCK, power_of_two(k))
        factor = float(torch.tensor(scale, dtype=out.dtype))
        launch(gather_rows_kernel, (tokens, cdiv(k, block)),
            ids, table, out, table.shape[0], factor, K=k, BK=block,
            num_warps=max(1, block // 256), **pdl.options(with_pdl),
        )  # fmt: skip
    return out


def gather_rows_reference(ids: Tensor, table: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """The same with torch, a new tensor."""
    found = table[ids.where(ids < table.shape[0], 0).long()].to(dtype)
    return found * torch.tensor(scale, dtype=dtype, device=found.device)
