"""silu(gate(x)) * up(x) for few tokens: the first half of a SwiGLU feed-forward layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels import pdl
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
)
from headrace.kernels.shapes import check_output


@triton.jit(do_not_specialize=["m", "eps"])
def gate_up_kernel(
    x,
    weight,
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
    NORM: tl.constexpr,
    PREFETCH: tl.constexpr,
    EARLY: tl.constexpr,
    THREADS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (groups of BN / 2 pairs of rows, SPLIT)."""
    acc, live = product(
        x, weight, gain, eps, partials, squares, locks, m,
        2 * FFN, K, FFN, BM, BN, BK, SPLIT, NORM, PREFETCH, EARLY, THREADS, PDL,
    )  # fmt: skip
    gate, up = tl.split(tl.reshape(acc, (BM, BN // 2, 2)))
    y = gate * tl.sigmoid(gate) * up
    n = tl.program_id(0) * (BN // 2) + tl.arange(0, BN // 2)
    at = tl.arange(0, BM)[:, None] * FFN + n[None, :]
    tl.store(out + at, y.to(out.dtype.element_ty), mask=live[:, None] & (n < FFN)[None, :])


def gate_up(
    x: Tensor,
    weight: Tensor,
    *,
    norm: Norm | None = None,
    out: Tensor | None = None,
    config: Config,
    workspace: Workspace | None = None,
    with_pdl: bool = False,
) -> Tensor:
    """x [m, K], weight [2 F, K], gate's rows first -> [m, F]. The rest as in `linear`."""
    check(x, weight, norm)
    (m, k), ffn = x.shape, weight.shape[0] // 2
    assert weight.shape[0] == 2 * ffn, "gate and up have as many rows"
    out = torch.empty(m, ffn, dtype=x.dtype, device=x.device) if out is None else out
    check_output(out, (m, ffn))
    tiles = triton.cdiv(2 * ffn, config.block_n)
    x, gain, eps, fold = normed(x, norm, config, with_pdl)
    launch(gate_up_kernel, (tiles, config.split_k),
        x, weight, gain, out, *scratch(x, tiles, config, workspace), m, eps,
        FFN=ffn, K=k, BM=block_m(m), BN=config.block_n, BK=columns_a_turn(x, config),
        SPLIT=config.split_k,
        NORM=fold, PREFETCH=prefetch_bytes(weight, config, with_pdl),
        EARLY=early_columns(x, config), THREADS=32 * config.warps,
        num_warps=config.warps, num_stages=config.stages, **pdl.options(with_pdl),
    )  # fmt: skip
    return out


def gate_up_reference(x: Tensor, weight: Tensor, *, norm: Norm | None = None) -> Tensor:
    """The same in float64."""
    gate, up = (norm_reference(x, norm) @ weight.double().T).chunk(2, dim=-1)
    return F.silu(gate) * up
