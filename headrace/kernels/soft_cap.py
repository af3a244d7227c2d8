"""Soft caps: cap * tanh(x / cap), of scores inside a kernel and of logits in place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels import pdl
from headrace.kernels.launch import launch
from headrace.kernels.shapes import power_of_two

LOG2E = tl.constexpr(1.4426950408889634)
_BLOCK = 2048  # columns of a program


@triton.jit
def soft_cap(scores, CAP: tl.constexpr):
    """CAP * tanh(scores / CAP), through exp2; exact at both ends, where exp2 is 0 or inf."""
    return CAP - (2 * CAP) / (tl.exp2(scores * (2 * LOG2E / CAP)) + 1)


@triton.jit
def soft_cap_kernel(
    x, N: tl.constexpr, BN: tl.constexpr, CAP: tl.constexpr, PDL: tl.constexpr
) -> None:
    """Grid (rows, groups of BN columns)."""
    pdl.release(PDL)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    at = tl.program_id(0).to(tl.int64) * N + n
    pdl.wait(PDL)
    y = tl.load(x + at, mask=n < N, other=0.0).to(tl.float32)
    tl.store(x + at, soft_cap(y, CAP).to(x.dtype.element_ty), mask=n < N)


def cap_rows(x: Tensor, cap: float, *, with_pdl: bool = False) -> Tensor:
    """x [rows, N], in place; in float32, rounded once. cap > 0."""
    assert cap > 0, cap
    assert x.is_contiguous(), "rows lie one after another"
    rows, n = x.shape
    if rows:
        block = min(_BLOCK, power_of_two(n))
        launch(soft_cap_kernel, (rows, -(-n // block)), x,
            N=n, BN=block, CAP=float(cap), num_warps=max(1, block // 256),
            **pdl.options(with_pdl),
        )  # fmt: skip
    return x


def soft_cap_reference(x: Tensor, cap: float) -> Tensor:
    """The same in float64, a new tensor."""
    return cap * torch.tanh(x.double() / cap)
