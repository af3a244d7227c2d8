"""LayerNorm (https://arxiv.org/abs/1607.06450), with or without a bias."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels import pdl
from headrace.kernels.launch import launch
from headrace.kernels.shapes import check_output, power_of_two


@triton.jit(do_not_specialize=["eps"])
def layer_norm_kernel(
    x,
    weight,
    bias,
    out,
    eps,
    K: tl.constexpr,
    BK: tl.constexpr,
    BIAS: tl.constexpr,
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
    y = tl.where(inside, y - tl.sum(y, axis=0) / K, 0.0)
    y = y * tl.rsqrt(tl.sum(y * y, axis=0) / K + eps) * gain
    if BIAS:
        y += tl.load(bias + k, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at + k, y.to(out.dtype.element_ty), mask=inside)


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    out: Tensor | None = None,
    with_pdl: bool = False,
) -> Tensor:
    """x [T, K], weight and bias [K] -> [T, K]; `out` may be x. In float32, rounded once."""
    tokens, k = x.shape
    out = torch.empty_like(x) if out is None else out
    check_output(x, (tokens, k))
    check_output(out, (tokens, k))
    assert weight.shape == (k,), "weight is [K]"
    assert bias is None or bias.shape == (k,), "bias is [K]"
    if tokens == 0:
        return out
    block = power_of_two(k)
    launch(layer_norm_kernel, (tokens,),
        x, weight, weight if bias is None else bias, out, eps,
        K=k, BK=block, BIAS=bias is not None,
        num_warps=min(16, max(1, block // 512)), **pdl.options(with_pdl),
    )  # fmt: skip
    return out


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """The same in float64."""
    shift = None if bias is None else bias.double()
    return F.layer_norm(x.double(), (x.shape[1],), weight.double(), shift, eps)
