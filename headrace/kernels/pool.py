"""Sums of normed rows: what is asked of the last hidden states, without writing them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels import pdl
from headrace.kernels.launch import launch
from headrace.kernels.shapes import check_output, check_scale

_ROWS, _COLUMNS = 32, 64  # that a program holds at once


@triton.jit
def pool_kernel(
    x,
    scale,
    weight,
    spans,
    out,
    K: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (spans, K / BK). spans [spans, 2]: first row, how many. Rows are summed in order, so a
    span's sum is the same whatever else is asked."""
    pdl.release(PDL)
    span = tl.program_id(0)
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    inside = k < K
    gain = tl.load(weight + k, mask=inside, other=0.0).to(tl.float32)
    pdl.wait(PDL)
    first = tl.load(spans + 2 * span).to(tl.int64)
    count = tl.load(spans + 2 * span + 1)
    total = tl.zeros((BK,), dtype=tl.float32)
    for begin in range(0, count, BT):
        row = begin + tl.arange(0, BT)
        there = row < count
        at = (first + row)[:, None] * K + k[None, :]
        y = tl.load(x + at, mask=there[:, None] & inside[None, :], other=0.0).to(tl.float32)
        factor = tl.load(scale + first + row, mask=there, other=0.0)
        total += tl.sum(y * factor[:, None], axis=0)
    tl.store(out + span.to(tl.int64) * K + k, total * gain, mask=inside)


def pool(
    x: Tensor,
    scale: Tensor,
    weight: Tensor,
    spans: Tensor,
    *,
    out: Tensor,
    with_pdl: bool = False,
) -> Tensor:
    """x [T, K], scale [T] of `inverse_rms`, weight [K] of the norm, spans [n, 2] int32 (first row,
    how many >= 1) -> out [n, K] float32: the sum of the normed rows of each span, not rounded."""
    tokens, k = x.shape
    count = spans.shape[0]
    check_output(x, (tokens, k))
    check_scale(scale, tokens)
    check_output(spans, (count, 2))
    check_output(out, (count, k))
    assert weight.shape == (k,), "weight is [K]"
    assert (spans.dtype, out.dtype) == (torch.int32, torch.float32), "spans int32, out float32"
    if count:
        launch(pool_kernel, (count, triton.cdiv(k, _COLUMNS)), x, scale, weight, spans, out,
            K=k, BT=_ROWS, BK=_COLUMNS, num_warps=4, **pdl.options(with_pdl),
        )  # fmt: skip
    return out


def pool_reference(x: Tensor, eps: float, weight: Tensor, spans: list[tuple[int, int]]) -> Tensor:
    """The same in float64, norm included."""
    y = x.double()
    normed = y * (y.square().mean(dim=-1, keepdim=True) + eps).rsqrt() * weight.double()
    return torch.stack([normed[first : first + count].sum(0) for first, count in spans])
