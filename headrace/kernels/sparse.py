"""A gate of which only what is large goes on (Gemma 3n): what lies above a bound that is so many
deviations from its mean."""

from __future__ import annotations

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels import pdl
from headrace.kernels.activation import activate, activate_reference
from headrace.kernels.launch import launch
from headrace.kernels.shapes import check_output, check_scale, power_of_two


@triton.jit(do_not_specialize=["deviations"])
def sparse_gate_kernel(
    x,
    scale,
    out,
    deviations,
    FFN: tl.constexpr,
    BF: tl.constexpr,
    ACT: tl.constexpr,
    SCALED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (tokens,): a gate lies in the registers of one program."""
    pdl.release(PDL)
    token = tl.program_id(0).to(tl.int64)
    f = tl.arange(0, BF)
    inside = f < FFN
    pdl.wait(PDL)
    at = token * 2 * FFN + f
    gate = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + at + FFN, mask=inside, other=0.0).to(tl.float32)
    if SCALED:
        factor = tl.load(scale + token)
        gate *= factor
        up *= factor
    mean = tl.sum(gate, axis=0) / FFN
    away = tl.where(inside, gate - mean, 0.0)
    bound = mean + tl.sqrt(tl.sum(away * away, axis=0) / FFN) * deviations
    y = activate(tl.maximum(gate - bound, 0.0), ACT) * up
    tl.store(out + token * FFN + f, y.to(out.dtype.element_ty), mask=inside)


def sparse_gate(
    x: Tensor,
    deviations: float,
    act: str,
    *,
    scale: Tensor | None = None,
    out: Tensor,
    with_pdl: bool = False,
) -> Tensor:
    """x [T, 2 F], gate first -> out [T, F]: act(max(gate - bound, 0)) * up, where a token's bound
    is the mean of its gate and `deviations` times its deviation. In float32, rounded once.

    scale [T] float32: a factor of each token's row, before that.
    """
    tokens, ffn = out.shape
    check_output(x, (tokens, 2 * ffn))
    check_output(out, (tokens, ffn))
    check_scale(scale, tokens)
    if tokens:
        block = power_of_two(ffn)
        launch(sparse_gate_kernel, (tokens,),
            x, x if scale is None else scale, out, deviations,
            FFN=ffn, BF=block, ACT=act, SCALED=scale is not None,
            num_warps=min(16, max(1, block // 512)), **pdl.options(with_pdl),
        )  # fmt: skip
    return out


def sparse_gate_reference(
    x: Tensor, deviations: float, act: str, *, scale: Tensor | None = None
) -> Tensor:
    """The same in float64."""
    y = x.double() if scale is None else x.double() * scale.double()[:, None]
    gate, up = y.chunk(2, dim=-1)
    bound = gate.mean(-1, keepdim=True) + deviations * gate.std(-1, keepdim=True, correction=0)
    return activate_reference(F.relu(gate - bound), act) * up
