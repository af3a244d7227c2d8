"""Routing of few tokens in one launch: the router's product, the choice, the order by experts.

A layer of few tokens waits for each small kernel before it may read an expert. Here the router's
matrix is split over programs, and the last of them to arrive does what is left: it adds the parts,
chooses, and writes what `dispatch` would.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels import pdl
from headrace.kernels.dispatch import Dispatch, check_dispatch
from headrace.kernels.launch import launch
from headrace.kernels.product import Workspace
from headrace.kernels.router import Routing, choose, constants, living
from headrace.kernels.shapes import cdiv, check_output, power_of_two

FEW_TOKENS = 4  # one program chooses for all of them
_ROWS = 16  # of the router's matrix, a program
_FILLED = 1024  # entries that are emptied in one turn


@triton.jit
def _order(
    live,  # [BT]
    places,  # [BT, EP] of `choose`
    order,
    tile_experts,
    tally,
    tiles,
    E: tl.constexpr,
    TOP: tl.constexpr,
    SHARED: tl.constexpr,
    BT: tl.constexpr,
    EP: tl.constexpr,
    BM: tl.constexpr,
    BF: tl.constexpr,
    TALLY: tl.constexpr,
) -> None:
    """What `dispatch` writes, by one program: experts in their order, each expert's tokens too."""
    MOST: tl.constexpr = (BT + BM - 1) // BM  # tiles of one expert
    token = tl.arange(0, BT)
    expert = tl.arange(0, EP)
    hit = (places >= 0).to(tl.int32)
    count = tl.sum(hit, 0)
    own = tl.cdiv(count, BM)
    first = tl.cumsum(own, 0) - own
    routed = tl.sum(own, 0)
    present = live.to(tl.int32)
    everyone = tl.sum(present, 0)
    shared = tl.cdiv(everyone, BM)  # tiles of each shared expert
    used = routed + SHARED * shared
    f = tl.arange(0, BF)
    for done in range(0, used * BM, BF):
        tl.store(order + done + f, -1, mask=done + f < used * BM)
    for done in range(used, tiles, BF):
        tl.store(tile_experts + done + f, -1, mask=done + f < tiles)
    tl.debug_barrier()  # all is emptied before a thread fills what another emptied
    rank = tl.cumsum(hit, 0) - 1
    item = token[:, None] * (TOP + SHARED) + places
    tl.store(order + first[None, :] * BM + rank, item, mask=places >= 0)
    for i in tl.static_range(MOST):
        tl.store(tile_experts + first + i, expert, mask=own > i)
    place = tl.cumsum(present, 0) - 1
    for j in tl.static_range(SHARED):
        base = routed + j * shared
        item = token * (TOP + SHARED) + TOP + j
        tl.store(order + base * BM + place, item, mask=live)
        for i in tl.static_range(MOST):
            if i < shared:
                tl.store(tile_experts + base + i, E + j)
        if TALLY:
            tl.store(tally + E + j, tl.load(tally + E + j) + everyone)
            at = tally + 2 * E + SHARED + j
            tl.store(at, tl.load(at) + (everyone > 0).to(tl.int64))
    if TALLY:
        inside = expert < E
        at = tally + expert
        tl.store(at, tl.load(at, mask=inside, other=0) + count, mask=inside)
        at += E + SHARED
        hits = tl.load(at, mask=inside, other=0) + (count > 0).to(tl.int64)
        tl.store(at, hits, mask=inside)


