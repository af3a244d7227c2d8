"""Paged attention of decode tokens: each token is one query over the cache of its sequence.

All query heads of a KV head are one program's rows (padded to 16, the least that `tl.dot` takes),
so that K and V pass once. The keys of a token are cut into shares, one program each. How many
depends on the lengths, which only the device knows when a graph is replayed: the grid is fixed at
T + splits slots a KV head, every program reads all T positions and finds its slot's token and
share. The shares of one step are about equal in length, whatever the lengths of the sequences.

Tokens of one share are written at once. Else each program leaves a partial result (maximum,
sum, unnormalised output) in float32, and the last one of its token adds them up: flash decoding
(https://pytorch.org/blog/flash-decoding/) in one launch.

Plain reference: `attention.decode_reference`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels import pdl
from headrace.kernels.attention import LOG2E, check_layout, output_like
from headrace.kernels.attention_configs import DecodeConfig, decode_config
from headrace.kernels.columns import StepColumns
from headrace.kernels.launch import launch
from headrace.kernels.shapes import power_of_two
from headrace.kernels.soft_cap import soft_cap

_SUMMED = 8  # partial results that the last program of a token loads at a time


def most_splits(kv_heads: int, sms: int) -> int:
    """The most slots of a KV head beyond one a token that a step takes: four programs for each of
    `sms` multiprocessors. More would only cost the launch of programs that find no work.
    """
    assert min(kv_heads, sms) > 0, (kv_heads, sms)
    return max(1, -(-4 * sms // kv_heads))


def choose_splits(kv_heads: int, sms: int, tokens: int) -> int:
    """Slots of a KV head beyond one a token, for a step of `tokens` tokens.

    While tokens alone leave half the multiprocessors without a program, one program each: a step
    of few tokens waits for the launch of every program, with or without work. Else `most_splits`:
    a share is then at most what a program has when all work is dealt evenly, and one long
    sequence among many is not left to few programs.
    """
    if 2 * tokens * kv_heads <= sms:
        return max(1, sms // kv_heads)
    return most_splits(kv_heads, sms)


class Scratch:
    """Memory for partial results of one step's decode calls; the layers of a step share it.

    outputs [max_tokens + splits, heads, head_dim] float32, unnormalised;
    stats [2, max_tokens + splits, heads] float32: maximum (base 2) and sum;
    arrived [max_tokens, kv_heads] int32: programs that have left theirs; 0 between calls.
    Two calls may share it only one after the other on one stream.
    """

    def __init__(
        self,
        max_tokens: int,
        heads: int,
        head_dim: int,
        kv_heads: int,
        splits: int,
        device: torch.device,
    ) -> None:
        self.slots, self.max_tokens = max_tokens + splits, max_tokens
        self.outputs = torch.empty(self.slots, heads, head_dim, device=device)
        self.stats = torch.empty(2, self.slots, heads, device=device)
        assert self.outputs.dtype == torch.float32, "torch's default dtype was changed"
        self.arrived = torch.zeros(max_tokens, kv_heads, dtype=torch.int32, device=device)


@triton.jit
def _first_tile(n_keys, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """The tile of the oldest key that the window leaves."""
    if WINDOW > 0:
        return tl.maximum(n_keys - WINDOW, 0) // TILE
    else:
        return n_keys * 0


@triton.jit
def _seen(key, n_keys, WINDOW: tl.constexpr):
    """Whether the query, at position n_keys - 1, attends to each key."""
    if WINDOW > 0:
        return (key < n_keys) & (key >= n_keys - WINDOW)
    else:
        return key < n_keys


@triton.jit
def _find_share(
    positions,
    tokens,
    splits,
    slot,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    MIN_TILES: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """-> token of the slot (`tokens` where it has no work), its first slot, tiles a share.

    With n_t tiles of token t and s tiles a share, token t has ceil(n_t / s) slots. As
    s >= sum(n_t) / splits, these are no more than tokens + splits together.
    """
    t = tl.arange(0, TOKENS)
    n_keys = tl.load(positions + t, mask=t < tokens, other=-1, cache_modifier=".cg") + 1
    tiles = tl.cdiv(n_keys, TILE) - _first_tile(n_keys, TILE, WINDOW)
    share = tl.maximum(tl.cdiv(tl.sum(tiles, 0), splits), MIN_TILES)
    ends = tl.cumsum(tl.cdiv(tiles, share), 0)
    # Tokens whose slots end at or before this one: the last of them, with the end of its slots.
    before = (ends <= slot) & (t < tokens)
    last = tl.max(tl.where(before, (ends.to(tl.int64) << 32) | (t + 1).to(tl.int64), 0), 0)
    return (last & 0xFFFFFFFF).to(tl.int32), (last >> 32).to(tl.int32), share


@triton.jit
def _write(
    out,
    sinks,
    top,
    total,
    acc,
    heads,
    dims,
    inside,
    HAS_SINKS: tl.constexpr,
):
    """Normalise and store [rows, dims]; a sink adds to the sum, not to the output."""
    if HAS_SINKS:
        rows_inside = tl.max(inside.to(tl.int32), 1) > 0
        sink = tl.load(sinks + heads, mask=rows_inside, other=0.0).to(tl.float32) * LOG2E
        new_top = tl.maximum(top, sink)
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.exp2(sink - new_top)
        acc = acc * shrink[:, None]
    acc = acc / total[:, None]
    tl.store(out + dims, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _load_partial(tops, totals, outputs, heads, dims, within, inside):
    """Maximum, sum and output that another program left; past its L1, which may be stale."""
    top = tl.load(tops + heads, mask=within, other=-float("inf"), cache_modifier=".cg")
    total = tl.load(totals + heads, mask=within, other=0.0, cache_modifier=".cg")
    return top, total, tl.load(outputs + dims, mask=inside, other=0.0, cache_modifier=".cg")


@triton.jit
def _sum_parts(
    answer,
    sinks,
    stats,
    outputs,
    slots,
    first_slot,
    parts,
    kv_head,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    R: tl.constexpr,  # GROUP padded, where no matrix product asks for 16
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    SUMMED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Add up the partial results in slots [first_slot, first_slot + parts) and write."""
    d = tl.arange(0, D_PAD)
    r = tl.arange(0, R)
    heads = kv_head * GROUP + r
    within = r < GROUP
    inside = within[:, None] & (d < D)[None, :]
    dims = heads[:, None] * D + d[None, :]
    # Padding rows keep a maximum of 0 and a sum of 1: no number of theirs is infinite.
    top = tl.where(within, -float("inf"), 0.0)
    total = tl.where(within, 0.0, 1.0)
    acc = tl.zeros([R, D_PAD], tl.float32)
    for first in range(0, parts, SUMMED):
        for i in tl.static_range(SUMMED):  # loads of all first, then their sums
            there = first + i < parts
            left = (first_slot + first + i).to(tl.int64) * (KV_HEADS * GROUP)
            part_top, part_total, part = _load_partial(
                stats + left,
                stats + (left + slots.to(tl.int64) * (KV_HEADS * GROUP)),
                outputs + left * D,
                heads,
                dims,
                within & there,
                inside & there,
            )
            new_top = tl.maximum(top, part_top)
            weight = tl.exp2(part_top - new_top)
            shrink = tl.exp2(top - new_top)
            total = total * shrink + part_total * weight
            acc = acc * shrink[:, None] + part * weight[:, None]
            top = new_top
    _write(answer, sinks, top, total, acc, heads, dims, inside, HAS_SINKS)


