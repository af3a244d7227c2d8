"""Attention of chunks over keys and values made anew from the latent, for many queries at once.

The lines of each chunk's context are gathered side by side, one matrix product (the library's)
makes every head's keys and values of them, and then it is flash attention: queries and keys have
nope + rope numbers (the rotated part of a key is all heads' and stays in the line) and values
have dv: a third of the work of attending in the latent space.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels import pdl
from headrace.kernels.attention import LOG2E
from headrace.kernels.attention_prefill import padded_dim
from headrace.kernels.chunks import TILE_WORDS, Chunks
from headrace.kernels.latent import LatentShape, up_parts
from headrace.kernels.latent_decode import check_lines
from headrace.kernels.launch import launch
from headrace.kernels.shapes import cdiv, check_output, power_of_two

_GATHERED = 32  # lines of one program


@dataclasses.dataclass(frozen=True)
class LatentDenseConfig:
    """rows: queries of one program; tile_keys: keys a turn of the loop."""

    rows: int
    tile_keys: int
    warps: int
    stages: int


LATENT_DENSE_CANDIDATES = (
    LatentDenseConfig(128, 64, 8, 3),
    LatentDenseConfig(128, 64, 8, 2),
    LatentDenseConfig(64, 64, 4, 2),
    LatentDenseConfig(128, 32, 8, 4),
)


def latent_dense_config(dtype: torch.dtype) -> LatentDenseConfig:
    """Safe on every Hopper card."""
    if dtype == torch.float32:
        return LatentDenseConfig(32, 16, 8, 2)
    return LATENT_DENSE_CANDIDATES[0]


@triton.jit(
    do_not_specialize=["width"],
    do_not_specialize_on_alignment=["rows", "ends", "key_firsts", "tables"],
)
def gather_lines_kernel(
    cache,  # [blocks, 1, PAGE, LINE]
    rows,
    ends,
    key_firsts,
    tables,
    lines,  # [keys, LINE]
    width,
    LINE: tl.constexpr,
    BL: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (chunks, groups of TILE positions of the longest context)."""
    pdl.release(PDL)
    chunk = tl.program_id(0)
    position = tl.program_id(1) * TILE + tl.arange(0, TILE)
    pdl.wait(PDL)
    inside = position < tl.load(ends + chunk)
    table = tables + tl.load(rows + chunk).to(tl.int64) * width
    block = tl.load(table + position // PAGE, mask=inside, other=0)
    source = (block.to(tl.int64) * PAGE + position % PAGE) * LINE
    target = (tl.load(key_firsts + chunk) + position).to(tl.int64) * LINE
    n = tl.arange(0, BL)
    mask = inside[:, None] & (n < LINE)[None, :]
    line = tl.load(cache + source[:, None] + n[None, :], mask=mask, other=0.0)
    tl.store(lines + target[:, None] + n[None, :], line, mask=mask)


@triton.jit
def _attend(
    acc,
    top,
    total,
    plain_q,
    rope_q,
    up,  # of the head and the chunk's first key
    lines,  # of its shared part
    query_position,
    n_keys,
    begin,
    end,
    scale,
    MASKED: tl.constexpr,
    UP_STRIDE: tl.constexpr,
    LINE: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    DV: tl.constexpr,
    BN: tl.constexpr,
    BP: tl.constexpr,
    BV: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Key tiles [begin, end); not MASKED: every query sees every key."""
    n = tl.arange(0, BN)
    p = tl.arange(0, BP)
    v = tl.arange(0, BV)
    unit = scale * LOG2E
    for tile in tl.range(begin, end, num_stages=STAGES):
        key = tile * TILE + tl.arange(0, TILE)
        at = up + key.to(tl.int64)[:, None] * UP_STRIDE
        rope_at = lines + key.to(tl.int64)[:, None] * LINE
        if MASKED or NOPE < BN or ROPE < BP or DV < BV:
            there = (key < n_keys)[:, None]
            keys = tl.load(at + n[None, :], mask=there & (n < NOPE)[None, :], other=0.0)
            rope = tl.load(rope_at + p[None, :], mask=there & (p < ROPE)[None, :], other=0.0)
            values = tl.load(at + NOPE + v[None, :], mask=there & (v < DV)[None, :], other=0.0)
        else:
            keys = tl.load(at + n[None, :])
            rope = tl.load(rope_at + p[None, :])
            values = tl.load(at + NOPE + v[None, :])
        scores = tl.dot(plain_q, tl.trans(keys), input_precision="ieee")
        scores = tl.dot(rope_q, tl.trans(rope), scores, input_precision="ieee")
        if MASKED:
            scores = tl.where(key[None, :] <= query_position[:, None], scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * unit)  # finite: key 0 is seen first by all
        weights = tl.exp2(scores * unit - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(values.dtype), values, acc, input_precision="ieee")
        top = new_top
    return acc, top, total


@triton.jit(
    do_not_specialize_on_alignment=["starts", "counts", "firsts", "key_firsts", "tiles"],
)
def latent_dense_kernel(
    q,  # [tokens, HEADS, NOPE + ROPE], contiguous
    up,  # [keys, HEADS, NOPE + DV], contiguous
    lines,  # [keys, RANK + ROPE], contiguous
    out,  # [tokens, HEADS, DV], contiguous
    starts,
    counts,
    firsts,
    key_firsts,
    tiles,
    scale,
    HEADS: tl.constexpr,
    M: tl.constexpr,
    RANK: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    DV: tl.constexpr,
    BN: tl.constexpr,
    BP: tl.constexpr,
    BV: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    WORDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (tiles * HEADS,)."""
    pdl.release(PDL)
    head = tl.program_id(0) % HEADS
    words = tiles + tl.program_id(0) // HEADS * WORDS
    pdl.wait(PDL)
    chunk, tile = tl.load(words), tl.load(words + 1)
    start, count = tl.load(starts + chunk), tl.load(counts + chunk)
    first = tl.load(firsts + chunk).to(tl.int64)
    key_first = tl.load(key_firsts + chunk).to(tl.int64)
    n = tl.arange(0, BN)
    p = tl.arange(0, BP)
    v = tl.arange(0, BV)
    query = tile * M + tl.arange(0, M)
    inside = (query < count)[:, None]
    source = q + (((first + query) * HEADS + head) * (NOPE + ROPE))[:, None]
    plain_q = tl.load(source + n[None, :], mask=inside & (n < NOPE)[None, :], other=0.0)
    rope_q = tl.load(source + NOPE + p[None, :], mask=inside & (p < ROPE)[None, :], other=0.0)
    query_position = start + tl.minimum(query, count - 1)
    n_keys = start + tl.minimum(tile * M + M, count)
    key_tiles = tl.cdiv(n_keys, TILE)
    full_end = tl.minimum((start + tile * M + 1) // TILE, key_tiles)  # all queries see these

    acc = tl.zeros([M, BV], tl.float32)
    top = tl.full([M], -float("inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    own = up + (key_first * HEADS + head) * (NOPE + DV)
    shared = lines + key_first * (RANK + ROPE) + RANK
    acc, top, total = _attend(
        acc, top, total, plain_q, rope_q, own, shared, query_position, n_keys, 0, full_end, scale,
        False, HEADS * (NOPE + DV), RANK + ROPE, NOPE, ROPE, DV, BN, BP, BV, TILE, STAGES,
    )  # fmt: skip
    acc, top, total = _attend(
        acc, top, total, plain_q, rope_q, own, shared, query_position, n_keys, full_end, key_tiles,
        scale, True, HEADS * (NOPE + DV), RANK + ROPE, NOPE, ROPE, DV, BN, BP, BV, TILE, STAGES,
    )  # fmt: skip
    answer = out + (((first + query) * HEADS + head) * DV)[:, None] + v[None, :]
    mask = inside & (v < DV)[None, :]
    tl.store(answer, (acc / total[:, None]).to(out.dtype.element_ty), mask=mask)


@dataclasses.dataclass(frozen=True)
class DenseKeys:
    """Where the keys of chunks stand once gathered: those of chunk c from key_firsts[c] on, as many
    as ends[c] = starts[c] + counts[c], all int32 [n]; `keys` of all, `longest` of one."""

    chunks: Chunks
    key_firsts: Tensor
    ends: Tensor
    keys: int
    longest: int


def gather_lines(
    cache: Tensor, tables: Tensor, plan: DenseKeys, *, out: Tensor, with_pdl: bool = False
) -> Tensor:
    """The lines of every chunk's positions [0, end), side by side: out [keys, line]."""
    line, n = cache.shape[3], plan.key_firsts.shape[0]
    assert cache.is_contiguous(), "cache layout"
    check_lines(cache)
    assert tables.is_contiguous(), "tables layout"
    check_output(out, (plan.keys, line))
    launch(gather_lines_kernel, (n, cdiv(plan.longest, _GATHERED)),
        cache, plan.chunks.rows, plan.ends, plan.key_firsts, tables, out, tables.shape[1],
        LINE=line, BL=power_of_two(line), PAGE=cache.shape[2], TILE=_GATHERED,
        num_warps=8, **pdl.options(with_pdl),
    )  # fmt: skip
    return out


def latent_dense(
    q: Tensor,
    up: Tensor,
    lines: Tensor,
    plan: DenseKeys,
    shape: LatentShape,
    *,
    scale: float,
    out: Tensor,
    config: LatentDenseConfig | None = None,
    with_pdl: bool = False,
) -> Tensor:
    """Token j of a chunk attends to positions 0..start + j of its row.

    q [T, heads, nope + rope]; lines [keys, rank + rope] as `gather_lines` leaves them; up
    [keys, heads, nope + dv]: keys and values made of them -> out [T, heads, dv]; tokens of no chunk
    are left as they are. The chunks' tiling has group = 1, kv_heads = heads, no parts.
    """
    tokens, keys = q.shape[0], plan.keys
    check_output(q, (tokens, shape.heads, shape.query))
    check_output(up, (keys, shape.heads, shape.nope + shape.dv))
    check_output(lines, (keys, shape.line))
    check_output(out, (tokens, shape.heads, shape.dv))
    for numbers in (shape.query, shape.nope, shape.nope + shape.dv):
        assert numbers * q.element_size() % 16 == 0, "parts of whole 16 bytes, as `check_lines`"
    config = config or latent_dense_config(q.dtype)
    chunks = plan.chunks
    assert chunks.tile_rows == config.rows, (chunks.tile_rows, config)
    launch(latent_dense_kernel, (chunks.tiles.shape[0] * shape.heads,),
        q, up, lines, out, chunks.starts, chunks.counts, chunks.firsts, plan.key_firsts,
        chunks.tiles, scale,
        HEADS=shape.heads, M=config.rows, RANK=shape.rank, NOPE=shape.nope, ROPE=shape.rope,
        DV=shape.dv, BN=padded_dim(shape.nope), BP=padded_dim(shape.rope),
        BV=padded_dim(shape.dv), TILE=config.tile_keys, STAGES=config.stages, WORDS=TILE_WORDS,
        num_warps=config.warps, **pdl.options(with_pdl),
    )  # fmt: skip
    return out


def latent_dense_reference(
    q: Tensor,
    cache: Tensor,
    tables: Tensor,
    chunks: Chunks,
    weight: Tensor,
    shape: LatentShape,
    *,
    scale: float,
) -> Tensor:
    """Gather, product and attention in float64, chunk by chunk; NaN for tokens of no chunk."""
    out = torch.full(
        (q.shape[0], shape.heads, shape.dv), torch.nan, dtype=torch.float64, device=q.device
    )
    w_k, w_v = up_parts(weight, shape)
    columns = (chunks.rows, chunks.starts, chunks.counts, chunks.firsts)
    for row, start, count, first in zip(*(x.tolist() for x in columns), strict=True):
        blocks = tables[row, : (start + count - 1) // cache.shape[2] + 1].long()
        lines = cache[blocks, 0].flatten(0, 1)[: start + count].double()
        latent, rope = lines.split((shape.rank, shape.rope), dim=-1)
        keys = torch.einsum("lr,hnr->hln", latent, w_k)
        keys = torch.cat((keys, rope.expand(shape.heads, -1, -1)), dim=-1)
        values = torch.einsum("lr,hvr->hlv", latent, w_v)
        own = slice(first, first + count)
        scores = torch.einsum("nhd,hld->hnl", q[own].double(), keys) * scale
        position = torch.arange(start, start + count, device=q.device)[:, None]
        hidden = torch.arange(start + count, device=q.device)[None] > position
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[own] = torch.einsum("hnl,hlv->nhv", weights, values)
    return out
