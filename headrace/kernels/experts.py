"""The feed-forward layers of a mixture of experts, for the tokens that a `Dispatch` has sorted.

Two grouped products, gate and up with the activation inside, then down; a program takes one tile of
rows of one expert and streams BN rows of that expert's matrix. With few tokens a step IS the
reading of the matrices of the experts that are hit, once each; with many it is matrix products on
large tiles. `combine` adds what a token's experts say, in their order, so that no sum depends on
which program came first; of few tokens the programs of down do it, the last one for its columns.
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
from headrace.kernels.product import Workspace
from headrace.kernels.router import Routing
from headrace.kernels.shapes import cdiv, check_output, check_scale, power_of_two

ADDED_TOKENS = 32  # up to which the programs of down add what a token's experts say
SWIGLU_ALPHA = 1.702  # of gpt-oss: https://github.com/openai/gpt-oss, swiglu in torch/model.py


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """How the matrices are streamed: block_n rows a program, block_k columns a turn (of 16 bits;
    fewer of 32), `stages` of the pipeline, powers of two. `prefetch_bytes` of a program's rows
    of down are asked for while gate and up still run (0: none)."""

    block_n: int
    block_k: int
    warps: int
    stages: int
    prefetch_bytes: int = 49152


# Few rows: as many bytes in flight as shared memory holds beside a second program of the
# multiprocessor. Many: tiles for the asynchronous matrix unit, 64 rows a group of four warps.
CANDIDATES: dict[int, tuple[ExpertsConfig, ...]] = {
    16: (
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


def default_config(tile_rows: int) -> ExpertsConfig:
    """The fastest on an H200 at both shapes of `benchmarks.gpu.experts`, or within 3 % of it."""
    return CANDIDATES[max(16, tile_rows)][0]


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
def _tile(order, tile_experts, groups: tl.constexpr, BM: tl.constexpr):
    """-> the tile's expert (-1: no work), its group of rows of the matrix, its assignments [BM]."""
    tile = tl.program_id(0) // groups
    expert = tl.load(tile_experts + tile)
    item = tl.load(order + tile * BM + tl.arange(0, BM), mask=expert >= 0, other=-1)
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
def _fetch(first, size, BYTES: tl.constexpr, THREADS: tl.constexpr) -> None:
    """Asks the L2 cache for BYTES from `first` on, `size` at most, a piece a thread."""
    PIECE: tl.constexpr = (BYTES // THREADS + 15) // 16 * 16
    at = tl.arange(0, THREADS) * PIECE
    left = tl.minimum(tl.maximum(size - at, 0), PIECE)
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.gt.s32 p, $2, 0;"
        " @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r",
        [first.to(tl.pointer_type(tl.int8)) + at, left],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=["limit"])
