"""Latent attention (MLA, https://arxiv.org/abs/2405.04434): what is kept of a token, and its query
in the latent space.

The cache holds one line a token for all heads: `rank` numbers c, from which each head makes its own
key (W_k c) and value (W_v c), and `rope` numbers of a rotated key that all heads share. Two ways to
attend, equal but for rounding:
  absorbed    (W_k^T q) . c, and W_v times the weighted sum of c: one key-value head of rank + rope
              numbers for all heads, whose values are its keys; few bytes, for few queries
  unabsorbed  keys and values of every head made anew from c: fewer products, for many queries
W, the projection up, is [heads, nope + dv, rank]: W_k [nope, rank], then W_v [dv, rank], of each
head.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels import pdl
from headrace.kernels.columns import COLUMNS, StepColumns
from headrace.kernels.launch import launch
from headrace.kernels.shapes import cdiv, check_output, power_of_two


@dataclasses.dataclass(frozen=True, slots=True)
class LatentShape:
    """Sizes of one model's latent attention; a query has nope + rope numbers, a value dv."""

    heads: int
    rank: int
    nope: int
    rope: int
    dv: int

    @property
    def line(self) -> int:
        """Numbers that the cache holds of a token."""
        return self.rank + self.rope

    @property
    def query(self) -> int:
        """Numbers of a head's query."""
        return self.nope + self.rope


