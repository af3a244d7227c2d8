"""The middle of a feed-forward layer: an activation, and, where there is a gate, its product.

By themselves after a product that a library made; `linear` and `gate_up` have them in their ends.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels import pdl
from headrace.kernels.launch import launch
from headrace.kernels.shapes import check_output, check_scale, power_of_two

ACTS = ("silu", "gelu", "gelu_tanh", "relu", "clamped")  # the last with a gate only
LIMIT, SLOPE = 7.0, 1.702  # of "clamped", gpt-oss's
_LIMIT, _SLOPE = tl.constexpr(LIMIT), tl.constexpr(SLOPE)
_ROOT_HALF = tl.constexpr(0.7071067811865476)
_TWO_ROOTS = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi)


@triton.jit
def activate(x, ACT: tl.constexpr):
    """x float32. gelu_tanh: (1 + tanh(u)) / 2 is sigmoid(2 u).

    Constants of the module stand right of a tensor: Triton 3.7's interpreter takes no other order.
    """
    if ACT == "silu":
        return x * tl.sigmoid(x)
    elif ACT == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * _ROOT_HALF))
    elif ACT == "gelu_tanh":
        return x * tl.sigmoid((x + 0.044715 * x * x * x) * _TWO_ROOTS)
    else:
        tl.static_assert(ACT == "relu", "an activation")
        return tl.maximum(x, 0.0)


@triton.jit
def activate_pair(gate, up, ACT: tl.constexpr):
    """act(gate) * up; clamped: both are cut off, and up has 1 added."""
    if ACT == "clamped":
        cut = tl.minimum(gate, _LIMIT)
        rest = tl.minimum(tl.maximum(up, -_LIMIT), _LIMIT) + 1.0
        return cut * tl.sigmoid(cut * _SLOPE) * rest
    else:
        return activate(gate, ACT) * up


@triton.jit
def activation_kernel(
    x,
    scale,
    bias,
    out,
    FFN: tl.constexpr,
    BF: tl.constexpr,
    ACT: tl.constexpr,
    GATED: tl.constexpr,
    SCALED: tl.constexpr,
    BIASED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (tokens, groups of BF columns)."""
    pdl.release(PDL)
    token = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    inside = f < FFN
    pdl.wait(PDL)
    at = token * FFN + f
    if GATED:
        at += token * FFN
    y = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if SCALED:
        factor = tl.load(scale + token)
        y *= factor
    if BIASED:
        y += tl.load(bias + f, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(x + at + FFN, mask=inside, other=0.0).to(tl.float32)
        if SCALED:
            up *= factor
        if BIASED:
            up += tl.load(bias + FFN + f, mask=inside, other=0.0).to(tl.float32)
        y = activate_pair(y, up, ACT)
    else:
        y = activate(y, ACT)
    tl.store(out + token * FFN + f, y.to(out.dtype.element_ty), mask=inside)


def activation(
    x: Tensor,
    act: str = "silu",
    *,
    gated: bool = True,
    scale: Tensor | None = None,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    with_pdl: bool = False,
) -> Tensor:
    """gated: x [T, 2 F], gate first -> act(gate) * up [T, F]; else x [T, F] -> act(x), and `out`
    may be x. `act` is one of ACTS. In float32, rounded once.

    Before that: scale [T] float32, a factor of each token's row; bias, as long as a row.
    """
    assert act in ACTS, f"{act} is none of {ACTS}"
    assert gated or act != "clamped", "clamped needs a gate"
    tokens, width = x.shape
    ffn = width // 2 if gated else width
    check_output(x, (tokens, 2 * ffn if gated else ffn))
    if out is None:
        out = torch.empty(tokens, ffn, dtype=x.dtype, device=x.device)
    check_output(out, (tokens, ffn))
    check_scale(scale, tokens)
    if bias is not None:
        check_output(bias, (width,))
    if tokens == 0:
        return out
    block = min(2048, power_of_two(ffn))
    launch(
        activation_kernel,
        (tokens, -(-ffn // block)),
        x,
        x if scale is None else scale,  # never read where there is none
        x if bias is None else bias,
        out,
        FFN=ffn,
        BF=block,
        ACT=act,
        GATED=gated,
        SCALED=scale is not None,
        BIASED=bias is not None,
        num_warps=max(1, block // 256),
        **pdl.options(with_pdl),
    )
    return out


def activate_reference(x: Tensor, act: str) -> Tensor:
    """One of ACTS but clamped."""
    if act == "silu":
        return F.silu(x)
    if act == "relu":
        return F.relu(x)
    return F.gelu(x, approximate="tanh" if act == "gelu_tanh" else "none")


def pair_reference(gate: Tensor, up: Tensor, act: str) -> Tensor:
    """act(gate) * up."""
    if act != "clamped":
        return activate_reference(gate, act) * up
    cut = gate.clamp(max=LIMIT)
    return cut * torch.sigmoid(SLOPE * cut) * (up.clamp(-LIMIT, LIMIT) + 1)


def activation_reference(
    x: Tensor,
    act: str = "silu",
    *,
    gated: bool = True,
    scale: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """The same in float64."""
    y = x.double() if scale is None else x.double() * scale.double()[:, None]
    y = y if bias is None else y + bias.double()
    if not gated:
        return activate_reference(y, act)
    gate, up = y.chunk(2, dim=-1)
    return pair_reference(gate, up, act)
