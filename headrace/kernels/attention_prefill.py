"""Paged attention of chunks: several new tokens of a sequence over all of its cache.

The new K and V are in the cache already. A tile holds queries times the query heads of one KV
head, flattened: no row is lost whatever the group, K and V pass once for all of them, and a chunk
of one token is a small tile like any other. Online softmax: https://arxiv.org/abs/2205.14135.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels import pdl
from headrace.kernels.attention import LOG2E, check_layout, output_like, soft_cap
from headrace.kernels.attention_configs import PrefillConfig, prefill_config
from headrace.kernels.chunks import Chunks
from headrace.kernels.launch import launch


@triton.jit
def _blocks(table, key, oldest, n_keys, PAGE: tl.constexpr):
    """Ids of the keys' blocks; 0 for keys that the tile never sees, whose ids may be stale."""
    return tl.load(table + key // PAGE, mask=(key >= oldest) & (key < n_keys), other=0)


@triton.jit
def _lines(block, key, base, BLOCK: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr):
    """Where the keys' lines of one KV head start in a cache; base: of the head in a block."""
    return block.to(tl.int64) * BLOCK + (base + key % PAGE * D)


@triton.jit
def _load(
    cache, lines, key, oldest, n_keys, MASKED: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr
):
    """[TILE, D_PAD]; MASKED: zeros for keys outside [oldest, n_keys)."""
    d = tl.arange(0, D_PAD)
    at = cache + lines[:, None] + d[None, :]
    if MASKED:
        seen = (key >= oldest) & (key < n_keys)
        return tl.load(at, mask=seen[:, None] & (d < D)[None, :], other=0.0)
    elif D < D_PAD:
        return tl.load(at, mask=(d < D)[None, :], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def _attend(
    acc,
    top,
    total,
    scores,  # of tile `begin`
    weights,  # of the tile before it, not yet in acc
    queries,
    k,
    v,
    table,
    base,  # of the KV head in a block
    query_position,
    oldest,  # keys [oldest, n_keys) are ever seen by this tile
    n_keys,
    v_block,  # blocks of the tile before `begin`, or of any tile before the first
    k_block,  # of the tile after `begin`
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
):
    """Key tiles [begin, end) for one tile of queries; not MASKED: every query sees every key.

    A turn makes the weights of tile i while the matrix units make the scores of tile i + 1; the
    weights meet V a turn later. In this order, since Triton waits for a product at its first use.
    """
    key = begin * TILE + tl.arange(0, TILE)
    for _ in tl.range(begin, end, num_stages=STAGES):
        lines = _lines(v_block, tl.maximum(key - TILE, 0), base, BLOCK, D, PAGE)
        values = _load(v, lines, key - TILE, oldest, n_keys, MASKED or WINDOW > 0, D, D_PAD)
        lines = _lines(k_block, key + TILE, base, BLOCK, D, PAGE)
        keys = _load(k, lines, key + TILE, oldest, n_keys, MASKED, D, D_PAD)
        acc = tl.dot(weights.to(values.dtype), values, acc, input_precision="ieee")
        if SOFTCAP > 0:
            scores = soft_cap(scores * scale, SOFTCAP)
            unit = LOG2E
        else:
            unit = scale * LOG2E
        if MASKED:
            seen = key[None, :] <= query_position[:, None]
            if WINDOW > 0:
                seen = seen & (key[None, :] > query_position[:, None] - WINDOW)
            scores = tl.where(seen, scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * unit)
        if MASKED and WINDOW > 0:  # a query may have seen no key yet
            finite = tl.where(new_top == -float("inf"), 0.0, new_top)
        else:
            finite = new_top
        exponents = scores * unit - finite[:, None]
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        weights = tl.exp2(exponents)
        shrink = tl.exp2(top - finite)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        top = new_top
        key += TILE
        v_block = _blocks(table, key - TILE, oldest, n_keys, PAGE)
        k_block = _blocks(table, key + TILE, oldest, n_keys, PAGE)
    return acc, top, total, scores, weights, v_block, k_block


@triton.jit(
    do_not_specialize=["width"],
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
    scale,
    width,
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
    PDL: tl.constexpr,
):
    pdl.release(PDL)
    kv_head = tl.program_id(0) % KV_HEADS
    pair = tiles + tl.program_id(0) // KV_HEADS * 2
    pdl.wait(PDL)
    chunk, tile = tl.load(pair), tl.load(pair + 1)
    if chunk < 0:
        return
    start, count = tl.load(starts + chunk), tl.load(counts + chunk)
    table = tables + tl.load(rows + chunk).to(tl.int64) * width
    first = tl.load(firsts + chunk).to(tl.int64)

    BLOCK: tl.constexpr = KV_HEADS * PAGE * D
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
        top = tl.load(sinks + head).to(tl.float32) * LOG2E
        total = tl.full([M], 1.0, tl.float32)
    else:
        top = tl.full([M], -float("inf"), tl.float32)
        total = tl.zeros([M], tl.float32)
    # Tiles [0, full_end) end before the first query; of these, all queries see those from
    # full_begin on.
    end = tl.cdiv(n_keys, TILE)
    full_end = (lowest + 1) // TILE
    full_begin = 0
    oldest = 0
    base = kv_head * (PAGE * D)
    if WINDOW > 0:
        oldest = tl.maximum(lowest + 1 - WINDOW, 0)
        full_begin = tl.cdiv(tl.maximum(n_keys - WINDOW, 0), TILE)
    first_tile = oldest // TILE
    key = first_tile * TILE + tl.arange(0, TILE)
    v_block = _blocks(table, key, oldest, n_keys, PAGE)
    k_block = _blocks(table, key + TILE, oldest, n_keys, PAGE)
    lines = _lines(v_block, key, base, BLOCK, D, PAGE)
    keys = _load(k, lines, key, oldest, n_keys, True, D, D_PAD)
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    # The first turn finds weights of zero, for values that are finite.
    weights = tl.zeros([M, TILE], tl.float32)
    if WINDOW > 0:
        edge_end = tl.minimum(full_begin, end)
        acc, top, total, scores, weights, v_block, k_block = _attend(
            acc, top, total, scores, weights, queries, k, v, table, base, query_position, oldest,
            n_keys, v_block, k_block, first_tile, edge_end, scale, True,
            BLOCK, D, D_PAD, PAGE, TILE, STAGES, WINDOW, SOFTCAP,
        )  # fmt: skip
        full_end = tl.maximum(full_end, edge_end)
    acc, top, total, scores, weights, v_block, k_block = _attend(
        acc, top, total, scores, weights, queries, k, v, table, base, query_position, oldest,
        n_keys, v_block, k_block, full_begin, full_end, scale, False,
        BLOCK, D, D_PAD, PAGE, TILE, STAGES, WINDOW, SOFTCAP,
    )  # fmt: skip
    acc, top, total, scores, weights, v_block, k_block = _attend(
        acc, top, total, scores, weights, queries, k, v, table, base, query_position, oldest,
        n_keys, v_block, k_block, full_end, end, scale, True,
        BLOCK, D, D_PAD, PAGE, TILE, STAGES, WINDOW, SOFTCAP,
    )  # fmt: skip
    key = (end - 1) * TILE + tl.arange(0, TILE)
    lines = _lines(v_block, key, base, BLOCK, D, PAGE)
    values = _load(v, lines, key, oldest, n_keys, True, D, D_PAD)
    acc = tl.dot(weights.to(values.dtype), values, acc, input_precision="ieee")
    acc = acc / total[:, None]
    tl.store(
        out + (first + query)[:, None] * (KV_HEADS * GROUP * D) + head[:, None] * D + d[None, :],
        acc.to(out.dtype.element_ty),
        mask=inside,
    )


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: Tensor,
    chunks: Chunks,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    config: PrefillConfig | None = None,
) -> Tensor:
    """Token j of a chunk attends to positions 0..start + j of its row; K and V are in the cache.

    q [T, heads, d] (heads and d contiguous); k, v [blocks, kv_heads, block_size, d], contiguous;
    tables [rows, width] int32. `scale`, `window`, `softcap`, `sinks` as in `decode`.
    chunks.tile_rows is the configuration's. -> out [T, heads, d], new where None; tokens of no
    chunk are left as they are. No host synchronisation.
    """
    check_layout(q, k, v)
    assert tables.is_contiguous(), "tables layout"
    assert scale > 0, scale
    _, heads, d = q.shape
    kv_heads, page = k.shape[1:3]
    config = config or prefill_config(q.dtype, d)
    assert chunks.tile_rows == config.rows, (chunks.tile_rows, config)
    out = output_like(q, out)
    launch(
        _prefill_kernel,
        (chunks.tiles.shape[0] * kv_heads,),
        q,
        k,
        v,
        out,
        chunks.rows,
        chunks.starts,
        chunks.counts,
        chunks.firsts,
        chunks.tiles,
        tables,
        q if sinks is None else sinks,  # never read where there are none
        scale,
        tables.shape[1],
        Q_STRIDE=q.stride(0),
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        M=config.rows,
        D=d,
        D_PAD=max(16, triton.next_power_of_2(d)),
        PAGE=page,
        TILE=config.tile_keys,
        STAGES=config.stages,
        WINDOW=window,
        SOFTCAP=softcap,
        HAS_SINKS=sinks is not None,
        num_warps=config.warps,
        **pdl.options(pdl.supported(q.device)),
    )
    return out
