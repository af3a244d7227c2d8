"""Tokens in the order of their experts: what the grouped products of `experts` walk through.

Assignment a = t * each + j is the j-th expert of token t. Those of one expert stand together, token
after token, in tiles of a fixed number of rows; the last tile of an expert may be part empty. There
are as many tiles as the worst routing needs, since a captured graph's grid does not change.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels import pdl
from headrace.kernels.launch import launch
from headrace.kernels.router import Routing, route
from headrace.kernels.shapes import cdiv, check_output, power_of_two

LARGEST_TILE = 128  # rows
_ITEMS = 4096  # assignments that a program looks at in one turn


@dataclasses.dataclass(frozen=True)
class Dispatch:
    """Where the routing of one step stands, on the device.

    experts [T, each] int32, NOWHERE for padding; weights [T, each] float32;
    tile_experts [tiles] int32: the expert of each tile, -1: the tile is empty;
    order [tiles, tile_rows] int32: the assignment of each row, -1: the row is empty;
    counts [turns, bins] int32: scratch of `dispatch` for many tokens, both powers of two.
    """

    experts: Tensor
    weights: Tensor
    tile_experts: Tensor
    order: Tensor
    counts: Tensor

    @property
    def tokens(self) -> int:
        """T."""
        return self.experts.shape[0]

    @property
    def each(self) -> int:
        """Experts of one token."""
        return self.experts.shape[1]

    @property
    def tile_rows(self) -> int:
        """Rows of a tile."""
        return self.order.shape[1]

    @property
    def tiles(self) -> int:
        """Full and empty."""
        return self.order.shape[0]


def most_tiles(tokens: int, routing: Routing, tile_rows: int) -> int:
    """The tiles that the worst routing needs: each expert that is hit may leave one part empty."""
    items = tokens * routing.each
    hit = min(items, routing.total)
    return (items - hit) // tile_rows + hit


class DispatchScratch:
    """Memory for the dispatch of steps of at most `tokens` tokens, whatever their tiles' rows."""

    def __init__(self, tokens: int, routing: Routing, device: torch.device) -> None:
        items = tokens * routing.each
        most = items + min(items, routing.total)  # a tile for each, at worst
        self._routing, self._tokens = routing, tokens
        self._experts = torch.zeros(items, dtype=torch.int32, device=device)
        self._weights = torch.zeros(items, dtype=torch.float32, device=device)
        self._tiles = torch.zeros(most, dtype=torch.int32, device=device)
        rows = most_tiles(tokens, routing, LARGEST_TILE) * LARGEST_TILE
        self._order = torch.zeros(rows, dtype=torch.int32, device=device)
        shape = (_turns(items), power_of_two(routing.total))
        self._counts = torch.zeros(shape, dtype=torch.int32, device=device)

    def of(self, tokens: int, tile_rows: int) -> Dispatch:
        """For one step of them."""
        assert tokens <= self._tokens, f"{tokens} tokens, room for {self._tokens}"
        assert tile_rows <= LARGEST_TILE, f"tiles of {tile_rows} rows"
        each, tiles = self._routing.each, most_tiles(tokens, self._routing, tile_rows)
        return Dispatch(
            self._experts[: tokens * each].view(tokens, each),
            self._weights[: tokens * each].view(tokens, each),
            self._tiles[:tiles],
            self._order[: tiles * tile_rows].view(tiles, tile_rows),
            self._counts,
        )

    @property
    def size_bytes(self) -> int:
        """All of it."""
        held = (self._experts, self._weights, self._tiles, self._order, self._counts)
        return sum(t.numel() * t.element_size() for t in held)


def _turns(items: int) -> int:
    """Of that many assignments, padded: a power of two."""
    return power_of_two(cdiv(items, _ITEMS))


@triton.jit
def _place(
    expert,
    ids,  # [N], -1: none
    item,  # [N] its assignments
    first,  # the next free row of the expert
    order,
):
    own = ids == expert
    rank = tl.cumsum(own.to(tl.int32), 0) - 1
    tl.store(order + first + rank, item, mask=own)


