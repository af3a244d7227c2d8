"""Paged attention in the latent space: a token is one query, of all heads, over one line a token.

As `attention_decode`, whose shares and sums it uses, but that values are the first numbers of the
keys: a line passes once. Heads are the rows of the matrix products, 16 a program.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels import pdl
from headrace.kernels.attention import LOG2E
from headrace.kernels.attention_decode import (
    Scratch,
    _find_share,
    _padded_tokens,
    _sum_parts,
    _write,
)
from headrace.kernels.columns import StepColumns
from headrace.kernels.latent import LatentShape
from headrace.kernels.launch import launch
from headrace.kernels.shapes import check_output, power_of_two

_SUMMED = 2  # partial results that the last program of a token loads at a time


@dataclasses.dataclass(frozen=True)
class LatentConfig:
    """tile_keys: keys a turn of the loop; stages: turns in flight; min_share_keys: a program's
    least part of a context."""

    tile_keys: int
    warps: int
    stages: int
    min_share_keys: int = 128


LATENT_CANDIDATES = (
    LatentConfig(32, 4, 3),
    LatentConfig(32, 4, 4),
    LatentConfig(32, 8, 4),
    LatentConfig(64, 4, 2),
    LatentConfig(64, 8, 2),
    LatentConfig(64, 8, 3),
)


def latent_config(dtype: torch.dtype, tokens: int) -> LatentConfig:
    """The fastest on an H200 for so many tokens; while they are few, a program has a
    multiprocessor for itself."""
    if dtype == torch.float32:
        return LatentConfig(16, 4, 2)
    return LatentConfig(64, 8, 3) if tokens < 32 else LatentConfig(64, 4, 2)


def head_group(heads: int) -> int:
    """Heads of one program: at most 16, all groups alike."""
    return next(n for n in range(min(16, heads), 0, -1) if heads % n == 0)


@triton.jit(
    do_not_specialize=["tokens", "width", "splits", "slots"],
    do_not_specialize_on_alignment=["rows", "positions", "tables"],
)
def latent_decode_kernel(
    q,  # [tokens, heads, RANK + ROPE], contiguous
    cache,  # [blocks, 1, PAGE, RANK + ROPE], contiguous
    out,  # [tokens, heads, RANK], contiguous
    rows,
    positions,
    tables,  # [rows, width]
    outputs,  # Scratch
    stats,
    arrived,
    scale,  # of the scores
    tokens,
    width,
    splits,
    slots,
    TOKENS: tl.constexpr,  # a power of two >= tokens
    GROUPS: tl.constexpr,  # of heads
    GROUP: tl.constexpr,  # heads of one
    M: tl.constexpr,  # GROUP padded
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BR: tl.constexpr,  # RANK padded
    BP: tl.constexpr,  # ROPE padded
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    MIN_TILES: tl.constexpr,
    STAGES: tl.constexpr,
    SUMMED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (slots * GROUPS,)."""
    pdl.release(PDL)
    group = tl.program_id(0) % GROUPS
    slot = tl.program_id(0) // GROUPS
    pdl.wait(PDL)
    token, first_slot, share = _find_share(
        positions, tokens, splits, slot, TOKENS, TILE, MIN_TILES, 0
    )
    if token < tokens:
        n_keys = tl.load(positions + token) + 1
        table = tables + tl.load(rows + token).to(tl.int64) * width
        tiles = tl.cdiv(n_keys, TILE)
        parts = tl.cdiv(tiles, share)
        even_share = tl.cdiv(tiles, parts)
        begin = (slot - first_slot) * even_share
        end = tl.minimum(begin + even_share, tiles)

        m = tl.arange(0, M)
        r = tl.arange(0, BR)
        p = tl.arange(0, BP)
        heads = group * GROUP + m
        inside = (m < GROUP)[:, None] & (r < RANK)[None, :]
        query = q + (token.to(tl.int64) * (GROUPS * GROUP) + heads)[:, None] * (RANK + ROPE)
        latent_q = tl.load(query + r[None, :], mask=inside, other=0.0)
        turned = (m < GROUP)[:, None] & (p < ROPE)[None, :]
        rope_q = tl.load(query + RANK + p[None, :], mask=turned, other=0.0)
        top = tl.full([M], -float("inf"), tl.float32)
        total = tl.zeros([M], tl.float32)
        acc = tl.zeros([M, BR], tl.float32)
        key = begin * TILE + tl.arange(0, TILE)
        # Block ids are carried a turn ahead: else loads of lines would wait for them.
        block = tl.load(table + key // PAGE, mask=key < n_keys, other=0)
        for _ in tl.range(begin, end, num_stages=STAGES):
            seen = key < n_keys
            line = cache + (block.to(tl.int64) * PAGE + key % PAGE)[:, None] * (RANK + ROPE)
            latent = tl.load(line + r[None, :], mask=seen[:, None] & (r < RANK)[None, :], other=0.0)
            rope = tl.load(
                line + RANK + p[None, :], mask=seen[:, None] & (p < ROPE)[None, :], other=0.0
            )
            scores = tl.dot(rope_q, tl.trans(rope), input_precision="ieee")
            scores = tl.dot(latent_q, tl.trans(latent), scores, input_precision="ieee")
            scores = tl.where(seen[None, :], scores * (scale * LOG2E), -float("inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))  # finite: every tile has a key seen
            weights = tl.exp2(scores - new_top[:, None])
            shrink = tl.exp2(top - new_top)
            total = total * shrink + tl.sum(weights, 1)
            acc = acc * shrink[:, None]
            acc = tl.dot(weights.to(latent.dtype), latent, acc, input_precision="ieee")
            top = new_top
            key += TILE
            block = tl.load(table + key // PAGE, mask=key < n_keys, other=0)

        answer = out + token.to(tl.int64) * (GROUPS * GROUP * RANK)
        dims = heads[:, None] * RANK + r[None, :]
        if parts == 1:
            _write(answer, q, top, total, acc, heads, dims, inside, False)
        else:
            lines = slot * (GROUPS * GROUP) + heads
            tl.store(stats + lines, top, mask=m < GROUP)
            tl.store(stats + slots * (GROUPS * GROUP) + lines, total, mask=m < GROUP)
            tl.store(outputs + lines.to(tl.int64)[:, None] * RANK + r[None, :], acc, mask=inside)
            tl.debug_barrier()  # all threads have stored before one of them says so
            counter = arrived + token * GROUPS + group
            if tl.atomic_add(counter, 1, sem="acq_rel") == parts - 1:
                tl.store(counter, 0)  # as the next call expects it
                _sum_parts(
                    answer, q, stats, outputs, slots, first_slot, parts, group,
                    GROUPS, GROUP, M, RANK, BR, SUMMED, False,
                )  # fmt: skip


def check_lines(cache: Tensor) -> None:
    """Lines are whole multiples of 16 bytes: narrower copies to shared memory fault."""
    assert cache.shape[3] * cache.element_size() % 16 == 0, "lines of whole 16 bytes"


def latent_scratch(
    max_tokens: int, shape: LatentShape, splits: int, device: torch.device
) -> Scratch:
    """Memory for partial results, as `attention_decode.Scratch`."""
    groups = shape.heads // head_group(shape.heads)
    return Scratch(max_tokens, shape.heads, shape.rank, groups, splits, device)


def latent_decode(
    q: Tensor,
    cache: Tensor,
    columns: StepColumns,
    shape: LatentShape,
    *,
    scale: float,
    splits: int,
    scratch: Scratch,
    out: Tensor,
    config: LatentConfig | None = None,
    with_pdl: bool = False,
) -> Tensor:
    """Token t attends to positions 0..positions[t] of row rows[t], whose lines are in the cache.

    q [T, heads, rank + rope] (see `latent.absorb`); cache [blocks, 1, block_size, rank + rope], one
    layer -> out [T, heads, rank], weighted sums of latents (see `latent.value_up`). splits >= 1;
    T + splits <= scratch.slots. No host synchronisation; a graph may capture it.
    """
    tokens = q.shape[0]
    check_output(q, (tokens, shape.heads, shape.line))
    check_output(out, (tokens, shape.heads, shape.rank))
    assert cache.is_contiguous(), "cache layout"
    assert cache.shape[1::2] == (1, shape.line), "cache: one line a token"
    check_lines(cache)
    assert columns.tables.is_contiguous(), "tables layout"
    assert min(scale, splits) > 0, (scale, splits)
    assert tokens + splits <= scratch.slots, "scratch too small"
    assert tokens <= scratch.max_tokens, "scratch too small"
    if tokens == 0:
        return out
    config = config or latent_config(q.dtype, tokens)
    group = head_group(shape.heads)
    groups = shape.heads // group
    launch(latent_decode_kernel, ((tokens + splits) * groups,),
        q, cache, out, columns.rows, columns.positions, columns.tables,
        scratch.outputs, scratch.stats, scratch.arrived,
        scale, tokens, columns.tables.shape[1], splits, scratch.slots,
        TOKENS=_padded_tokens(tokens), GROUPS=groups, GROUP=group, M=16,
        RANK=shape.rank, ROPE=shape.rope, BR=max(16, power_of_two(shape.rank)),
        BP=max(16, power_of_two(shape.rope)), PAGE=cache.shape[2],
        TILE=config.tile_keys, MIN_TILES=-(-config.min_share_keys // config.tile_keys),
        STAGES=config.stages, SUMMED=_SUMMED, num_warps=config.warps, **pdl.options(with_pdl),
    )  # fmt: skip
    return out


def latent_reference(
    q: Tensor, lines: Tensor, start: int, shape: LatentShape, *, scale: float
) -> Tensor:
    """One sequence in float64: q [n, heads, rank + rope] at positions [start, start + n), lines
    [length, rank + rope] from position 0 on -> [n, heads, rank], causal."""
    n = q.shape[0]
    lines = lines.double()
    scores = torch.einsum("nhd,ld->hnl", q.double(), lines) * scale
    position = torch.arange(start, start + n, device=q.device)[:, None]
    hidden = torch.arange(lines.shape[0], device=q.device)[None] > position
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hnl,lr->nhr", weights, lines[:, : shape.rank])


def latent_decode_reference(
    q: Tensor, cache: Tensor, columns: StepColumns, shape: LatentShape, *, scale: float
) -> Tensor:
    """The same as `latent_decode`, token by token, in float64."""
    out = torch.empty(q.shape[0], shape.heads, shape.rank, dtype=torch.float64, device=q.device)
    size = cache.shape[2]
    pairs = zip(columns.rows.tolist(), columns.positions.tolist(), strict=True)
    for t, (row, position) in enumerate(pairs):
        blocks = columns.tables[row, : position // size + 1].long()
        lines = cache[blocks, 0].flatten(0, 1)[: position + 1]
        out[t : t + 1] = latent_reference(q[t : t + 1], lines, position, shape, scale=scale)
    return out
