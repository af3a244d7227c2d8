"""silu(gate) * up of a product that a library made: the middle of a SwiGLU feed-forward layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels import pdl
from headrace.kernels.launch import launch
from headrace.kernels.shapes import cdiv, check_output, check_scale, power_of_two


@triton.jit
def silu_mul_kernel(
    gate_up,
    scale,
    out,
    FFN: tl.constexpr,
    BF: tl.constexpr,
    SCALED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (tokens, groups of BF columns)."""
    pdl.release(PDL)
    token = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    inside = f < FFN
    pdl.wait(PDL)
    at = token * (2 * FFN) + f
    gate = tl.load(gate_up + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + at + FFN, mask=inside, other=0.0).to(tl.float32)
    if SCALED:
        factor = tl.load(scale + token)
        gate *= factor
        up *= factor
    y = gate * tl.sigmoid(gate) * up
    tl.store(out + token * FFN + f, y.to(out.dtype.element_ty), mask=inside)


def silu_mul(
    gate_up: Tensor,
    *,
    scale: Tensor | None = None,
    out: Tensor | None = None,
    with_pdl: bool = False,
) -> Tensor:
    """gate_up [T, 2 F], gate first -> [T, F]. In float32, rounded once.

    scale [T] float32: of each token's row, before anything else.
    """
    tokens, ffn = gate_up.shape[0], gate_up.shape[1] // 2
    check_output(gate_up, (tokens, 2 * ffn))
    if out is None:
        out = torch.empty(tokens, ffn, dtype=gate_up.dtype, device=gate_up.device)
    check_output(out, (tokens, ffn))
    check_scale(scale, tokens)
    if tokens == 0:
        return out
    block = min(2048, power_of_two(ffn))
    launch(
        silu_mul_kernel,
        (tokens, cdiv(ffn, block)),
        gate_up,
        gate_up if scale is None else scale,  # never read where there is none
        out,
        FFN=ffn,
        BF=block,
        SCALED=scale is not None,
        num_warps=max(1, block // 256),
        **pdl.options(with_pdl),
    )
    return out


def silu_mul_reference(gate_up: Tensor, scale: Tensor | None = None) -> Tensor:
    """The same in float64."""
    scaled = gate_up.double() if scale is None else gate_up.double() * scale.double()[:, None]
    gate, up = scaled.chunk(2, dim=-1)
    return F.silu(gate) * up
