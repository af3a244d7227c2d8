"""RMSNorm (https://arxiv.org/abs/1910.07467), alone or after an addition to the stream."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels import pdl
from headrace.kernels.launch import launch
from headrace.kernels.shapes import check_output, power_of_two


@triton.jit(do_not_specialize=["eps"])
def rms_norm_kernel(
    x,
    weight,
    residual,
    out,
    eps,
    K: tl.constexpr,
    BK: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (tokens,): a row lies in the registers of one program."""
    pdl.release(PDL)
    at = tl.program_id(0).to(tl.int64) * K
    k = tl.arange(0, BK)
    inside = k < K
    gain = tl.load(weight + k, mask=inside, other=0.0).to(tl.float32)
    pdl.wait(PDL)
    y = tl.load(x + at + k, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        y += tl.load(residual + at + k, mask=inside, other=0.0).to(tl.float32)
        rounded = y.to(residual.dtype.element_ty)
        tl.store(residual + at + k, rounded, mask=inside)
        y = rounded.to(tl.float32)  # what later layers read is what is normed
    scale = tl.rsqrt(tl.sum(y * y, axis=0) / K + eps)
    tl.store(out + at + k, (y * scale * gain).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["eps"])
def inverse_rms_kernel(x, out, eps, K: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr) -> None:
    """Grid (tokens,)."""
    pdl.release(PDL)
    token = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BK)
    pdl.wait(PDL)
    y = tl.load(x + token * K + k, mask=k < K, other=0.0).to(tl.float32)
    tl.store(out + token, tl.rsqrt(tl.sum(y * y, axis=0) / K + eps))


def inverse_rms(x: Tensor, eps: float, *, out: Tensor, with_pdl: bool = False) -> Tensor:
    """x [T, K] -> out [T] float32: what RMSNorm multiplies a row by before its weight."""
    tokens, k = x.shape
    check_output(x, (tokens, k))
    check_output(out, (tokens,))
    assert out.dtype == torch.float32, "a factor is float32"
    if tokens == 0:
        return out
    block = power_of_two(k)
    launch(inverse_rms_kernel, (tokens,), x, out, eps,
        K=k, BK=block, num_warps=min(16, max(1, block // 512)), **pdl.options(with_pdl),
    )  # fmt: skip
    return out


def inverse_rms_reference(x: Tensor, eps: float) -> Tensor:
    """The same in float64."""
    return (x.double().square().mean(dim=-1) + eps).rsqrt()


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    with_pdl: bool = False,
) -> Tensor:
    """x [T, K], weight [K] -> [T, K]; `out` may be x. Summed in float32, rounded once.

    With `residual` [T, K] x + residual is written back there, rounded, and that is normed.
    """
    tokens, k = x.shape
    out = torch.empty_like(x) if out is None else out
    for tensor in (x, out) if residual is None else (x, out, residual):
        check_output(tensor, (tokens, k))
    assert weight.shape == (k,), "weight is [K]"
    if tokens == 0:
        return out
    block = power_of_two(k)
    launch(rms_norm_kernel, (tokens,),
        x, weight, x if residual is None else residual, out, eps,
        K=k, BK=block, RESIDUAL=residual is not None,
        num_warps=min(16, max(1, block // 512)), **pdl.options(with_pdl),
    )  # fmt: skip
    return out


def rms_norm_reference(
    x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None
) -> Tensor:
    """The same in float64; `residual` is written back in its own dtype."""
    y = x.double()
    if residual is not None:
        residual.copy_(residual.double() + y)
        y = residual.double()
    return y * (y.square().mean(dim=-1, keepdim=True) + eps).rsqrt() * weight.double()
