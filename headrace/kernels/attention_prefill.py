"""Paged attention of chunks: several new tokens of a sequence over all of its cache.

The new K and V are in the cache already. A tile holds queries times the query heads of one KV
head, flattened: no row is lost whatever the group, K and V pass once for all of them, and a chunk
of one token is a small tile like any other. Online softmax: https://arxiv.org/abs/2205.14135.

Tiles that would keep a few multiprocessors busy while the rest of the card has no work left are cut
into parts of their keys by the plan (`chunks.choose_parts`): each program leaves a partial result
(maximum, sum, unnormalised output) in float32, the last one of its tile adds them up.

Plain reference: `attention.prefill_reference`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels import pdl
from headrace.kernels.attention import LOG2E, check_layout, output_like
from headrace.kernels.attention_configs import PrefillConfig, prefill_config
from headrace.kernels.chunks import TILE_WORDS, Chunks, Tiling
from headrace.kernels.launch import launch
from headrace.kernels.shapes import power_of_two
from headrace.kernels.soft_cap import soft_cap


@triton.jit
def _attend(
    acc,
    top,
    total,
    queries,
    slope,  # [M], of each row's head
    k,
    v,
    table,
    base,  # of the KV head in a block
    query_position,
    oldest,  # keys [oldest, n_keys) are ever seen by this tile
    n_keys,
    begin,
    end,
    scale,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,  # elements of a block
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
):
    """Key tiles [begin, end) for one tile of queries; not MASKED: every query sees every key."""
    d = tl.arange(0, D_PAD)
    key = begin * TILE + tl.arange(0, TILE)
    # Block ids are carried a turn ahead: else loads of K and V would wait for them.
    block = tl.load(table + key // PAGE, mask=(key >= oldest) & (key < n_keys), other=0)
    for _ in tl.range(begin, end, num_stages=STAGES):
        line = block.to(tl.int64) * BLOCK + (base + key % PAGE * D)
        offsets = line[:, None] + d[None, :]
        if MASKED:
            loaded = ((key >= oldest) & (key < n_keys))[:, None] & (d < D)[None, :]
            keys = tl.load(k + offsets, mask=loaded, other=0.0)
            values = tl.load(v + offsets, mask=loaded, other=0.0)
        elif D < D_PAD:
            loaded = (d < D)[None, :]
            keys = tl.load(k + offsets, mask=loaded, other=0.0)
            values = tl.load(v + offsets, mask=loaded, other=0.0)
        else:
            keys = tl.load(k + offsets)
            values = tl.load(v + offsets)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        if SOFTCAP > 0:
            scores = soft_cap(scores * scale, SOFTCAP)
            unit = LOG2E
        elif HAS_SLOPES:
            scores *= scale
            unit = LOG2E
        else:
            unit = scale * LOG2E
        if HAS_SLOPES:
            scores += slope[:, None] * (key[None, :] - query_position[:, None]).to(tl.float32)
        if MASKED:
            seen = key[None, :] <= query_position[:, None]
            if WINDOW > 0:
                seen = seen & (key[None, :] > query_position[:, None] - WINDOW)
            scores = tl.where(seen, scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * unit)
        if MASKED:  # a query may have seen no key yet: of this part, or of a window
            finite = tl.where(new_top == -float("inf"), 0.0, new_top)
        else:
            finite = new_top
        weights = tl.exp2(scores * unit - finite[:, None])
        shrink = tl.exp2(top - finite)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(values.dtype), values, acc, input_precision="ieee")
        top = new_top
        key += TILE
        block = tl.load(table + key // PAGE, mask=(key >= oldest) & (key < n_keys), other=0)
    return acc, top, total


@triton.jit
def _leave(
    outputs,  # PrefillScratch
    stats,
    slots,
    at,  # index of the part and KV head
    acc,
    top,
    total,
    KV_HEADS: tl.constexpr,
    M: tl.constexpr,
    D_PAD: tl.constexpr,
):
    m = tl.arange(0, M)
    line = at.to(tl.int64) * M + m
    tl.store(stats + line, top)
    tl.store(stats + slots.to(tl.int64) * (KV_HEADS * M) + line, total)
    tl.store(outputs + line[:, None] * D_PAD + tl.arange(0, D_PAD)[None, :], acc)


@triton.jit
def _sum_parts(
    outputs,
    stats,
    slots,
    at,  # of the first part; the parts of one KV head lie KV_HEADS apart
    parts,
    KV_HEADS: tl.constexpr,
    M: tl.constexpr,
    D_PAD: tl.constexpr,
):
    """-> sum and unnormalised output of all keys. Loads pass the L1, which may be stale."""
    m = tl.arange(0, M)
    top = tl.full([M], -float("inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D_PAD], tl.float32)
    for part in range(parts):
        line = (at + part * KV_HEADS).to(tl.int64) * M + m
        one_top = tl.load(stats + line, cache_modifier=".cg")
        one_total = tl.load(
            stats + slots.to(tl.int64) * (KV_HEADS * M) + line, cache_modifier=".cg"
        )
        one = tl.load(
            outputs + line[:, None] * D_PAD + tl.arange(0, D_PAD)[None, :], cache_modifier=".cg"
        )
        new_top = tl.maximum(top, one_top)
        finite = tl.where(new_top == -float("inf"), 0.0, new_top)
        shrink = tl.exp2(top - finite)
        weight = tl.exp2(one_top - finite)
        total = total * shrink + one_total * weight
        acc = acc * shrink[:, None] + one * weight[:, None]
        top = new_top
    return total, acc


@triton.jit(
    do_not_specialize=["width", "slots"],
    do_not_specialize_on_alignment=["rows", "starts", "counts", "firsts", "tiles", "tables"],
)
def _prefill_kernel(
    q,  # [tokens, heads, D], row stride Q_STRIDE, heads contiguous
    k,  # [blocks, KV_HEADS, PAGE, D], contiguous
    v,
    out,  # [tokens, heads, D], contiguous
    rows,  # Chunks
    starts,
    counts,
    firsts,
    tiles,
    tables,  # [rows, width]
    sinks,  # [heads]
    slopes,  # [heads] float32
    outputs,  # PrefillScratch
    stats,
    arrived,
    scale,
    width,
    slots,  # of the scratch
    Q_STRIDE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    M: tl.constexpr,  # rows of a tile
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,  # keys of one turn of the loop
    STAGES: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    WORDS: tl.constexpr,  # of a tile
    PDL: tl.constexpr,
):
    pdl.release(PDL)
    kv_head = tl.program_id(0) % KV_HEADS
    words = tiles + tl.program_id(0) // KV_HEADS * WORDS
    pdl.wait(PDL)
    chunk, tile = tl.load(words), tl.load(words + 1)
    if chunk < 0:
        return
    part, parts, slot = tl.load(words + 2), tl.load(words + 3), tl.load(words + 4)
    start, count = tl.load(starts + chunk), tl.load(counts + chunk)
    table = tables + tl.load(rows + chunk).to(tl.int64) * width
    first = tl.load(firsts + chunk).to(tl.int64)

    m = tile * M + tl.arange(0, M)
    d = tl.arange(0, D_PAD)
    query = m // GROUP
    head = kv_head * GROUP + m % GROUP
    inside = (query < count)[:, None] & (d < D)[None, :]
    queries = tl.load(
        q + (first + query)[:, None] * Q_STRIDE + head[:, None] * D + d[None, :],
        mask=inside,
        other=0.0,
    )
    query_position = start + tl.minimum(query, count - 1)
    lowest = start + tile * M // GROUP  # position of the tile's first query
    n_keys = start + tl.minimum((tile * M + M - 1) // GROUP, count - 1) + 1

    acc = tl.zeros([M, D_PAD], tl.float32)
    if HAS_SINKS:  # as a key seen before all others, with a value of zero
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        top = tl.where(part == 0, sink, -float("inf"))
        total = tl.where(part == 0, tl.full([M], 1.0, tl.float32), 0.0)
    else:
        top = tl.full([M], -float("inf"), tl.float32)
        total = tl.zeros([M], tl.float32)
    if HAS_SLOPES:
        slope = tl.load(slopes + head)
    else:
        slope = top  # never read
    # Tiles [0, full_end) end before the first query; of these, all queries see those from
    # full_begin on. Of all three kinds, those in [begin, end) are this part's.
    full_begin = 0
    oldest = 0
    base = kv_head * (PAGE * D)
    if WINDOW > 0:
        oldest = tl.maximum(lowest + 1 - WINDOW, 0)
        full_begin = tl.cdiv(tl.maximum(n_keys - WINDOW, 0), TILE)
    key_tiles = tl.cdiv(n_keys, TILE) - oldest // TILE
    begin = oldest // TILE + part * key_tiles // parts
    end = oldest // TILE + (part + 1) * key_tiles // parts
    full_begin = tl.minimum(tl.maximum(full_begin, begin), end)
    full_end = tl.minimum(tl.maximum((lowest + 1) // TILE, full_begin), end)
    if WINDOW > 0:
        acc, top, total = _attend(
            acc, top, total, queries, slope, k, v, table, base, query_position, oldest, n_keys,
            begin, full_begin, scale, True,
            KV_HEADS * PAGE * D, D, D_PAD, PAGE, TILE, STAGES, WINDOW, SOFTCAP,
        HAS_SLOPES,
        )  # fmt: skip
    acc, top, total = _attend(
        acc, top, total, queries, slope, k, v, table, base, query_position, oldest, n_keys,
        full_begin, full_end, scale, False,
        KV_HEADS * PAGE * D, D, D_PAD, PAGE, TILE, STAGES, WINDOW, SOFTCAP,
        HAS_SLOPES,
    )  # fmt: skip
    acc, top, total = _attend(
        acc, top, total, queries, slope, k, v, table, base, query_position, oldest, n_keys,
        full_end, end, scale, True,
        KV_HEADS * PAGE * D, D, D_PAD, PAGE, TILE, STAGES, WINDOW, SOFTCAP,
        HAS_SLOPES,
    )  # fmt: skip
    answer = (
        out + (first + query)[:, None] * (KV_HEADS * GROUP * D) + head[:, None] * D + d[None, :]
    )
    if parts == 1:
        tl.store(answer, (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)
    else:
        at = slot * KV_HEADS + kv_head
        _leave(outputs, stats, slots, at + part * KV_HEADS, acc, top, total, KV_HEADS, M, D_PAD)
        tl.debug_barrier()  # all threads have stored before one of them says so
        if tl.atomic_add(arrived + at, 1, sem="acq_rel") == parts - 1:
            tl.store(arrived + at, 0)  # as the next call expects it
            total, acc = _sum_parts(outputs, stats, slots, at, parts, KV_HEADS, M, D_PAD)
            tl.store(answer, (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)


class PrefillScratch:
    """Memory for partial results of the parts of one plan; the layers of a step share it.

    outputs [slots, kv_heads, rows, padded head_dim] float32, unnormalised; stats [2, slots,
    kv_heads, rows] float32: maximum (base 2) and sum; arrived [slots, kv_heads] int32: programs
    that have left theirs; 0 between calls. Two calls may share it only one after the other.
    """

    def __init__(self, tiling: Tiling, head_dim: int, device: torch.device) -> None:
        self.slots = max(1, tiling.max_parts)
        shape = (self.slots, tiling.kv_heads, tiling.rows)
        self.outputs = torch.empty(*shape, padded_dim(head_dim), device=device)
        self.stats = torch.empty(2, *shape, device=device)
        assert self.outputs.dtype == torch.float32, "torch's default dtype was changed"
        self.arrived = torch.zeros(shape[:2], dtype=torch.int32, device=device)


def padded_dim(head_dim: int) -> int:
    """As `tl.dot` wants it."""
    return max(16, power_of_two(head_dim))


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: Tensor,
    chunks: Chunks,
    *,
    scale: float,
    scratch: PrefillScratch,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    out: Tensor | None = None,
    config: PrefillConfig | None = None,
) -> Tensor:
    """Token j of a chunk attends to positions 0..start + j of its row; K and V are in the cache.

    q [T, heads, d] (heads and d contiguous); k, v [blocks, kv_heads, block_size, d], contiguous;
    tables [rows, width] int32. `scale`, `window`, `softcap`, `sinks`, `slopes` as in `decode`.
    chunks.tile_rows is the configuration's; the scratch is made for the plan's tiling.
    -> out [T, heads, d], new where None; tokens of no
    chunk are left as they are. No host synchronisation.
    """
    check_layout(q, k, v)
    assert tables.is_contiguous(), "tables layout"
    assert scale > 0, scale
    _, heads, d = q.shape
    kv_heads, page = k.shape[1:3]
    config = config or prefill_config(q.dtype, d)
    assert chunks.tile_rows == config.rows, (chunks.tile_rows, config)
    assert scratch.outputs.shape[1:] == (kv_heads, config.rows, padded_dim(d)), "scratch of another"
    out = output_like(q, out)
    launch(
        _prefill_kernel,
        (chunks.tiles.shape[0] * kv_heads,),
        q,
        k,
        v,
        out,
        *(chunks.rows, chunks.starts, chunks.counts, chunks.firsts, chunks.tiles),
        tables,
        q if sinks is None else sinks,  # never read where there are none
        q if slopes is None else slopes,
        scratch.outputs,
        scratch.stats,
        scratch.arrived,
        scale,
        tables.shape[1],
        scratch.slots,
        Q_STRIDE=q.stride(0),
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        M=config.rows,
        D=d,
        D_PAD=padded_dim(d),
        PAGE=page,
        TILE=config.tile_keys,
        STAGES=config.stages,
        WINDOW=window,
        SOFTCAP=softcap,
        HAS_SINKS=sinks is not None,
        HAS_SLOPES=slopes is not None,
        WORDS=TILE_WORDS,
        num_warps=config.warps,
        **pdl.options(pdl.supported(q.device)),
    )
    return out
