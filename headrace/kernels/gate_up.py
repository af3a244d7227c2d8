"""act(gate(x)) * up(x) for few tokens: the first half of a gated feed-forward layer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels import pdl
from headrace.kernels.activation import ACTS, activate_pair, pair_reference
from headrace.kernels.launch import launch
from headrace.kernels.product import (
    Config,
    Norm,
    Workspace,
    block_m,
    check,
    columns_a_turn,
    early_columns,
    norm_reference,
    normed,
    prefetch_bytes,
    product,
    scratch,
    staggers,
)
from headrace.kernels.shapes import check_output


@triton.jit(do_not_specialize=["m", "eps"])
def gate_up_kernel(
    x,
    weight,
    bias,
    gain,
    out,
    partials,
    squares,
    locks,
    m,
    eps,
    FFN: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLIT: tl.constexpr,
    ACT: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    PREFETCH: tl.constexpr,
    EARLY: tl.constexpr,
    STAGGER: tl.constexpr,
    THREADS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (groups of BN / 2 pairs of rows, SPLIT)."""
    pdl.release(PDL)
    acc, live = product(
        x, weight, gain, eps, partials, squares, locks, m,
        2 * FFN, K, FFN, BM, BN, BK, SPLIT, NORM, PREFETCH, EARLY, STAGGER, THREADS, PDL,
    )  # fmt: skip
    gate, up = tl.split(tl.reshape(acc, (BM, BN // 2, 2)))
    n = tl.program_id(0) * (BN // 2) + tl.arange(0, BN // 2)
    if BIAS:
        gate += tl.load(bias + n, mask=n < FFN, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias + FFN + n, mask=n < FFN, other=0.0).to(tl.float32)[None, :]
    y = activate_pair(gate, up, ACT)
    at = tl.arange(0, BM)[:, None] * FFN + n[None, :]
    tl.store(out + at, y.to(out.dtype.element_ty), mask=live[:, None] & (n < FFN)[None, :])


def gate_up(
    x: Tensor,
    weight: Tensor,
    *,
    norm: Norm | None = None,
    bias: Tensor | None = None,
    act: str = "silu",
    out: Tensor | None = None,
    config: Config,
    workspace: Workspace | None = None,
    with_pdl: bool = False,
) -> Tensor:
    """x [m, K], weight [2 F, K], gate's rows first -> [m, F]. bias [2 F]; act: one of
    ACTS. The rest as in `linear`."""
    check(x, weight, norm)
    (m, k), ffn = x.shape, weight.shape[0] // 2
    assert weight.shape[0] == 2 * ffn, "gate and up have as many rows"
    assert bias is None or bias.shape == (2 * ffn,), "bias is [2 F]"
    assert act in ACTS, f"{act} is none of {ACTS}"
    out = torch.empty(m, ffn, dtype=x.dtype, device=x.device) if out is None else out
    check_output(out, (m, ffn))
    tiles = triton.cdiv(2 * ffn, config.block_n)
    x, gain, eps, fold = normed(x, norm, config, with_pdl)
    launch(gate_up_kernel, (tiles, config.split_k),
        x, weight, x if bias is None else bias, gain, out,
        *scratch(x, tiles, config, workspace), m, eps,
        FFN=ffn, K=k, BM=block_m(m), BN=config.block_n, BK=columns_a_turn(x, config),
        SPLIT=config.split_k, ACT=act, BIAS=bias is not None,
        NORM=fold, PREFETCH=prefetch_bytes(weight, config, with_pdl),
        EARLY=early_columns(x, config), STAGGER=staggers(config, fold), THREADS=32 * config.warps,
        num_warps=config.warps, num_stages=config.stages, **pdl.options(with_pdl),
    )  # fmt: skip
    return out


def gate_up_reference(
    x: Tensor,
    weight: Tensor,
    *,
    norm: Norm | None = None,
    bias: Tensor | None = None,
    act: str = "silu",
) -> Tensor:
    """The same in float64."""
    both = norm_reference(x, norm) @ weight.double().T
    both = both if bias is None else both + bias.double()
    gate, up = both.chunk(2, dim=-1)
    return pair_reference(gate, up, act)
