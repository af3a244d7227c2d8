"""x += RMSNorm(y): what a sublayer says is normed before it joins the stream."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels import pdl
from headrace.kernels.launch import launch
from headrace.kernels.rms_norm import rms_norm_reference
from headrace.kernels.shapes import check_output, power_of_two


@triton.jit(do_not_specialize=["eps"])
def norm_add_kernel(
    x, y, weight, eps, K: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr
) -> None:
    """Grid (tokens,): a row lies in the registers of one program."""
    pdl.release(PDL)
    at = tl.program_id(0).to(tl.int64) * K
    k = tl.arange(0, BK)
    inside = k < K
    gain = tl.load(weight + k, mask=inside, other=0.0).to(tl.float32)
    pdl.wait(PDL)
    z = tl.load(y + at + k, mask=inside, other=0.0).to(tl.float32)
    old = tl.load(x + at + k, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(z * z, axis=0) / K + eps)
    tl.store(x + at + k, (old + z * scale * gain).to(x.dtype.element_ty), mask=inside)


def norm_add(x: Tensor, y: Tensor, weight: Tensor, eps: float, *, with_pdl: bool = False) -> Tensor:
    """x, y [T, K], weight [K]: x + RMSNorm(y), in place. In float32, rounded once."""
    tokens, k = x.shape
    for tensor in (x, y):
        check_output(tensor, (tokens, k))
    assert weight.shape == (k,), "weight is [K]"
    if tokens:
        block = power_of_two(k)
        launch(norm_add_kernel, (tokens,), x, y, weight, eps, K=k, BK=block,
            num_warps=min(16, max(1, block // 512)), **pdl.options(with_pdl),
        )  # fmt: skip
    return x


def norm_add_reference(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The same in float64, a new tensor."""
    return x.double() + rms_norm_reference(y, weight, eps)
