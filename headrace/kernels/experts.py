"""The feed-forward layers of a mixture of experts, for the tokens that a `Dispatch` has sorted.

Two grouped products, gate and up with the activation inside, then down; a program takes one tile of
rows of one expert and streams BN rows of that expert's matrix. With few tokens a step IS the
reading of the matrices of the experts that are hit, once each; with many it is matrix products on
large tiles. `combine` adds what a token's experts say, in their order, so that no sum depends on
which program came first.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels import pdl
from headrace.kernels.dispatch import LARGEST_TILE, Dispatch
from headrace.kernels.launch import launch
from headrace.kernels.router import Routing
from headrace.kernels.shapes import cdiv, check_output, power_of_two

SWIGLU_ALPHA = 1.702  # of gpt-oss: https://github.com/openai/gpt-oss, swiglu in torch/model.py


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """How the matrices are streamed: block_n rows a program, block_k columns a turn (of 16 bits;
    fewer of 32), `stages` of the pipeline. Powers of two."""

    block_n: int
    block_k: int
    warps: int
    stages: int


UP_OF_FEW, DOWN_OF_FEW = ExpertsConfig(64, 256, 4, 3), ExpertsConfig(64, 128, 2, 4)
# Few rows: as many bytes in flight as shared memory holds beside a second program of the
# multiprocessor. Many: tiles for the asynchronous matrix unit, 64 rows a group of four warps.
CANDIDATES: dict[int, tuple[ExpertsConfig, ...]] = {
    16: (
        UP_OF_FEW,
        DOWN_OF_FEW,
        ExpertsConfig(64, 128, 4, 4),
        ExpertsConfig(32, 256, 4, 4),
        ExpertsConfig(32, 128, 4, 5),
        ExpertsConfig(64, 128, 8, 4),
        ExpertsConfig(16, 256, 4, 4),
        ExpertsConfig(128, 64, 4, 4),
    ),
    32: (
        ExpertsConfig(64, 128, 4, 4),
        ExpertsConfig(64, 128, 8, 4),
        ExpertsConfig(128, 64, 8, 4),
        ExpertsConfig(32, 128, 4, 5),
    ),
    64: (
        ExpertsConfig(128, 64, 4, 3),
        ExpertsConfig(128, 64, 4, 4),
        ExpertsConfig(64, 64, 4, 4),
        ExpertsConfig(64, 128, 4, 3),
    ),
    128: (
        ExpertsConfig(256, 64, 8, 3),
        ExpertsConfig(128, 64, 8, 3),
        ExpertsConfig(128, 64, 8, 4),
        ExpertsConfig(128, 64, 4, 3),
    ),
}


def default_configs(tile_rows: int) -> tuple[ExpertsConfig, ExpertsConfig]:
    """Of gate and up, and of down: the fastest on an H200 in a layer of Qwen3-30B-A3B's shape."""
    if tile_rows <= 16:
        return UP_OF_FEW, DOWN_OF_FEW
    config = CANDIDATES[tile_rows][0]
    return config, config


