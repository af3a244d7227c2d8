"""Rotary embedding of queries and keys, and the write of keys and values to the paged cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels import pdl
from headrace.kernels.columns import COLUMNS, StepColumns
from headrace.kernels.launch import launch
from headrace.kernels.rms_norm import inverse_rms_reference
from headrace.kernels.shapes import cdiv, check_output, check_scale, power_of_two


@triton.jit(
    do_not_specialize=["width", "eps", "v_eps", "x_eps", "clip"],
    do_not_specialize_on_alignment=COLUMNS,
)
def rotary_write_kernel(
    qkv,
    scale,
    bias,
    q_gain,
    k_gain,
    rows,
    positions,
    writes,
    tables,
    cos,
    sin,
    q,
    k,
    v,
    width,
    eps,
    v_eps,
    x_eps,
    clip,
    SCALED: tl.constexpr,
    RMS: tl.constexpr,
    BK: tl.constexpr,
    BIASED: tl.constexpr,
    CLIPPED: tl.constexpr,
    NORMED: tl.constexpr,
    V_NORMED: tl.constexpr,
    TURNED: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    OWN: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BH: tl.constexpr,
    BI: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (tokens, groups of BH heads). BI >= HALF, a power of two.

    RMS > 0: `scale` is x [tokens, RMS], whose norm is meant; BK >= RMS, a power of two."""
    D: tl.constexpr = 2 * HALF
    ALL: tl.constexpr = HEADS + 2 * KV_HEADS * OWN
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BH + tl.arange(0, BH)
    i = tl.arange(0, BI)
    pdl.pass_on(PDL)
    mask = (head < ALL)[:, None] & (i < HALF)[None, :]
    source = (token * ALL + head[:, None]) * D + i[None, :]
    low = tl.load(qkv + source, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(qkv + source + HALF, mask=mask, other=0.0).to(tl.float32)
    if SCALED:
        if RMS > 0:
            column = tl.arange(0, BK)
            x = tl.load(scale + token * RMS + column, mask=column < RMS, other=0.0).to(tl.float32)
            factor = tl.rsqrt(tl.sum(x * x, axis=0) / RMS + x_eps)
        else:
            factor = tl.load(scale + token)
        low *= factor
        high *= factor
    if BIASED:
        column = head[:, None] * D + i[None, :]
        low += tl.load(bias + column, mask=mask, other=0.0).to(tl.float32)
        high += tl.load(bias + column + HALF, mask=mask, other=0.0).to(tl.float32)
    if CLIPPED:
        low = tl.minimum(tl.maximum(low, -clip), clip)
        high = tl.minimum(tl.maximum(high, -clip), clip)
    if NORMED:  # each head of q and k, not of v
        squares = tl.sum(tl.where(mask, low * low + high * high, 0.0), axis=1)
        factor = tl.where(head < HEADS + KV_HEADS, tl.rsqrt(squares / D + eps), 1.0)
        of_q = (head < HEADS)[:, None]
        of_k = ((head >= HEADS) & (head < HEADS + KV_HEADS))[:, None]
        half = i < HALF
        for part in tl.static_range(2):
            q_weight = tl.load(q_gain + part * HALF + i, mask=half, other=1.0).to(tl.float32)
            k_weight = tl.load(k_gain + part * HALF + i, mask=half, other=1.0).to(tl.float32)
            gain = tl.where(of_q, q_weight[None, :], tl.where(of_k, k_weight[None, :], 1.0))
            if part == 0:
                low = low * factor[:, None] * gain
            else:
                high = high * factor[:, None] * gain
    if V_NORMED:
        squares = tl.sum(tl.where(mask, low * low + high * high, 0.0), axis=1)
        factor = tl.where(head < HEADS + KV_HEADS, 1.0, tl.rsqrt(squares / D + v_eps))
        low *= factor[:, None]
        high *= factor[:, None]
    position = tl.load(positions + token)
    turned = mask & (head < HEADS + KV_HEADS)[:, None]  # values are not
    if TURNED:
        angle = (token if BY_TOKEN else position.to(tl.int64)) * HALF + i
        c = tl.where(turned, tl.load(cos + angle, mask=i < HALF, other=1.0)[None, :], 1.0)
        s = tl.where(turned, tl.load(sin + angle, mask=i < HALF, other=0.0)[None, :], 0.0)
        first = (low * c - high * s).to(q.dtype.element_ty)
        second = (high * c + low * s).to(q.dtype.element_ty)
    else:
        first = low.to(q.dtype.element_ty)
        second = high.to(q.dtype.element_ty)

    at = (token * HEADS + head[:, None]) * D + i[None, :]
    queries = mask & (head < HEADS)[:, None]
    tl.store(q + at, first, mask=queries)
    tl.store(q + at + HALF, second, mask=queries)

    stored = tl.load(writes + token) != 0
    row = tl.load(rows + token).to(tl.int64)
    block = tl.load(tables + row * width + position // BLOCK_SIZE, mask=stored, other=0)
    at = block.to(tl.int64) * KV_HEADS + (head[:, None] - HEADS) % KV_HEADS
    at = (at * BLOCK_SIZE + position % BLOCK_SIZE) * D + i[None, :]
    keys = turned & stored & (head >= HEADS)[:, None]
    tl.store(k + at, first, mask=keys)
    tl.store(k + at + HALF, second, mask=keys)
    values = mask & stored & (head >= HEADS + KV_HEADS)[:, None]
    tl.store(v + at, first, mask=values)
    tl.store(v + at + HALF, second, mask=values)


def check_paged(
    columns: StepColumns,
    cos: Tensor,
    sin: Tensor,
    k: Tensor,
    v: Tensor,
    tokens: int,
    dtype: torch.dtype,
) -> None:
    """One layer of the cache, tables of half of its d, and columns of so many tokens."""
    assert k.shape == v.shape, "k and v have one shape"
    assert k.is_contiguous(), "k: one layer lies in one piece"
    assert v.is_contiguous(), "v: one layer lies in one piece"
    assert k.dtype == v.dtype == dtype, "the cache has the activations' dtype"
    assert k.shape[3] % 2 == 0, "d is even"
    assert cos.shape[1] == sin.shape[1] == k.shape[3] // 2, "tables of halves"
    assert cos.dtype == sin.dtype == torch.float32, "tables in float32"
    assert cos.is_contiguous(), "cos: rows lie one after another"
    assert sin.is_contiguous(), "sin: rows lie one after another"
    assert columns.tables.stride(1) == 1, "block ids of a row lie one after another"
    assert columns.rows.shape[0] == tokens, "a column has an entry a token"


def rotary_write(
    qkv: Tensor,
    columns: StepColumns,
    cos: Tensor,
    sin: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    *,
    scale: Tensor | None = None,
    rms_of: tuple[Tensor, float] | None = None,
    bias: Tensor | None = None,
    clip: float = 0.0,
    norms: tuple[Tensor, Tensor, float] | None = None,
    v_eps: float = 0.0,
    turned: bool = True,
    by_token: bool = False,
    own: bool = True,
    out: Tensor | None = None,
    with_pdl: bool = False,
) -> Tensor:
    """qkv [T, (heads + 2 kv_heads) d] -> q [T, heads, d], turned; k and v are written.

    cos, sin [max_positions, d / 2] float32; k, v [blocks + 1, kv_heads, block_size, d] are one
    layer of the cache: token t goes to the slot of its position where columns.writes[t] is 1.
    Turned in float32, rounded once. Before that a row is multiplied by scale [T] float32, or with
    rms_of = (x [T, K], eps) by what RMSNorm multiplies that row of x by before its weight; gets
    bias [(heads + 2 kv_heads) d], where it is given; is held within -clip and clip, unless that is
    0; then each head of q and of k goes through an RMSNorm: norms = (weight of q [d], of k [d],
    eps). v_eps > 0: each head of v is divided by its root mean square, as by a norm without weight.

    turned: False = q and k are not. by_token: row t of cos and sin is token t's, whatever its
    position. own: False = there is q alone, qkv [T, heads d]; k and v stay as they are.
    """
    tokens, (_, kv_heads, block_size, d) = qkv.shape[0], k.shape
    every = heads + 2 * kv_heads * own
    check_output(qkv, (tokens, every * d))
    check_scale(scale, tokens)
    x, x_eps = (None, 0.0) if rms_of is None else rms_of
    assert scale is None or x is None, "a row has one factor"
    if x is not None:
        check_output(x, (tokens, x.shape[1]))
    if bias is not None:
        check_output(bias, (every * d,))
    q_gain, k_gain, eps = norms if norms is not None else (qkv, qkv, 0.0)
    if norms is not None:
        check_output(q_gain, (d,))
        check_output(k_gain, (d,))
    check_paged(columns, cos, sin, k, v, tokens, qkv.dtype)
    q = torch.empty(tokens, heads, d, dtype=qkv.dtype, device=qkv.device) if out is None else out
    check_output(q, (tokens, heads, d))
    if tokens == 0:
        return q
    factor = x if scale is None else scale
    lanes = power_of_two(d // 2)
    group = max(1, min(power_of_two(every), 1024 // lanes))
    launch(rotary_write_kernel, (tokens, cdiv(every, group)),
        qkv, qkv if factor is None else factor, qkv if bias is None else bias,
        q_gain, k_gain, columns.rows, columns.positions, columns.writes, columns.tables,
        cos, sin, q, k, v,
        columns.tables.stride(0), eps, v_eps, x_eps, float(clip),
        SCALED=factor is not None, RMS=0 if x is None else x.shape[1],
        BK=1 if x is None else power_of_two(x.shape[1]), BIASED=bias is not None, CLIPPED=clip > 0,
        NORMED=norms is not None, V_NORMED=v_eps > 0 and own,
        TURNED=turned, BY_TOKEN=by_token, OWN=own,
        HEADS=heads, KV_HEADS=kv_heads, HALF=d // 2, BLOCK_SIZE=block_size, BH=group, BI=lanes,
        num_warps=4, **pdl.options(with_pdl),
    )  # fmt: skip
    return q


def rotary_write_reference(
    qkv: Tensor,
    columns: StepColumns,
    cos: Tensor,
    sin: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    *,
    scale: Tensor | None = None,
    rms_of: tuple[Tensor, float] | None = None,
    bias: Tensor | None = None,
    clip: float = 0.0,
    norms: tuple[Tensor, Tensor, float] | None = None,
    v_eps: float = 0.0,
    turned: bool = True,
    by_token: bool = False,
    own: bool = True,
) -> Tensor:
    """The same in float64 (k and v are written in their own dtype): q [T, heads, d]."""
    tokens, (_, kv_heads, block_size, d) = qkv.shape[0], k.shape
    scale = scale if rms_of is None else inverse_rms_reference(*rms_of)
    rows = qkv.double() if scale is None else qkv.double() * scale.double()[:, None]
    parts = (rows if bias is None else rows + bias.double()).view(tokens, -1, d)
    parts = parts.clamp(-clip, clip) if clip else parts
    both = heads + kv_heads * own
    keyed, values = parts[:, :both], parts[:, both:]
    if norms is not None:
        q_gain, k_gain, eps = norms
        gain = torch.cat((q_gain.expand(heads, -1), k_gain.expand(kv_heads, -1))).double()[:both]
        keyed = keyed * (keyed.square().mean(-1, keepdim=True) + eps).rsqrt() * gain
    if v_eps:
        values = values * (values.square().mean(-1, keepdim=True) + v_eps).rsqrt()
    positions = columns.positions.long()
    if turned:
        at = torch.arange(tokens, device=qkv.device) if by_token else positions
        c, s = cos.double()[at][:, None], sin.double()[at][:, None]
        low, high = keyed.chunk(2, dim=-1)
        keyed = torch.cat((low * c - high * s, high * c + low * s), dim=-1)
    if own:
        blocks = columns.tables[columns.rows.long(), positions // block_size].long()
        kept = columns.writes.bool()
        blocks, slots = blocks[kept], positions[kept] % block_size
        k[blocks, :, slots] = keyed[kept, heads:].to(k.dtype)
        v[blocks, :, slots] = values[kept].to(v.dtype)
    return keyed[:, :heads]