@triton.jit
def _finish(
    expert,
    counts,  # [EP] assignments of each expert
    first_tile,
    count,
    tiles,
    tile_experts,
    order,
    BM: tl.constexpr,
    BF: tl.constexpr,
):
    """The expert's entries of tile_experts, and its empty rows; the first expert marks the empty
    tiles."""
    own_tiles = tl.cdiv(count, BM)
    row = count + tl.arange(0, BM)
    tl.store(order + first_tile * BM + row, -1, mask=row < own_tiles * BM)
    f = tl.arange(0, BF)
    for done in range(0, own_tiles, BF):
        tl.store(tile_experts + first_tile + done + f, expert, mask=done + f < own_tiles)
    if expert == 0:
        used = tl.sum(tl.cdiv(counts, BM), 0)
        for done in range(used, tiles, BF):
            tl.store(tile_experts + done + f, -1, mask=done + f < tiles)


@triton.jit
def _tallied(tally, expert, TALLY: tl.constexpr):
    """-> what the expert got so far, and how often; asked for before anything waits for it."""
    if TALLY:
        return tl.load(tally + expert), tl.load(tally + tl.num_programs(0) + expert)
    else:
        return tl.zeros((), tl.int64), tl.zeros((), tl.int64)


@triton.jit
def _tally(tally, expert, got, hits, count, TALLY: tl.constexpr):
    if TALLY:
        tl.store(tally + expert, got + count)
        tl.store(tally + tl.num_programs(0) + expert, hits + (count > 0).to(tl.int64))


@triton.jit
def _starts(expert, counts, EP: tl.constexpr, BM: tl.constexpr):
    """-> the expert's first tile, and its assignments."""
    bins = tl.arange(0, EP)
    first = tl.sum(tl.where(bins < expert, tl.cdiv(counts, BM), 0), 0)
    return first, tl.sum(tl.where(bins == expert, counts, 0), 0)


