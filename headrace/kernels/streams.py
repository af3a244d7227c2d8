"""Where Gemma 3n's streams begin and end: each but the first is a product of one, made as large as
the first. Plain references: `models.altup.spread`, `models.altup.gather`.

Shapes: T tokens, S streams, H = hidden. A row lies in the registers of one program.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels import pdl
from headrace.kernels.launch import launch
from headrace.kernels.shapes import check_output, power_of_two

LEAST = 1e-5  # of a mean square that is divided by
_LEAST = tl.constexpr(LEAST)


@triton.jit(do_not_specialize=["stride", "tokens"])
def streams_kernel(
    first,
    stride,
    others,
    out,
    tokens,
    H: tl.constexpr,
    BH: tl.constexpr,
    S: tl.constexpr,
    MEAN: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (tokens,). MEAN: out [T, H], else [T, S, H]."""
    pdl.release(PDL)
    token = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BH)
    inside = h < H
    pdl.wait(PDL)
    x = tl.load(first + token * stride + h, mask=inside, other=0.0).to(tl.float32)
    wanted = tl.sqrt(tl.sum(x * x, axis=0) / H)
    if not MEAN:
        tl.store(out + token * S * H + h, x.to(out.dtype.element_ty), mask=inside)
    for i in tl.static_range(1, S):
        at = ((i - 1) * tokens + token) * H + h
        y = tl.load(others + at, mask=inside, other=0.0).to(tl.float32)
        square = tl.maximum(tl.sum(y * y, axis=0) / H, _LEAST)
        y = y * (wanted * tl.rsqrt(square))
        if MEAN:
            x += y
        else:
            tl.store(out + (token * S + i) * H + h, y.to(out.dtype.element_ty), mask=inside)
    if MEAN:
        tl.store(out + token * H + h, (x / S).to(out.dtype.element_ty), mask=inside)


def spread(x: Tensor, others: Tensor, *, with_pdl: bool = False) -> Tensor:
    """x [T, H], others [S - 1, T, H] -> streams [T, S, H]: x, and each of the others with its root
    mean square."""
    tokens, hidden = x.shape
    out = x.new_empty(tokens, others.shape[0] + 1, hidden)
    _launch(x, others, out, with_pdl)
    return out


def gather(first: Tensor, others: Tensor, *, out: Tensor, with_pdl: bool = False) -> Tensor:
    """first [T, H], others [S - 1, T, H] -> out [T, H]: the mean of the first and of the others
    with its root mean square. Rows of `first` may lie apart."""
    check_output(out, first.shape)
    _launch(first, others, out, with_pdl)
    return out


def _launch(first: Tensor, others: Tensor, out: Tensor, with_pdl: bool) -> None:
    tokens, hidden = first.shape
    check_output(others, (others.shape[0], tokens, hidden))
    assert first.stride(1) == 1, "a row's numbers lie one after another"
    block = power_of_two(hidden)
    if tokens:
        launch(streams_kernel, (tokens,),
            first, first.stride(0), others, out, tokens,
            H=hidden, BH=block, S=others.shape[0] + 1, MEAN=out.ndim == 2,
            num_warps=min(16, max(1, block // 256)), **pdl.options(with_pdl),
        )  # fmt: skip
