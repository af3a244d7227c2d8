"""Paged attention of chunks in the latent space: queries times heads, flattened, over one line a
token, whose first numbers are its value too. As `attention_prefill`, whose parts it shares: for
chunks in a captured graph, and for contexts that nobody has room to expand (`latent_dense`).
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels import pdl
from headrace.kernels.attention import LOG2E
from headrace.kernels.attention_prefill import PrefillScratch, _leave, _sum_parts, padded_dim
from headrace.kernels.chunks import TILE_WORDS, Chunks
from headrace.kernels.latent import LatentShape
from headrace.kernels.latent_decode import check_lines, latent_reference
from headrace.kernels.launch import launch
from headrace.kernels.shapes import check_output


@dataclasses.dataclass(frozen=True)
class LatentPrefillConfig:
    """rows: queries times heads of one program; tile_keys: keys a turn of the loop."""

    rows: int
    tile_keys: int
    warps: int
    stages: int


def latent_prefill_config(dtype: torch.dtype) -> LatentPrefillConfig:
    """Sums of 64 rows and 512 numbers fill half of the registers; lines, most shared memory."""
    if dtype == torch.float32:
        return LatentPrefillConfig(16, 16, 4, 2)
    return LatentPrefillConfig(64, 32, 8, 3)


@triton.jit(
    do_not_specialize=["width", "slots"],
    do_not_specialize_on_alignment=["rows", "starts", "counts", "firsts", "tiles", "tables"],
)
def latent_prefill_kernel(
    q,  # [tokens, HEADS, RANK + ROPE], contiguous
    cache,  # [blocks, 1, PAGE, RANK + ROPE], contiguous
    out,  # [tokens, HEADS, RANK], contiguous
    rows,  # Chunks
    starts,
    counts,
    firsts,
    tiles,
    tables,  # [rows, width]
    outputs,  # PrefillScratch
    stats,
    arrived,
    scale,
    width,
    slots,
    HEADS: tl.constexpr,
    M: tl.constexpr,  # rows of a tile
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BR: tl.constexpr,
    BP: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    WORDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (tiles,)."""
    pdl.release(PDL)
    words = tiles + tl.program_id(0) * WORDS
    pdl.wait(PDL)
    chunk, tile = tl.load(words), tl.load(words + 1)
    if chunk < 0:
        return
    part, parts, slot = tl.load(words + 2), tl.load(words + 3), tl.load(words + 4)
    start, count = tl.load(starts + chunk), tl.load(counts + chunk)
    table = tables + tl.load(rows + chunk).to(tl.int64) * width
    first = tl.load(firsts + chunk).to(tl.int64)

    m = tile * M + tl.arange(0, M)
    r = tl.arange(0, BR)
    p = tl.arange(0, BP)
    query = m // HEADS
    inside = (query < count)[:, None]
    line = ((first + query) * HEADS + m % HEADS)[:, None]
    source = q + line * (RANK + ROPE)
    latent_q = tl.load(source + r[None, :], mask=inside & (r < RANK)[None, :], other=0.0)
    rope_q = tl.load(source + RANK + p[None, :], mask=inside & (p < ROPE)[None, :], other=0.0)
    query_position = start + tl.minimum(query, count - 1)
    n_keys = start + tl.minimum((tile * M + M - 1) // HEADS, count - 1) + 1

    acc = tl.zeros([M, BR], tl.float32)
    top = tl.full([M], -float("inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    key_tiles = tl.cdiv(n_keys, TILE)
    begin = part * key_tiles // parts
    end = (part + 1) * key_tiles // parts
    key = begin * TILE + tl.arange(0, TILE)
    unit = scale * LOG2E
    # Block ids are carried a turn ahead: else loads of lines would wait for them.
    block = tl.load(table + key // PAGE, mask=key < n_keys, other=0)
    for _ in tl.range(begin, end, num_stages=STAGES):
        there = (key < n_keys)[:, None]
        at = cache + (block.to(tl.int64) * PAGE + key % PAGE)[:, None] * (RANK + ROPE)
        latent = tl.load(at + r[None, :], mask=there & (r < RANK)[None, :], other=0.0)
        rope = tl.load(at + RANK + p[None, :], mask=there & (p < ROPE)[None, :], other=0.0)
        scores = tl.dot(rope_q, tl.trans(rope), input_precision="ieee")
        scores = tl.dot(latent_q, tl.trans(latent), scores, input_precision="ieee")
        scores = tl.where(key[None, :] <= query_position[:, None], scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * unit)
        # A query may have seen no key of this part yet.
        finite = tl.where(new_top == -float("inf"), 0.0, new_top)
        weights = tl.exp2(scores * unit - finite[:, None])
        shrink = tl.exp2(top - finite)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(latent.dtype), latent, acc, input_precision="ieee")
        top = new_top
        key += TILE
        block = tl.load(table + key // PAGE, mask=key < n_keys, other=0)
    answer = out + line * RANK + r[None, :]
    mask = inside & (r < RANK)[None, :]
    if parts == 1:
        tl.store(answer, (acc / total[:, None]).to(out.dtype.element_ty), mask=mask)
    else:
        _leave(outputs, stats, slots, slot + part, acc, top, total, 1, M, BR)
        tl.debug_barrier()  # all threads have stored before one of them says so
        if tl.atomic_add(arrived + slot, 1, sem="acq_rel") == parts - 1:
            tl.store(arrived + slot, 0)  # as the next call expects it
            total, acc = _sum_parts(outputs, stats, slots, slot, parts, 1, M, BR)
            tl.store(answer, (acc / total[:, None]).to(out.dtype.element_ty), mask=mask)


def latent_prefill(
    q: Tensor,
    cache: Tensor,
    tables: Tensor,
    chunks: Chunks,
    shape: LatentShape,
    *,
    scale: float,
    scratch: PrefillScratch,
    out: Tensor,
    config: LatentPrefillConfig | None = None,
    with_pdl: bool = False,
) -> Tensor:
    """Token j of a chunk attends to positions 0..start + j of its row, whose lines the cache has.

    q [T, heads, rank + rope]; cache [blocks, 1, block_size, rank + rope] -> out [T, heads, rank];
    tokens of no chunk are left as they are. The chunks' tiling has group = heads, kv_heads = 1 and
    the configuration's rows; the scratch is made for it and a head_dim of rank.
    """
    tokens = q.shape[0]
    check_output(q, (tokens, shape.heads, shape.line))
    check_output(out, (tokens, shape.heads, shape.rank))
    assert cache.is_contiguous(), "cache layout"
    assert cache.shape[1::2] == (1, shape.line), "cache: one line a token"
    check_lines(cache)
    assert tables.is_contiguous(), "tables layout"
    assert scale > 0, scale
    config = config or latent_prefill_config(q.dtype)
    assert chunks.tile_rows == config.rows, (chunks.tile_rows, config)
    width = padded_dim(shape.rank)
    assert scratch.outputs.shape[1:] == (1, config.rows, width), "scratch of another"
    launch(latent_prefill_kernel, (chunks.tiles.shape[0],),
        q, cache, out, chunks.rows, chunks.starts, chunks.counts, chunks.firsts, chunks.tiles,
        tables, scratch.outputs, scratch.stats, scratch.arrived,
        scale, tables.shape[1], scratch.slots,
        HEADS=shape.heads, M=config.rows, RANK=shape.rank, ROPE=shape.rope, BR=width,
        BP=padded_dim(shape.rope), PAGE=cache.shape[2], TILE=config.tile_keys,
        STAGES=config.stages, WORDS=TILE_WORDS, num_warps=config.warps, **pdl.options(with_pdl),
    )  # fmt: skip
    return out


def latent_prefill_reference(
    q: Tensor, cache: Tensor, tables: Tensor, chunks: Chunks, shape: LatentShape, *, scale: float
) -> Tensor:
    """The same, chunk by chunk, in float64; NaN elsewhere."""
    out = torch.full(
        (q.shape[0], shape.heads, shape.rank), torch.nan, dtype=torch.float64, device=q.device
    )
    columns = (chunks.rows, chunks.starts, chunks.counts, chunks.firsts)
    for row, start, count, first in zip(*(x.tolist() for x in columns), strict=True):
        blocks = tables[row, : (start + count - 1) // cache.shape[2] + 1].long()
        lines = cache[blocks, 0].flatten(0, 1)[: start + count]
        own = slice(first, first + count)
        out[own] = latent_reference(q[own], lines, start, shape, scale=scale)
    return out