@triton.jit(do_not_specialize=["items", "tiles"])
def dispatch_kernel(
    experts,
    order,
    tile_experts,
    tally,
    items,
    tiles,
    EP: tl.constexpr,
    BM: tl.constexpr,
    BA: tl.constexpr,
    BF: tl.constexpr,
    TALLY: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (experts,): for at most BA assignments, each program looks at all."""
    pdl.release(PDL)
    expert = tl.program_id(0)
    a = tl.arange(0, BA)
    pdl.wait(PDL)
    got, hits = _tallied(tally, expert, TALLY)
    ids = tl.load(experts + a, mask=a < items, other=-1)
    counts = tl.histogram(tl.where(ids < 0, 0, ids), EP, mask=ids >= 0)
    first_tile, count = _starts(expert, counts, EP, BM)
    if count > 0:
        _place(expert, ids, a, first_tile * BM, order)
    _finish(expert, counts, first_tile, count, tiles, tile_experts, order, BM, BF)
    _tally(tally, expert, got, hits, count, TALLY)


@triton.jit(do_not_specialize=["items"])
def count_kernel(
    experts, counts, items, EP: tl.constexpr, BA: tl.constexpr, PDL: tl.constexpr
) -> None:
    """Grid (turns of BA assignments,): how many of a turn each expert gets."""
    pdl.release(PDL)
    turn = tl.program_id(0)
    a = turn * BA + tl.arange(0, BA)
    pdl.wait(PDL)
    ids = tl.load(experts + a, mask=a < items, other=-1)
    found = tl.histogram(tl.where(ids < 0, 0, ids), EP, mask=ids >= 0)
    tl.store(counts + turn * EP + tl.arange(0, EP), found)


@triton.jit(do_not_specialize=["items", "tiles", "turns"])
def place_kernel(
    experts,
    counts,
    order,
    tile_experts,
    tally,
    items,
    tiles,
    turns,
    EP: tl.constexpr,
    CP: tl.constexpr,
    BM: tl.constexpr,
    BA: tl.constexpr,
    BF: tl.constexpr,
    TALLY: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (experts, turns): places the expert's assignments of one turn."""
    pdl.release(PDL)
    expert, turn = tl.program_id(0), tl.program_id(1)
    c = tl.arange(0, CP)
    bins = tl.arange(0, EP)
    a = turn * BA + tl.arange(0, BA)
    pdl.wait(PDL)
    at = counts + c[:, None] * EP + bins[None, :]
    found = tl.load(at, mask=(c < turns)[:, None], other=0)
    totals = tl.sum(found, 0)
    first_tile, count = _starts(expert, totals, EP, BM)
    own = tl.sum(tl.where((bins == expert)[None, :], found, 0), 1)
    before = tl.sum(tl.where(c < turn, own, 0), 0)
    if tl.sum(tl.where(c == turn, own, 0), 0) > 0:
        ids = tl.load(experts + a, mask=a < items, other=-1)
        _place(expert, ids, a, first_tile * BM + before, order)
    if turn == 0:
        got, hits = _tallied(tally, expert, TALLY)
        _finish(expert, totals, first_tile, count, tiles, tile_experts, order, BM, BF)
        _tally(tally, expert, got, hits, count, TALLY)


def check_dispatch(into: Dispatch, routing: Routing, tally: Tensor | None) -> None:
    """Asserts that `into` has room for `routing`, and that `tally` is as `dispatch` has it."""
    assert into.each == routing.each, "experts of a token"
    tiles, rows = into.tiles, into.tile_rows
    assert tiles >= most_tiles(into.tokens, routing, rows), "too few tiles"
    assert rows == power_of_two(rows), "rows of a tile are a power of two"
    check_output(into.order, (tiles, rows))
    check_output(into.tile_experts, (tiles,))
    check_output(into.weights, (into.tokens, routing.each))
    if tally is not None:
        check_output(tally, (2, routing.total))
        assert tally.dtype == torch.int64, "counts since the start"


def route_and_dispatch(
    logits: Tensor,
    routing: Routing,
    into: Dispatch,
    *,
    correction: Tensor | None = None,
    rows: Tensor | None = None,
    spare: int = -1,
    tally: Tensor | None = None,
    with_pdl: bool = False,
) -> None:
    """`router.route` and `dispatch`. The fewest tokens have one launch: see `route_few`."""
    assert logits.shape[0] == into.tokens, f"{logits.shape[0]} tokens, a dispatch of {into.tokens}"
    route(
        logits, routing, correction=correction, rows=rows, spare=spare,
        experts=into.experts, weights=into.weights, with_pdl=with_pdl,
    )  # fmt: skip
    dispatch(routing, into, tally=tally, with_pdl=with_pdl)


def dispatch(
    routing: Routing, into: Dispatch, *, tally: Tensor | None = None, with_pdl: bool = False
) -> None:
    """into.experts -> into.order and into.tile_experts.

    tally [2, experts] int64: how many tokens an expert got so far, and in how many calls any.
    """
    check_dispatch(into, routing, tally)
    items = into.tokens * into.each
    common: dict[str, Any] = {"BM": into.tile_rows, "BF": 128, "TALLY": tally is not None}
    if items > _ITEMS:
        turns, (most, bins) = cdiv(items, _ITEMS), into.counts.shape
        assert turns <= most, f"{turns} turns of assignments, room for {most}"
        launch(count_kernel, (turns,),
            into.experts, into.counts, items, EP=bins, BA=_ITEMS, num_warps=8,
            **pdl.options(with_pdl),
        )  # fmt: skip
        launch(place_kernel, (routing.total, turns),
            into.experts, into.counts, into.order, into.tile_experts,
            into.experts if tally is None else tally, items, into.tiles, turns,
            EP=bins, CP=most, BA=_ITEMS, num_warps=8, **common, **pdl.options(with_pdl),
        )  # fmt: skip
        return
    block = min(_ITEMS, power_of_two(max(256, items)))  # few sizes: each is compiled
    launch(dispatch_kernel, (routing.total,),
        into.experts, into.order, into.tile_experts, into.experts if tally is None else tally,
        items, into.tiles,
        EP=power_of_two(routing.total), BA=block, num_warps=8 if block > 1024 else 4,
        **common, **pdl.options(with_pdl),
    )  # fmt: skip


def dispatch_reference(experts: Tensor, total: int, tile_rows: int) -> tuple[list[int], list[int]]:
    """experts [T, each] -> the expert of each tile in use, and the assignment of each row."""
    items = experts.reshape(-1).tolist()
    tiles: list[int] = []
    order: list[int] = []
    for expert in range(total):
        own = [a for a, found in enumerate(items) if found == expert]
        own += [-1] * (-len(own) % tile_rows)
        tiles += [expert] * (len(own) // tile_rows)
        order += own
    return tiles, order