@triton.jit(do_not_specialize=["width", "eps"], do_not_specialize_on_alignment=COLUMNS)
def latent_write_kernel(
    q,
    kv,
    gain,
    rows,
    positions,
    writes,
    tables,
    cos,
    sin,
    turned,
    cache,
    width,
    eps,
    Q_STRIDE: tl.constexpr,
    KV_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    NOPE: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    BH: tl.constexpr,
    BR: tl.constexpr,
    BN: tl.constexpr,
    BI: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (tokens, groups of BH heads); the first group stores the token's line."""
    pdl.release(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BH + tl.arange(0, BH)
    r = tl.arange(0, BR)
    n = tl.arange(0, BN)
    i = tl.arange(0, BI)
    weight = tl.load(gain + r, mask=r < RANK, other=0.0).to(tl.float32)
    pdl.wait(PDL)
    position = tl.load(positions + token)
    angle = position.to(tl.int64) * HALF + i
    c = tl.load(cos + angle, mask=i < HALF, other=1.0)
    s = tl.load(sin + angle, mask=i < HALF, other=0.0)
    source = q + token * Q_STRIDE + head[:, None] * (NOPE + 2 * HALF)
    target = turned + (token * HEADS + head[:, None]) * (NOPE + 2 * HALF)
    whole = (head < HEADS)[:, None] & (n < NOPE)[None, :]
    plain = tl.load(source + n[None, :], mask=whole, other=0.0)
    tl.store(target + n[None, :], plain, mask=whole)
    mask = (head < HEADS)[:, None] & (i < HALF)[None, :]
    low = tl.load(source + NOPE + i[None, :], mask=mask, other=0.0).to(tl.float32)
    high = tl.load(source + NOPE + HALF + i[None, :], mask=mask, other=0.0).to(tl.float32)
    first = low * c[None, :] - high * s[None, :]
    second = high * c[None, :] + low * s[None, :]
    tl.store(target + NOPE + i[None, :], first.to(turned.dtype.element_ty), mask=mask)
    tl.store(target + NOPE + HALF + i[None, :], second.to(turned.dtype.element_ty), mask=mask)

    stored = (tl.load(writes + token) != 0) & (tl.program_id(1) == 0)
    row = tl.load(rows + token).to(tl.int64)
    block = tl.load(tables + row * width + position // PAGE, mask=stored, other=0)
    line = cache + (block.to(tl.int64) * PAGE + position % PAGE) * (RANK + 2 * HALF)
    own = kv + token * KV_STRIDE
    latent = tl.load(own + r, mask=(r < RANK) & stored, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(latent * latent, axis=0) / RANK + eps)
    normed = (latent * scale * weight).to(cache.dtype.element_ty)
    tl.store(line + r, normed, mask=(r < RANK) & stored)
    inside = (i < HALF) & stored
    low = tl.load(own + RANK + i, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(own + RANK + HALF + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(line + RANK + i, (low * c - high * s).to(cache.dtype.element_ty), mask=inside)
    second = (high * c + low * s).to(cache.dtype.element_ty)
    tl.store(line + RANK + HALF + i, second, mask=inside)


def latent_write(
    q: Tensor,
    kv: Tensor,
    norm: tuple[Tensor, float],
    columns: StepColumns,
    cos: Tensor,
    sin: Tensor,
    cache: Tensor,
    shape: LatentShape,
    *,
    out: Tensor,
    with_pdl: bool = False,
) -> Tensor:
    """q [T, heads * (nope + rope)] and kv [T, rank + rope], as the projections down left them ->
    out [T, heads, nope + rope], its last `rope` numbers turned; the token's line is in the cache
    where columns.writes is 1: kv's first `rank` through RMSNorm, the others turned.

    Rows of q and kv may lie apart. Rotation of halves; cos, sin [positions, rope / 2] float32;
    cache [blocks + 1, 1, block_size, rank + rope] is one layer. In float32, rounded once.
    """
    tokens, half = q.shape[0], shape.rope // 2
    gain, eps = norm
    assert q.shape == (tokens, shape.heads * shape.query), "q: every head's query"
    assert kv.shape == (tokens, shape.line), "kv: the latent and the shared key"
    assert q.stride(1) == kv.stride(1) == 1, "numbers of a row lie side by side"
    assert cache.is_contiguous(), "cache: one layer lies in one piece"
    assert cache.shape[1::2] == (1, shape.line), "cache: one line a token"
    assert cos.shape[1] == sin.shape[1] == half, "tables of halves"
    assert columns.tables.stride(1) == 1, "block ids of a row lie one after another"
    check_output(gain, (shape.rank,))
    check_output(out, (tokens, shape.heads, shape.query))
    if tokens == 0:
        return out
    heads = power_of_two(min(shape.heads, 16))
    launch(latent_write_kernel, (tokens, cdiv(shape.heads, heads)),
        q, kv, gain, columns.rows, columns.positions, columns.writes, columns.tables, cos, sin,
        out, cache, columns.tables.stride(0), eps,
        Q_STRIDE=q.stride(0), KV_STRIDE=kv.stride(0), HEADS=shape.heads, RANK=shape.rank,
        NOPE=shape.nope, HALF=half, PAGE=cache.shape[2], BH=heads,
        BR=power_of_two(shape.rank), BN=power_of_two(shape.nope),
        BI=power_of_two(half), num_warps=4, **pdl.options(with_pdl),
    )  # fmt: skip
    return out


def latent_write_reference(
    q: Tensor,
    kv: Tensor,
    norm: tuple[Tensor, float],
    columns: StepColumns,
    cos: Tensor,
    sin: Tensor,
    cache: Tensor,
    shape: LatentShape,
) -> Tensor:
    """The same in float64 (the cache is written in its own dtype)."""
    positions = columns.positions.long()
    c, s = cos.double()[positions][:, None], sin.double()[positions][:, None]

    def turn(x: Tensor) -> Tensor:
        low, high = x.double().chunk(2, dim=-1)
        return torch.cat((low * c - high * s, high * c + low * s), dim=-1)

    heads = q.double().view(-1, shape.heads, shape.query)
    latent, key = kv[:, : shape.rank].double(), kv[:, None, shape.rank :]
    gain, eps = norm
    latent = latent * (latent.square().mean(-1, keepdim=True) + eps).rsqrt() * gain.double()
    line = torch.cat((latent, turn(key)[:, 0]), dim=-1)
    kept, size = columns.writes.bool(), cache.shape[2]
    blocks = columns.tables[columns.rows.long(), positions // size].long()
    cache[blocks[kept], 0, positions[kept] % size] = line[kept].to(cache.dtype)
    plain, rope = heads.split((shape.nope, shape.rope), dim=-1)
    return torch.cat((plain, turn(rope)), dim=-1)


@triton.jit(do_not_specialize=["m"])
def absorb_kernel(
    q,
    weight,
    out,
    m,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    DV: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BR: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (heads, groups of BN columns of the latent, groups of BM tokens)."""
    pdl.release(PDL)
    head = tl.program_id(0)
    k = tl.arange(0, BK)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    token = tl.program_id(2) * BM + tl.arange(0, BM)
    up = weight + head.to(tl.int64) * ((NOPE + DV) * RANK)
    inside = (k < NOPE)[:, None] & (n < RANK)[None, :]
    b = tl.load(up + k[:, None] * RANK + n[None, :], mask=inside, other=0.0)
    pdl.wait(PDL)
    line = token.to(tl.int64) * HEADS + head
    live = (token < m)[:, None]
    source = q + line[:, None] * (NOPE + ROPE)
    a = tl.load(source + k[None, :], mask=live & (k < NOPE)[None, :], other=0.0)
    acc = tl.dot(a, b, input_precision="ieee")
    target = out + line[:, None] * (RANK + ROPE)
    tl.store(target + n[None, :], acc.to(out.dtype.element_ty), mask=live & (n < RANK)[None, :])
    if tl.program_id(1) == 0:
        r = tl.arange(0, BR)
        mask = live & (r < ROPE)[None, :]
        turned = tl.load(source + NOPE + r[None, :], mask=mask, other=0.0)
        tl.store(target + RANK + r[None, :], turned, mask=mask)


def absorb(
    q: Tensor, weight: Tensor, shape: LatentShape, *, out: Tensor, with_pdl: bool = False
) -> Tensor:
    """q [T, heads, nope + rope] -> out [T, heads, rank + rope]: W_k^T times its first part, then
    the turned part as it is. weight: W, see above."""
    tokens = q.shape[0]
    check_output(q, (tokens, shape.heads, shape.query))
    check_output(out, (tokens, shape.heads, shape.line))
    _check_weight(weight, shape)
    if tokens == 0:
        return out
    bm = min(64, max(16, power_of_two(tokens)))
    bn = min(64 if bm < 64 else 128, power_of_two(shape.rank))
    grid = (shape.heads, cdiv(shape.rank, bn), cdiv(tokens, bm))
    launch(absorb_kernel, grid,
        q, weight, out, tokens,
        HEADS=shape.heads, RANK=shape.rank, NOPE=shape.nope, ROPE=shape.rope, DV=shape.dv,
        BM=bm, BN=bn, BK=max(16, power_of_two(shape.nope)),
        BR=power_of_two(shape.rope), num_warps=4, **pdl.options(with_pdl),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["m"])
def value_up_kernel(
    x,
    weight,
    out,
    m,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    NOPE: tl.constexpr,
    DV: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (heads, groups of BN numbers of a value, groups of BM tokens)."""
    pdl.release(PDL)
    head = tl.program_id(0)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    token = tl.program_id(2) * BM + tl.arange(0, BM)
    k = tl.arange(0, BK)
    live = (token < m)[:, None]
    up = weight + (head.to(tl.int64) * (NOPE + DV) + NOPE) * RANK
    b_at = up + tl.minimum(n, DV - 1)[None, :] * RANK + k[:, None]
    a_at = x + (token.to(tl.int64) * HEADS + head)[:, None] * RANK + k[None, :]
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    pdl.wait(PDL)
    for first in range(0, RANK, BK):
        inside = first + k < RANK
        a = tl.load(a_at + first, mask=live & inside[None, :], other=0.0)
        b = tl.load(b_at + first, mask=inside[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    target = out + (token.to(tl.int64) * HEADS + head)[:, None] * DV + n[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=live & (n < DV)[None, :])


def value_up(
    x: Tensor, weight: Tensor, shape: LatentShape, *, out: Tensor, with_pdl: bool = False
) -> Tensor:
    """Weighted sums of latents x [T, heads, rank] -> out [T, heads, dv]: W_v times them."""
    tokens = x.shape[0]
    check_output(x, (tokens, shape.heads, shape.rank))
    check_output(out, (tokens, shape.heads, shape.dv))
    _check_weight(weight, shape)
    if tokens == 0:
        return out
    bm = min(64, max(16, power_of_two(tokens)))
    bn = min(16 if bm < 64 else 64, power_of_two(shape.dv))
    bk = min(128 if x.element_size() == 2 else 32, max(16, power_of_two(shape.rank)))
    grid = (shape.heads, cdiv(shape.dv, bn), cdiv(tokens, bm))
    launch(value_up_kernel, grid,
        x, weight, out, tokens,
        HEADS=shape.heads, RANK=shape.rank, NOPE=shape.nope, DV=shape.dv,
        BM=bm, BN=bn, BK=bk,
        num_warps=4, num_stages=3, **pdl.options(with_pdl),
    )  # fmt: skip
    return out


def _check_weight(weight: Tensor, shape: LatentShape) -> None:
    assert weight.is_contiguous(), "the projection up lies in one piece"
    assert weight.numel() == shape.heads * (shape.nope + shape.dv) * shape.rank, "its size"


def up_parts(weight: Tensor, shape: LatentShape) -> tuple[Tensor, Tensor]:
    """W_k [heads, nope, rank] and W_v [heads, dv, rank] in float64."""
    both = weight.double().view(shape.heads, shape.nope + shape.dv, shape.rank)
    w_k, w_v = both.split((shape.nope, shape.dv), dim=1)
    return w_k, w_v


def absorb_reference(q: Tensor, weight: Tensor, shape: LatentShape) -> Tensor:
    """The same as `absorb` in float64."""
    plain, turned = q.double().split((shape.nope, shape.rope), dim=-1)
    w_k, _ = up_parts(weight, shape)
    return torch.cat((torch.einsum("thn,hnr->thr", plain, w_k), turned), dim=-1)


def value_up_reference(x: Tensor, weight: Tensor, shape: LatentShape) -> Tensor:
    """The same as `value_up` in float64."""
    _, w_v = up_parts(weight, shape)
    return torch.einsum("thr,hvr->thv", x.double(), w_v)