def expert_gate_up_kernel(
    x,
    scale,
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
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    CLAMPED: tl.constexpr,
    ALPHA: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (tiles * groups of BN / 2 pairs,): gate's and up's row of a pair side by side, so that
    their sums meet in one thread."""
    GROUPS: tl.constexpr = (2 * FFN + BN - 1) // BN
    pdl.wait(PDL)
    pdl.release(PDL)  # not before: the next kernel finds the order by experts there
    expert, group, item = _tile(order, tile_experts, GROUPS, BM)
    if expert < 0:
        return
    live = item >= 0
    token = tl.maximum(item, 0) // EACH
    j = tl.arange(0, BN)
    pair = tl.minimum(group * (BN // 2) + j // 2, FFN - 1)
    row = pair + (j % 2) * FFN
    own = weight + expert.to(tl.int64) * (2 * FFN * K)
    acc = _grouped(x + token.to(tl.int64) * K, live, own + row * K, K, BM, BN, BK, ONCE)
    if SCALED:
        acc *= tl.load(scale + token, mask=live, other=0.0)[:, None]
    if BIAS:
        acc += tl.load(bias + expert * (2 * FFN) + row).to(tl.float32)[None, :]
    gate, up = tl.split(tl.reshape(acc, (BM, BN // 2, 2)))
    if CLAMPED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        y = gate * tl.sigmoid(gate * ALPHA) * (up + 1.0)
    else:
        y = gate * tl.sigmoid(gate) * up
    n = group * (BN // 2) + tl.arange(0, BN // 2)
    at = tl.maximum(item, 0).to(tl.int64)[:, None] * FFN + n[None, :]
    tl.store(out + at, y.to(out.dtype.element_ty), mask=live[:, None] & (n < FFN)[None, :])


@triton.jit(do_not_specialize=["tokens"])
def expert_down_kernel(
    x,
    weight,
    bias,
    order,
    tile_experts,
    y,
    experts,
    weights,
    stream,
    locks,
    tokens,
    EACH: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    ONCE: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    BT: tl.constexpr,
    PREFETCH: tl.constexpr,
    THREADS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (tiles * groups of BN rows,). ADD: the last program of a group of rows, of all tiles,
    adds what the BT >= tokens tokens' experts say there to `stream`."""
    pdl.release(PDL)
    GROUPS: tl.constexpr = (N + BN - 1) // BN
    if PREFETCH > 0:
        # Gate and up released this kernel after the order was there; a wrong one costs time alone.
        ahead = tl.load(tile_experts + tl.program_id(0) // GROUPS, cache_modifier=".cg")
        if ahead >= 0:
            SIZE: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth // 8
            n_ahead = (tl.program_id(0) % GROUPS) * BN
            left = tl.minimum((N - n_ahead) * (K * SIZE), PREFETCH)
            place = weight + ahead.to(tl.int64) * (N * K) + n_ahead * K
            _fetch(place, left, PREFETCH, THREADS)
    pdl.wait(PDL)
    expert, group, item = _tile(order, tile_experts, GROUPS, BM)
    n = group * BN + tl.arange(0, BN)
    if expert >= 0:
        live = item >= 0
        at = tl.maximum(item, 0).to(tl.int64)
        row = tl.minimum(n, N - 1)
        own = weight + expert.to(tl.int64) * (N * K)
        acc = _grouped(x + at * K, live, own + row * K, K, BM, BN, BK, ONCE)
        if BIAS:
            acc += tl.load(bias + expert * N + row).to(tl.float32)[None, :]
        place = y + at[:, None] * N + n[None, :]
        tl.store(place, acc.to(y.dtype.element_ty), mask=live[:, None] & (n < N)[None, :])
    if ADD:
        tl.debug_barrier()  # every thread has stored before one of them says so
        others = tl.num_programs(0) // GROUPS - 1
        if tl.atomic_add(locks + group, 1, sem="acq_rel") == others:
            tl.store(locks + group, 0)
            _add_experts(y, experts, weights, stream, tokens, n, EACH, N, BN, BT)


@triton.jit
def _add_experts(
    y,
    experts,
    weights,
    stream,
    tokens,
    n,  # [BN] columns
    EACH: tl.constexpr,
    N: tl.constexpr,
    BN: tl.constexpr,
    BT: tl.constexpr,
) -> None:
    """What `combine_kernel` does, for all tokens; past the L1 cache: other programs wrote y."""
    token = tl.arange(0, BT)
    inside = (token < tokens)[:, None] & (n < N)[None, :]
    acc = tl.zeros((BT, BN), tl.float32)
    for j in tl.static_range(EACH):
        item = token * EACH + j
        there = tl.load(experts + item, mask=token < tokens, other=-1) >= 0
        weight = tl.load(weights + item, mask=token < tokens, other=0.0)
        at = item.to(tl.int64)[:, None] * N + n[None, :]
        said = tl.load(y + at, mask=inside & there[:, None], other=0.0, cache_modifier=".cg")
        acc += weight[:, None] * said.to(tl.float32)
    at = stream + token.to(tl.int64)[:, None] * N + n[None, :]
    acc += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, acc.to(stream.dtype.element_ty), mask=inside)


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
        acc += weight * tl.load(y + item * N + n, mask=inside & there, other=0.0).to(tl.float32)
    at = token * N + n
    if RESIDUAL:
        acc += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=inside)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, rows: int, plan: Dispatch) -> None:
    assert x.is_contiguous(), "x: rows lie one after another"
    assert weight.is_contiguous(), "weight: experts lie one after another"
    assert x.dtype == weight.dtype, f"x is {x.dtype}, the weight {weight.dtype}"
    assert x.shape == (rows, weight.shape[2]), (x.shape, weight.shape)
    assert plan.order.is_contiguous(), "order: tiles lie one after another"
    if bias is not None:
        check_output(bias, weight.shape[:2])