@triton.jit(
    do_not_specialize=["tokens", "width", "splits", "slots"],
    do_not_specialize_on_alignment=["rows", "positions", "tables"],  # they may be slices
)
def _decode_kernel(
    q,  # [tokens, heads, D], row stride Q_STRIDE, heads contiguous
    k,  # [blocks, KV_HEADS, PAGE, D], contiguous
    v,
    out,  # [tokens, heads, D], contiguous
    rows,
    positions,
    tables,  # [rows, width]
    sinks,  # [heads]
    slopes,  # [heads] float32
    outputs,  # Scratch
    stats,
    arrived,
    scale,  # of the scores
    tokens,
    width,
    splits,
    slots,  # of the scratch
    TOKENS: tl.constexpr,  # a power of two >= tokens
    Q_STRIDE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads a KV head
    M: tl.constexpr,  # GROUP padded
    R: tl.constexpr,  # GROUP padded, where no matrix product asks for 16
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,  # keys of one turn of the loop
    MIN_TILES: tl.constexpr,
    STAGES: tl.constexpr,
    SUMMED: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl.release(PDL)
    kv_head = tl.program_id(0) % KV_HEADS
    slot = tl.program_id(0) // KV_HEADS
    # Columns of the step and tables were passed on: they are read before the wait.
    token, first_slot, share = _find_share(
        positions, tokens, splits, slot, TOKENS, TILE, MIN_TILES, WINDOW
    )
    if token >= tokens:
        pdl.wait(PDL)
    else:
        n_keys = tl.load(positions + token, cache_modifier=".cg") + 1
        table = tables + tl.load(rows + token, cache_modifier=".cg").to(tl.int64) * width
        first_tile = _first_tile(n_keys, TILE, WINDOW)
        last_tile = tl.cdiv(n_keys, TILE)
        parts = tl.cdiv(last_tile - first_tile, share)
        even_share = tl.cdiv(last_tile - first_tile, parts)  # <= share, and no short last one
        begin = first_tile + (slot - first_slot) * even_share
        end = tl.minimum(begin + even_share, last_tile)

        m = tl.arange(0, M)
        d = tl.arange(0, D_PAD)
        heads = kv_head * GROUP + m
        inside = (m < GROUP)[:, None] & (d < D)[None, :]
        # Block ids are carried a turn ahead: else loads of K and V would wait for them.
        key = begin * TILE + tl.arange(0, TILE)
        seen = _seen(key, n_keys, WINDOW)
        block = tl.load(table + key // PAGE, mask=seen, other=0, cache_modifier=".cg")
        pdl.wait(PDL)
        queries = tl.load(
            q + token.to(tl.int64) * Q_STRIDE + heads[:, None] * D + d[None, :],
            mask=inside,
            other=0.0,
        )
        top = tl.full([M], -float("inf"), tl.float32)
        total = tl.zeros([M], tl.float32)
        acc = tl.zeros([M, D_PAD], tl.float32)
        if HAS_SLOPES:
            slope = tl.load(slopes + heads, mask=m < GROUP, other=0.0) * LOG2E
        base = kv_head * (PAGE * D)
        for _ in tl.range(begin, end, num_stages=STAGES):
            line = block.to(tl.int64) * (KV_HEADS * PAGE * D) + (base + key % PAGE * D)
            offsets = line[:, None] + d[None, :]
            loaded = seen[:, None] & (d < D)[None, :]
            keys = tl.load(k + offsets, mask=loaded, other=0.0)
            values = tl.load(v + offsets, mask=loaded, other=0.0)
            scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
            if SOFTCAP > 0:
                scores = soft_cap(scores * scale, SOFTCAP) * LOG2E
            else:
                scores *= scale * LOG2E
            if HAS_SLOPES:
                scores += slope[:, None] * (key - (n_keys - 1)).to(tl.float32)[None, :]
            scores = tl.where(seen[None, :], scores, -float("inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))  # finite: every tile has a key seen
            weights = tl.exp2(scores - new_top[:, None])
            shrink = tl.exp2(top - new_top)
            total = total * shrink + tl.sum(weights, 1)
            acc = acc * shrink[:, None]
            acc = tl.dot(weights.to(values.dtype), values, acc, input_precision="ieee")
            top = new_top
            key += TILE
            seen = _seen(key, n_keys, WINDOW)
            block = tl.load(table + key // PAGE, mask=seen, other=0)

        answer = out + token.to(tl.int64) * (KV_HEADS * GROUP * D)
        dims = heads[:, None] * D + d[None, :]
        if parts == 1:
            _write(answer, sinks, top, total, acc, heads, dims, inside, HAS_SINKS)
        else:
            lines = slot * (KV_HEADS * GROUP) + heads
            tl.store(stats + lines, top, mask=m < GROUP)
            tl.store(stats + slots * (KV_HEADS * GROUP) + lines, total, mask=m < GROUP)
            tl.store(outputs + lines.to(tl.int64)[:, None] * D + d[None, :], acc, mask=inside)
            tl.debug_barrier()  # all threads have stored before one of them says so
            counter = arrived + token * KV_HEADS + kv_head
            if tl.atomic_add(counter, 1, sem="acq_rel") == parts - 1:
                tl.store(counter, 0)  # as the next call expects it
                _sum_parts(
                    answer,
                    sinks,
                    stats,
                    outputs,
                    slots,
                    first_slot,
                    parts,
                    kv_head,
                    KV_HEADS,
                    GROUP,
                    R,
                    D,
                    D_PAD,
                    SUMMED,
                    HAS_SINKS,
                )


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    columns: StepColumns,
    *,
    scale: float,
    splits: int,
    scratch: Scratch,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    out: Tensor | None = None,
    config: DecodeConfig | None = None,
) -> Tensor:
    """Token t attends to positions 0..positions[t] of row rows[t]; K and V are in the cache.

    q [T, heads, d] (heads and d contiguous); k, v [blocks, kv_heads, block_size, d], contiguous;
    `scale` multiplies the scores; `window` > 0: position p sees (p - window, p]; `softcap` c > 0:
    c * tanh(score / c); `sinks` [heads]: one more logit a head in the softmax's denominator;
    `slopes` [heads] float32: slope * (key's position - p) is added to a score (ALiBi).
    splits >= 1 as `choose_splits` says; T + splits <= scratch.slots, T <= scratch.max_tokens.
    Needs: where launches are dependent, a kernel that passes on (see `pdl`), or one that is no
    dependent launch, comes between whatever writes columns and this.
    -> out [T, heads, d], new where None. No host synchronisation; a graph may capture it.
    """
    tokens, kv_heads = q.shape[0], k.shape[1]
    check_layout(q, k, v)
    assert columns.tables.is_contiguous(), "tables layout"
    assert min(scale, splits) > 0, (scale, splits)
    assert tokens + splits <= scratch.slots, "scratch too small"
    assert tokens <= scratch.max_tokens, "scratch too small"
    out = output_like(q, out)
    config = config or decode_config(q.dtype, q.shape[2])
    use_pdl = pdl.supported(q.device)
    launch(
        _decode_kernel,
        ((tokens + splits) * kv_heads,),
        q,
        k,
        v,
        out,
        columns.rows,
        columns.positions,
        columns.tables,
        q if sinks is None else sinks,  # never read where there are none
        q if slopes is None else slopes,
        scratch.outputs,
        scratch.stats,
        scratch.arrived,
        scale,
        tokens,
        columns.tables.shape[1],
        splits,
        scratch.slots,
        TOKENS=_padded_tokens(tokens),
        **_shape(q, k),
        TILE=config.tile_keys,
        MIN_TILES=-(-config.min_share_keys // config.tile_keys),
        STAGES=config.stages,
        SUMMED=_SUMMED,
        WINDOW=window,
        SOFTCAP=softcap,
        HAS_SINKS=sinks is not None,
        HAS_SLOPES=slopes is not None,
        num_warps=config.warps,
        **pdl.options(use_pdl),
    )
    return out


def _shape(q: Tensor, k: Tensor) -> dict[str, int]:
    """The constants of a model."""
    _, heads, d = q.shape
    kv_heads, page = k.shape[1:3]
    return {
        "Q_STRIDE": q.stride(0),
        "KV_HEADS": kv_heads,
        "GROUP": heads // kv_heads,
        "M": max(16, triton.next_power_of_2(heads // kv_heads)),
        "R": triton.next_power_of_2(heads // kv_heads),
        "D": d,
        "D_PAD": max(16, triton.next_power_of_2(d)),
        "PAGE": page,
    }


def _padded_tokens(tokens: int) -> int:
    """A power of two from 16 on: few compiled variants."""
    return max(16, power_of_two(tokens))
