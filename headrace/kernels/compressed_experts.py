"""The two products of `experts` for tiles of few rows, from compressed matrices: three quarters of
the bytes, the same numbers. The order of a sum is another, so results agree to rounding. Plain
reference: `experts.experts_reference`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels import pdl
from headrace.kernels.compressed import ROWS, Compressed, compressed_sums
from headrace.kernels.dispatch import Dispatch
from headrace.kernels.experts import SWIGLU_ALPHA, check_experts, gated, tile_of
from headrace.kernels.launch import launch
from headrace.kernels.shapes import check_output

MOST_TILE_ROWS = 32  # with more, the plain matrices are faster
_WARPS, _STAGES = 4, 3


@triton.jit(do_not_specialize=["limit"])
def compressed_gate_up_kernel(
    x,
    blocks,
    scales,
    slots,
    slot_values,
    starts,
    places,
    values,
    bias,
    order,
    tile_experts,
    out,
    limit,
    EACH: tl.constexpr,
    FFN: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BIAS: tl.constexpr,
    CLAMPED: tl.constexpr,
    ALPHA: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (tiles * groups of BN / 2 pairs,), as `experts.expert_gate_up_kernel`."""
    pdl.release(PDL)
    GROUPS: tl.constexpr = 2 * FFN // BN
    pdl.wait(PDL)
    expert, group, item = tile_of(order, tile_experts, GROUPS, BM)
    if expert < 0:
        return
    live = item >= 0
    at = tl.maximum(item, 0).to(tl.int64)
    acc = compressed_sums(
        x + at // EACH * K, live, blocks, scales, slots, slot_values, starts, places, values,
        expert, group, GROUPS, K, BM,
    )  # fmt: skip
    if BIAS:
        j = group * BN + tl.arange(0, BN)
        row = j // 2 + j % 2 * FFN
        acc += tl.load(bias + expert * (2 * FFN) + row).to(tl.float32)[None, :]
    y = gated(acc, limit, BM, BN, CLAMPED, ALPHA)
    n = group * (BN // 2) + tl.arange(0, BN // 2)
    tl.store(out + at[:, None] * FFN + n[None, :], y.to(out.dtype.element_ty), mask=live[:, None])


@triton.jit
def compressed_down_kernel(
    x,
    blocks,
    scales,
    slots,
    slot_values,
    starts,
    places,
    values,
    bias,
    order,
    tile_experts,
    out,
    N: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (tiles * groups of BN rows,)."""
    pdl.release(PDL)
    GROUPS: tl.constexpr = N // BN
    pdl.wait(PDL)
    expert, group, item = tile_of(order, tile_experts, GROUPS, BM)
    if expert < 0:
        return
    live = item >= 0
    at = tl.maximum(item, 0).to(tl.int64)
    acc = compressed_sums(
        x + at * K, live, blocks, scales, slots, slot_values, starts, places, values,
        expert, group, GROUPS, K, BM,
    )  # fmt: skip
    n = group * BN + tl.arange(0, BN)
    if BIAS:
        acc += tl.load(bias + expert * N + n).to(tl.float32)[None, :]
    tl.store(out + at[:, None] * N + n[None, :], acc.to(out.dtype.element_ty), mask=live[:, None])


def compressed_gate_up(
    x: Tensor,
    weight: Compressed,
    plan: Dispatch,
    *,
    bias: Tensor | None = None,
    limit: float = 0.0,
    out: Tensor,
    with_pdl: bool = False,
) -> Tensor:
    """As `experts.expert_gate_up`; weight: with its rows `paired`. x is bfloat16 or float32."""
    _, rows, k = weight.shape
    _check(x, weight, bias, plan.tokens, plan)
    check_output(out, (plan.tokens * plan.each, rows // 2))
    launch(compressed_gate_up_kernel, (plan.tiles * (rows // ROWS),),
        x, *_parts(weight), x if bias is None else bias, plan.order, plan.tile_experts, out, limit,
        EACH=plan.each, FFN=rows // 2, K=k, BM=plan.tile_rows, BN=ROWS,
        BIAS=bias is not None, CLAMPED=limit > 0, ALPHA=SWIGLU_ALPHA,
        num_warps=_WARPS, num_stages=_STAGES, **pdl.options(with_pdl),
    )  # fmt: skip
    return out


def compressed_down(
    x: Tensor,
    weight: Compressed,
    plan: Dispatch,
    *,
    bias: Tensor | None = None,
    out: Tensor,
    with_pdl: bool = False,
) -> Tensor:
    """As `experts.expert_down`; weight: of `compressed.compress`. x is bfloat16 or float32."""
    _, n, k = weight.shape
    _check(x, weight, bias, plan.tokens * plan.each, plan)
    check_output(out, (plan.tokens * plan.each, n))
    launch(compressed_down_kernel, (plan.tiles * (n // ROWS),),
        x, *_parts(weight), x if bias is None else bias, plan.order, plan.tile_experts, out,
        N=n, K=k, BM=plan.tile_rows, BN=ROWS, BIAS=bias is not None,
        num_warps=_WARPS, num_stages=_STAGES, **pdl.options(with_pdl),
    )  # fmt: skip
    return out


def _check(x: Tensor, weight: Compressed, bias: Tensor | None, rows: int, plan: Dispatch) -> None:
    assert x.dtype in (torch.bfloat16, torch.float32), (
        f"{x.dtype}: too narrow for exponents of bfloat16"
    )
    assert plan.tile_rows <= MOST_TILE_ROWS, f"tiles of {plan.tile_rows} rows"
    check_experts(x, weight.shape, bias, rows, plan)


def _parts(weight: Compressed) -> tuple[Tensor, ...]:
    return (
        weight.blocks, weight.scales, weight.slots, weight.slot_values,
        weight.starts, weight.places, weight.values,
    )  # fmt: skip
