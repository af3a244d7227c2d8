"""y = act(f(x) W^T + bias) + residual for few tokens; f is nothing or RMSNorm."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels import pdl
from headrace.kernels.activation import ACTS, activate, activate_reference
from headrace.kernels.launch import launch
from headrace.kernels.product import (
    Config,
    Norm,
    Workspace,
    ahead,
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
from headrace.kernels.soft_cap import soft_cap, soft_cap_reference


@triton.jit(do_not_specialize=["m", "eps"])
def linear_kernel(
    x,
    weight,
    bias,
    residual,
    gain,
    out,
    partials,
    squares,
    locks,
    m,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLIT: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ACT: tl.constexpr,
    CAP: tl.constexpr,
    NORM: tl.constexpr,
    PREFETCH: tl.constexpr,
    EARLY: tl.constexpr,
    STAGGER: tl.constexpr,
    THREADS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (groups of BN rows, SPLIT).

    `residual` may be `out`: of those that split a group only the one that writes a place uses what
    it read there, and it read that before."""
    pdl.release(PDL)
    token = tl.arange(0, BM)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    at = token[:, None].to(tl.int64) * N + n[None, :]
    SOON: tl.constexpr = RESIDUAL and EARLY == 0 and BM <= 16  # registers have room for it
    if SOON:  # it is on its way while the product is made
        ahead(weight, N, K, 0, BN, BK, SPLIT, PREFETCH, EARLY, THREADS)
        pdl.wait(PDL)
        added = tl.load(residual + at, mask=(token < m)[:, None] & (n < N)[None, :], other=0.0)
    acc, live = product(
        x, weight, gain, eps, partials, squares, locks, m,
        N, K, 0, BM, BN, BK, SPLIT, NORM, 0 if SOON else PREFETCH, EARLY, STAGGER, THREADS, PDL,
    )  # fmt: skip
    mask = live[:, None] & (n < N)[None, :]
    if BIAS:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if ACT != "":
        acc = activate(acc, ACT)
    if RESIDUAL:
        if not SOON:
            added = tl.load(residual + at, mask=mask, other=0.0)
        acc += added.to(tl.float32)
    if CAP > 0:
        acc = soft_cap(acc, CAP)
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=mask)


def linear(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    norm: Norm | None = None,
    act: str = "",
    cap: float = 0.0,
    out: Tensor | None = None,
    config: Config,
    workspace: Workspace | None = None,
    with_pdl: bool = False,
) -> Tensor:
    """x [m, K], weight [N, K] -> [m, N], summed in float32 and rounded once.

    bias [N]; residual [m, N], which may be `out`; norm = (weight [K], eps): RMSNorm of x comes
    first; act: one of ACTS without a gate; cap > 0: what comes out is soft-capped. `out` may have
    another dtype than x (float32 logits). A split config needs a workspace. `with_pdl`: a dependent
    launch, see `pdl`.
    """
    check(x, weight, norm)
    (m, k), n = x.shape, weight.shape[0]
    out = torch.empty(m, n, dtype=x.dtype, device=x.device) if out is None else out
    check_output(out, (m, n))
    if residual is not None:
        check_output(residual, (m, n))
    assert bias is None or bias.shape == (n,), "bias is [N]"
    assert act in ("", *ACTS), f"{act} is none of {ACTS}"
    tiles = triton.cdiv(n, config.block_n)
    x, gain, eps, fold = normed(x, norm, config, with_pdl)
    launch(linear_kernel, (tiles, config.split_k),
        x, weight, x if bias is None else bias, x if residual is None else residual, gain, out,
        *scratch(x, tiles, config, workspace), m, eps,
        N=n, K=k, BM=block_m(m), BN=config.block_n, BK=columns_a_turn(x, config),
        SPLIT=config.split_k,
        BIAS=bias is not None, RESIDUAL=residual is not None,
        ACT=act, CAP=float(cap), NORM=fold,
        PREFETCH=prefetch_bytes(weight, config, with_pdl),
        EARLY=early_columns(x, config), STAGGER=staggers(config, fold), THREADS=32 * config.warps,
        num_warps=config.warps, num_stages=config.stages, **pdl.options(with_pdl),
    )  # fmt: skip
    return out


def linear_reference(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    norm: Norm | None = None,
    act: str = "",
    cap: float = 0.0,
) -> Tensor:
    """The same in float64."""
    y = norm_reference(x, norm) @ weight.double().T
    y = y if bias is None else y + bias.double()
    y = activate_reference(y, act) if act else y
    y = y if residual is None else y + residual.double()
    return soft_cap_reference(y, cap) if cap else y