@triton.jit(do_not_specialize=["tokens", "spare", "tiles"], do_not_specialize_on_alignment=["rows"])
def route_few_kernel(
    x,
    weight,
    bias,
    correction,
    rows,
    partials,
    lock,
    experts,
    weights,
    order,
    tile_experts,
    tally,
    tokens,
    spare,
    tiles,
    K: tl.constexpr,
    SPLIT: tl.constexpr,
    BIAS: tl.constexpr,
    E: tl.constexpr,
    TOP: tl.constexpr,
    SHARED: tl.constexpr,
    SIGMOID: tl.constexpr,
    CORRECTED: tl.constexpr,
    RENORMALISE: tl.constexpr,
    SCALE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    PAIRS: tl.constexpr,
    PADDED: tl.constexpr,
    EP: tl.constexpr,
    KP: tl.constexpr,
    GP: tl.constexpr,
    BT: tl.constexpr,  # tokens, padded
    BX: tl.constexpr,  # the same, at least 16: what a matrix unit takes
    BN: tl.constexpr,
    BK: tl.constexpr,
    BM: tl.constexpr,
    BF: tl.constexpr,
    TALLY: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (groups of BN experts, SPLIT): a program has BK columns of BN rows of the matrix."""
    pdl.release(PDL)
    group, part = tl.program_id(0), tl.program_id(1)
    column = part * BK + tl.arange(0, BK)
    n = group * BN + tl.arange(0, BN)
    line = tl.arange(0, BX)
    inside = column < K
    w = tl.load(
        weight + n[None, :] * K + column[:, None],
        mask=(n < E)[None, :] & inside[:, None],
        other=0.0,
    )
    pdl.wait(PDL)
    a = tl.load(
        x + line[:, None] * K + column[None, :],
        mask=(line < tokens)[:, None] & inside[None, :],
        other=0.0,
    )
    acc = tl.dot(a, w, input_precision="ieee")
    tl.store(partials + (part * BX + line[:, None]) * EP + n[None, :], acc, mask=(n < EP)[None, :])
    tl.debug_barrier()  # every thread has stored before one of them says so
    others = tl.num_programs(0) * SPLIT - 1
    if tl.atomic_add(lock, 1, sem="acq_rel") == others:
        tl.store(lock, 0)  # as the next call expects it
        token = tl.arange(0, BT)
        expert = tl.arange(0, EP)
        there = token < tokens
        z = tl.zeros((BT, EP), tl.float32)
        for i in tl.static_range(SPLIT):
            at = (i * BX + token[:, None]) * EP + expert[None, :]
            z += tl.load(partials + at, mask=there[:, None], other=0.0, cache_modifier=".cg")
        if BIAS:
            z += tl.load(bias + expert, mask=expert < E, other=0.0).to(tl.float32)[None, :]
        live = living(rows, spare, token, tokens, PADDED)
        ids, factors, places = choose(
            z, correction, live,
            E, TOP, SHARED, SIGMOID, CORRECTED, RENORMALISE, SCALE,
            GROUPS, TOP_GROUPS, PAIRS, BT, EP, KP, GP,
        )  # fmt: skip
        k = tl.arange(0, KP)
        item = token[:, None] * (TOP + SHARED) + k[None, :]
        mask = there[:, None] & (k < TOP + SHARED)[None, :]
        tl.store(experts + item, ids, mask=mask)
        tl.store(weights + item, factors, mask=mask)
        _order(
            live, places, order, tile_experts, tally, tiles,
            E, TOP, SHARED, BT, EP, BM, BF, TALLY,
        )  # fmt: skip


def route_few(
    x: Tensor,
    weight: Tensor,
    routing: Routing,
    into: Dispatch,
    *,
    bias: Tensor | None = None,
    correction: Tensor | None = None,
    rows: Tensor | None = None,
    spare: int = -1,
    tally: Tensor | None = None,
    workspace: Workspace,
    with_pdl: bool = False,
) -> None:
    """x [T, K], T at most FEW_TOKENS, weight [E, K] -> all of `into`, as `dispatch` leaves it.

    bias [E]; correction, rows, spare and tally as in `dispatch.route_and_dispatch`. Logits are
    summed in float32.
    """
    (tokens, k), count = x.shape, routing.experts
    assert 1 <= tokens <= FEW_TOKENS, f"{tokens} tokens: one program orders {FEW_TOKENS} at most"
    assert tokens == into.tokens, f"{tokens} tokens, a dispatch of {into.tokens}"
    assert x.dtype == weight.dtype, f"x is {x.dtype}, the weight {weight.dtype}"
    check_output(x, (tokens, k))
    check_output(weight, (count, k))
    check_dispatch(into, routing, tally)
    for tensor, shape in ((bias, (count,)), (correction, (count,))):
        if tensor is not None:
            check_output(tensor, shape)
    if rows is not None:
        assert rows.shape == (tokens,), "a row a token"
        assert rows.dtype == torch.int32, "rows are int32"
    columns = min(power_of_two(max(16, k)), 512 if x.element_size() == 2 else 128)
    split, experts_padded = cdiv(k, columns), power_of_two(count)
    assert split * 16 * experts_padded <= workspace.partials.numel(), "no room for parts"
    launch(route_few_kernel, (cdiv(count, _ROWS), split),
        x, weight, x if bias is None else bias, x if correction is None else correction,
        into.experts if rows is None else rows,
        workspace.partials, workspace.locks,
        into.experts, into.weights, into.order, into.tile_experts,
        into.experts if tally is None else tally,
        tokens, spare, into.tiles, K=k, SPLIT=split, BIAS=bias is not None,
        **constants(routing, correction, rows), BT=FEW_TOKENS, BX=16,
        BN=_ROWS, BK=columns, BM=into.tile_rows, BF=_FILLED, TALLY=tally is not None,
        num_warps=4, **pdl.options(with_pdl),
    )  # fmt: skip


def logits_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[T, E] in float64; `router.route_reference` has the rest."""
    logits = x.double() @ weight.double().T
    return logits if bias is None else logits + bias.double()