def default_tile_rows(tokens: int, routing: Routing) -> int:
    """Rows of a tile, such that the routed experts of evenly spread tokens fit one while they are
    few; a power of two, from 16, the least that the matrix units take."""
    mean = -(-tokens * routing.top // routing.experts)
    rows = 16
    while rows < LARGEST_TILE and rows < mean * 3 // 2:
        rows *= 2
    return rows


def columns_a_turn(x: Tensor, config: ExpertsConfig) -> int:
    """block_k for elements of this size; float32 has no matrix unit: more spill its registers."""
    return config.block_k if x.element_size() == 2 else max(16, min(32, config.block_k // 4))


@triton.jit
def tile_of(order, tile_experts, groups: tl.constexpr, BM: tl.constexpr):
    """-> the tile's expert (-1: no work), its group of rows of the matrix, its assignments [BM]."""
    tile = tl.program_id(0) // groups
    expert = tl.load(tile_experts + tile)
    item = tl.load(order + tile * BM + tl.arange(0, BM))  # beside it: an empty tile's is not used
    return expert, tl.program_id(0) % groups, item


@triton.jit
def _grouped(
    x_at,  # [BM] rows of x
    live,  # [BM]
    weight_at,  # [BN] rows of the expert's matrix
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    ONCE: tl.constexpr,
):
    """Sums [BM, BN] float32. ONCE: nobody else will read these rows of the matrix."""
    column = tl.arange(0, BK)
    a_at = x_at[:, None] + column[None, :]
    b_at = weight_at[None, :] + column[:, None]
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, K, BK):
        if K % BK == 0:
            a = tl.load(a_at + k, mask=live[:, None], other=0.0)
            if ONCE:
                b = tl.load(b_at + k, eviction_policy="evict_first")
            else:
                b = tl.load(b_at + k)
        else:
            inside = k + column < K
            a = tl.load(a_at + k, mask=live[:, None] & inside[None, :], other=0.0)
            b = tl.load(b_at + k, mask=inside[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    return acc


@triton.jit
def gated(
    acc, limit, BM: tl.constexpr, BN: tl.constexpr, CLAMPED: tl.constexpr, ALPHA: tl.constexpr
):
    """acc [BM, BN], gate's and up's sums of a pair side by side -> [BM, BN / 2]."""
    gate, up = tl.split(tl.reshape(acc, (BM, BN // 2, 2)))
    if CLAMPED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        return gate * tl.sigmoid(gate * ALPHA) * (up + 1.0)
    else:
        return gate * tl.sigmoid(gate) * up


@triton.jit(do_not_specialize=["limit"])
def expert_gate_up_kernel(
    x,
    weight,
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
    BK: tl.constexpr,
    ONCE: tl.constexpr,
    BIAS: tl.constexpr,
    CLAMPED: tl.constexpr,
    ALPHA: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (tiles * groups of BN / 2 pairs,): gate's and up's row of a pair side by side, so that
    their sums meet in one thread."""
    pdl.release(PDL)
    GROUPS: tl.constexpr = (2 * FFN + BN - 1) // BN
    pdl.wait(PDL)
    expert, group, item = tile_of(order, tile_experts, GROUPS, BM)
    if expert < 0:
        return
    live = item >= 0
    token = tl.maximum(item, 0) // EACH
    j = tl.arange(0, BN)
    pair = tl.minimum(group * (BN // 2) + j // 2, FFN - 1)
    row = pair + (j % 2) * FFN
    own = weight + expert.to(tl.int64) * (2 * FFN * K)
    acc = _grouped(x + token.to(tl.int64) * K, live, own + row * K, K, BM, BN, BK, ONCE)
    if BIAS:
        acc += tl.load(bias + expert * (2 * FFN) + row).to(tl.float32)[None, :]
    y = gated(acc, limit, BM, BN, CLAMPED, ALPHA)
    n = group * (BN // 2) + tl.arange(0, BN // 2)
    at = tl.maximum(item, 0).to(tl.int64)[:, None] * FFN + n[None, :]
    tl.store(out + at, y.to(out.dtype.element_ty), mask=live[:, None] & (n < FFN)[None, :])


@triton.jit
def expert_down_kernel(
    x,
    weight,
    bias,
    order,
    tile_experts,
    out,
    N: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    ONCE: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (tiles * groups of BN rows,)."""
    pdl.release(PDL)
    GROUPS: tl.constexpr = (N + BN - 1) // BN
    pdl.wait(PDL)
    expert, group, item = tile_of(order, tile_experts, GROUPS, BM)
    if expert < 0:
        return
    live = item >= 0
    at = tl.maximum(item, 0).to(tl.int64)
    n = group * BN + tl.arange(0, BN)
    row = tl.minimum(n, N - 1)
    own = weight + expert.to(tl.int64) * (N * K)
    acc = _grouped(x + at * K, live, own + row * K, K, BM, BN, BK, ONCE)
    if BIAS:
        acc += tl.load(bias + expert * N + row).to(tl.float32)[None, :]
    place = out + at[:, None] * N + n[None, :]
    tl.store(place, acc.to(out.dtype.element_ty), mask=live[:, None] & (n < N)[None, :])


@triton.jit
def combine_kernel(
    y,
    experts,
    weights,
    residual,
    out,
    EACH: tl.constexpr,
    N: tl.constexpr,
    BN: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (tokens, groups of BN columns)."""
    pdl.release(PDL)
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = n < N
    acc = tl.zeros((BN,), tl.float32)
    pdl.wait(PDL)
    for j in tl.static_range(EACH):
        item = token * EACH + j
        there = tl.load(experts + item) >= 0
        weight = tl.load(weights + item)
        said = tl.load(y + item * N + n, mask=inside, other=0.0).to(tl.float32)
        acc += tl.where(there, weight * said, 0.0)  # all loads side by side: none waits for `there`
    at = token * N + n
    if RESIDUAL:
        acc += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=inside)


def check_experts(
    x: Tensor, shape: tuple[int, int, int], bias: Tensor | None, rows: int, plan: Dispatch
) -> None:
    """x [rows, K] for matrices of `shape` [E, N, K], bias [E, N]."""
    check_output(x, (rows, shape[2]))
    assert plan.order.is_contiguous(), "order: tiles lie one after another"
    if bias is not None:
        check_output(bias, shape[:2])


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, rows: int, plan: Dispatch) -> None:
    assert weight.is_contiguous(), "weight: experts lie one after another"
    assert x.dtype == weight.dtype, f"x is {x.dtype}, the weight {weight.dtype}"
    experts, own_rows, k = weight.shape
    check_experts(x, (experts, own_rows, k), bias, rows, plan)


def expert_gate_up(
    x: Tensor,
    weight: Tensor,
    plan: Dispatch,
    *,
    bias: Tensor | None = None,
    limit: float = 0.0,
    out: Tensor,
    config: ExpertsConfig,
    with_pdl: bool = False,
) -> Tensor:
    """x [T, K], weight [E, 2 F, K], gate's rows first -> out [T * each, F], a row an assignment.

    silu(gate) * up; with a `limit` c, gpt-oss's: g sigmoid(1.702 g) (u + 1), where g is gate, at
    most c, and u is up within [-c, c]. bias [E, 2 F]. Summed in float32, rounded once. Rows of
    padding tokens are left as they are.
    """
    _, rows, k = weight.shape
    _check(x, weight, bias, plan.tokens, plan)
    check_output(out, (plan.tokens * plan.each, rows // 2))
    launch(expert_gate_up_kernel, (plan.tiles * cdiv(rows, config.block_n),),
        x, weight, weight if bias is None else bias, plan.order, plan.tile_experts, out, limit,
        EACH=plan.each, FFN=rows // 2, K=k, BM=plan.tile_rows, BN=config.block_n,
        BK=columns_a_turn(x, config), ONCE=plan.tile_rows <= 16,
        BIAS=bias is not None,
        CLAMPED=limit > 0, ALPHA=SWIGLU_ALPHA,
        num_warps=config.warps, num_stages=config.stages, **pdl.options(with_pdl),
    )  # fmt: skip
    return out


def expert_down(
    x: Tensor,
    weight: Tensor,
    plan: Dispatch,
    *,
    bias: Tensor | None = None,
    out: Tensor,
    config: ExpertsConfig,
    with_pdl: bool = False,
) -> Tensor:
    """x [T * each, K], weight [E, N, K] -> out [T * each, N]. The rest as in `expert_gate_up`."""
    _, n, k = weight.shape
    _check(x, weight, bias, plan.tokens * plan.each, plan)
    check_output(out, (plan.tokens * plan.each, n))
    launch(expert_down_kernel, (plan.tiles * cdiv(n, config.block_n),),
        x, weight, weight if bias is None else bias, plan.order, plan.tile_experts, out,
        N=n, K=k, BM=plan.tile_rows, BN=config.block_n, BK=columns_a_turn(x, config),
        ONCE=plan.tile_rows <= 16,
        BIAS=bias is not None,
        num_warps=config.warps, num_stages=config.stages, **pdl.options(with_pdl),
    )  # fmt: skip
    return out


def combine(
    y: Tensor,
    plan: Dispatch,
    *,
    residual: Tensor | None = None,
    out: Tensor,
    with_pdl: bool = False,
) -> Tensor:
    """y [T * each, N] -> out [T, N]: each token's experts, weighted, and the residual, which may be
    `out`. Summed in float32 in the order of `experts`, rounded once. A padding token gets the
    residual, or zeros."""
    n = y.shape[1]
    check_output(y, (plan.tokens * plan.each, n))
    check_output(out, (plan.tokens, n))
    if plan.tokens == 0:
        return out
    block = min(1024, power_of_two(n))
    launch(combine_kernel, (plan.tokens, cdiv(n, block)),
        y, plan.experts, plan.weights, out if residual is None else residual, out,
        EACH=plan.each, N=n, BN=block, RESIDUAL=residual is not None,
        num_warps=max(1, block // 256), **pdl.options(with_pdl),
    )  # fmt: skip
    return out


def experts_reference(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    experts: Tensor,
    weights: Tensor,
    *,
    biases: tuple[Tensor, Tensor] | None = None,
    limit: float = 0.0,
) -> Tensor:
    """The whole layer in float64: x [T, K], experts and weights [T, each] -> [T, K]."""
    x = x.double()
    out = torch.zeros_like(x)
    for t, (ids, factors) in enumerate(zip(experts.tolist(), weights.tolist(), strict=True)):
        for e, factor in zip(ids, factors, strict=True):
            if e >= 0:
                both = gate_up[e].double() @ x[t]
                both = both if biases is None else both + biases[0][e].double()
                gate, up = both.chunk(2)
                if limit:
                    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
                    inner = gate * torch.sigmoid(gate * SWIGLU_ALPHA) * (up + 1)
                else:
                    inner = F.silu(gate) * up
                y = down[e].double() @ inner
                out[t] += factor * (y if biases is None else y + biases[1][e].double())
    return out