def expert_gate_up(
    x: Tensor,
    weight: Tensor,
    plan: Dispatch,
    *,
    scale: Tensor | None = None,
    bias: Tensor | None = None,
    limit: float = 0.0,
    out: Tensor,
    config: ExpertsConfig,
    with_pdl: bool = False,
) -> Tensor:
    """x [T, K], weight [E, 2 F, K], gate's rows first -> out [T * each, F], a row an assignment.

    scale [T] float32: sums of a token are multiplied by it first: what is left of a folded norm.

    silu(gate) * up; with a `limit` c, gpt-oss's: g sigmoid(1.702 g) (u + 1), where g is gate, at
    most c, and u is up within [-c, c]. bias [E, 2 F]. Summed in float32, rounded once. Rows of
    padding tokens are left as they are.
    """
    _, rows, k = weight.shape
    _check(x, weight, bias, plan.tokens, plan)
    check_output(out, (plan.tokens * plan.each, rows // 2))
    check_scale(scale, plan.tokens)
    launch(expert_gate_up_kernel, (plan.tiles * cdiv(rows, config.block_n),),
        x, plan.weights if scale is None else scale, weight, weight if bias is None else bias,
        plan.order, plan.tile_experts, out, limit,
        EACH=plan.each, FFN=rows // 2, K=k, BM=plan.tile_rows, BN=config.block_n,
        BK=columns_a_turn(x, config), ONCE=plan.tile_rows <= 16,
        SCALED=scale is not None, BIAS=bias is not None, CLAMPED=limit > 0, ALPHA=SWIGLU_ALPHA,
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
    stream: Tensor | None = None,
    workspace: Workspace | None = None,
    config: ExpertsConfig,
    with_pdl: bool = False,
) -> Tensor:
    """x [T * each, K], weight [E, N, K] -> out [T * each, N]. The rest as in `expert_gate_up`.

    stream [T, N]: gets what `combine` would give it too, in the same launch, T at most ADDED_TOKENS
    and with a workspace.
    """
    _, n, k = weight.shape
    _check(x, weight, bias, plan.tokens * plan.each, plan)
    check_output(out, (plan.tokens * plan.each, n))
    groups, locks = cdiv(n, config.block_n), plan.experts
    if stream is not None:
        assert workspace is not None, "programs that add need locks"
        assert groups <= workspace.locks.numel(), "the workspace is too small"
        assert plan.tokens <= ADDED_TOKENS, f"{plan.tokens} tokens: one program adds for all"
        check_output(stream, (plan.tokens, n))
        locks = workspace.locks
    fits = with_pdl and k * x.element_size() % 16 == 0 and weight.data_ptr() % 16 == 0
    ahead = min(config.prefetch_bytes, config.block_n * k * x.element_size())
    launch(expert_down_kernel, (plan.tiles * groups,),
        x, weight, weight if bias is None else bias, plan.order, plan.tile_experts, out,
        plan.experts, plan.weights, out if stream is None else stream, locks, plan.tokens,
        EACH=plan.each, N=n, K=k, BM=plan.tile_rows, BN=config.block_n,
        BK=columns_a_turn(x, config), ONCE=plan.tile_rows <= 16, BIAS=bias is not None,
        ADD=stream is not None, BT=4 if stream is None or plan.tokens <= 4 else ADDED_TOKENS,
        PREFETCH=ahead if fits and plan.tile_rows <= 16 else 0, THREADS=32 * config.warps,
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
