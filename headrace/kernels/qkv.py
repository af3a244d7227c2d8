"""Query, key and value of few tokens: product, bias, norms of heads, rotary embedding and KV write
in one."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels import pdl
from headrace.kernels.columns import COLUMNS, StepColumns
from headrace.kernels.launch import launch
from headrace.kernels.product import (
    Config,
    Norm,
    Workspace,
    ahead,
    block_m,
    check,
    columns_a_turn,
    early_columns,
    norm_reference,
    normed,
    prefetch_bytes,
    product,
    scratch,
    staggers,
)
from headrace.kernels.rotary import check_paged, rotary_write_reference
from headrace.kernels.shapes import check_output


@triton.jit
def _places(rows, positions, writes, tables, token, m, width, BLOCK_SIZE: tl.constexpr):
    """-> of each token its position, whether the cache gets its key and value, and which block."""
    position = tl.load(positions + token, mask=token < m, other=0)
    stored = tl.load(writes + token, mask=token < m, other=0) != 0
    row = tl.load(rows + token, mask=stored, other=0).to(tl.int64)
    block = tl.load(tables + row * width + position // BLOCK_SIZE, mask=stored, other=0)
    return position, stored, block


@triton.jit(
    do_not_specialize=["m", "eps", "width", "head_eps"], do_not_specialize_on_alignment=COLUMNS
)
def qkv_kernel(
    x,
    weight,
    bias,
    gain,
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
    partials,
    squares,
    locks,
    m,
    width,
    eps,
    head_eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLIT: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    NORMED: tl.constexpr,
    V_NORMED: tl.constexpr,
    PREFETCH: tl.constexpr,
    EARLY: tl.constexpr,
    STAGGER: tl.constexpr,
    THREADS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (groups of BN / 2 pairs (i, i + HALF) of rows of a head, SPLIT). NORMED: each head of q
    and k goes through a norm of its own, and a group is a head."""
    D: tl.constexpr = 2 * HALF
    PAIRS: tl.constexpr = (HEADS + 2 * KV_HEADS) * HALF
    token = tl.arange(0, BM)
    pair = tl.program_id(0) * (BN // 2) + tl.arange(0, BN // 2)
    inside = pair < PAIRS
    head = pair // HALF
    i = pair % HALF
    keyed = (token < m)[:, None] & (head < HEADS + KV_HEADS)[None, :]  # values are not turned
    if NORMED:
        tl.static_assert(BN == D, "a group is a head")
        own_gain = q_gain if tl.program_id(0) < HEADS else k_gain
        low_gain, high_gain = tl.load(own_gain + i), tl.load(own_gain + i + HALF)
    if EARLY == 0:  # where tokens go and how they turn is on its way while the product is made
        ahead(weight, 2 * PAIRS, K, HALF, BN, BK, SPLIT, PREFETCH, EARLY, THREADS)
        pdl.pass_on(PDL)
        position, stored, block = _places(
            rows, positions, writes, tables, token, m, width, BLOCK_SIZE
        )
        if BM <= 32:  # registers have room for them
            angle = position[:, None].to(tl.int64) * HALF + i[None, :]
            c = tl.load(cos + angle, mask=keyed, other=1.0)
            s = tl.load(sin + angle, mask=keyed, other=0.0)
    acc, live = product(
        x, weight, gain, eps, partials, squares, locks, m, 2 * PAIRS, K, HALF, BM, BN, BK, SPLIT,
        NORM, 0 if EARLY == 0 else PREFETCH, EARLY, STAGGER, THREADS, PDL,
    )  # fmt: skip
    if EARLY > 0:
        pdl.release(PDL)  # product has waited: it is passed on here too
        position, stored, block = _places(
            rows, positions, writes, tables, token, m, width, BLOCK_SIZE
        )
    low, high = tl.split(tl.reshape(acc, (BM, BN // 2, 2)))
    if BIAS:
        low += tl.load(bias + head * D + i, mask=inside, other=0.0).to(tl.float32)[None, :]
        high += tl.load(bias + head * D + i + HALF, mask=inside, other=0.0).to(tl.float32)[None, :]
    if NORMED:
        factor = tl.rsqrt(tl.sum(low * low + high * high, axis=1) / D + head_eps)[:, None]
        gained = tl.program_id(0) < HEADS + KV_HEADS  # values have no weight
        of_values = factor if V_NORMED else 1.0
        low *= tl.where(gained, factor * low_gain.to(tl.float32)[None, :], of_values)
        high *= tl.where(gained, factor * high_gain.to(tl.float32)[None, :], of_values)
    if EARLY > 0 or BM > 32:
        angle = position[:, None].to(tl.int64) * HALF + i[None, :]
        c = tl.load(cos + angle, mask=keyed, other=1.0)
        s = tl.load(sin + angle, mask=keyed, other=0.0)
    first = (low * c - high * s).to(q.dtype.element_ty)
    second = (high * c + low * s).to(q.dtype.element_ty)

    at = (token[:, None] * HEADS + head[None, :]) * D + i[None, :]
    mask = live[:, None] & (head < HEADS)[None, :]
    tl.store(q + at, first, mask=mask)
    tl.store(q + at + HALF, second, mask=mask)

    stored &= live
    slot = position % BLOCK_SIZE
    kv_head = (head - HEADS) % KV_HEADS
    at = block[:, None].to(tl.int64) * KV_HEADS + kv_head[None, :]
    at = (at * BLOCK_SIZE + slot[:, None]) * D + i[None, :]
    is_key = (head >= HEADS) & (head < HEADS + KV_HEADS)
    is_value = (head >= HEADS + KV_HEADS) & inside
    mask = stored[:, None] & is_key[None, :]
    tl.store(k + at, first, mask=mask)
    tl.store(k + at + HALF, second, mask=mask)
    mask = stored[:, None] & is_value[None, :]
    tl.store(v + at, first, mask=mask)
    tl.store(v + at + HALF, second, mask=mask)


def qkv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    columns: StepColumns,
    cos: Tensor,
    sin: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    heads: int,
    norm: Norm | None = None,
    norms: tuple[Tensor, Tensor, float] | None = None,
    v_eps: float = 0.0,
    q: Tensor | None = None,
    config: Config,
    workspace: Workspace | None = None,
    with_pdl: bool = False,
) -> Tensor:
    """x [m, K], weight [(heads + 2 kv_heads) d, K] -> q [m, heads, d], turned; k and v are written.

    cos, sin [max_positions, d / 2] float32; k, v [blocks + 1, kv_heads, block_size, d] are one
    layer of the cache: token t goes to the slot of its position where columns.writes[t] is 1.
    norms = (weight of q [d], of k [d], eps): each head of q and of k goes through an RMSNorm before
    it is turned; config.block_n is d then. v_eps: of v's norm, which has no weight and comes beside
    norms of the same eps; 0 = there is none. The other arguments as in `linear`.
    """
    check(x, weight, norm)
    (m, hidden), (_, kv_heads, block_size, d) = x.shape, k.shape
    assert weight.shape[0] == (heads + 2 * kv_heads) * d, "rows of query, key and value"
    check_paged(columns, cos, sin, k, v, m, x.dtype)
    q = torch.empty(m, heads, d, dtype=x.dtype, device=x.device) if q is None else q
    check_output(q, (m, heads, d))
    tiles = triton.cdiv(weight.shape[0], config.block_n)
    x, gain, eps, fold = normed(x, norm, config, with_pdl)
    q_gain, k_gain, head_eps = (gain, gain, 0.0) if norms is None else norms
    if norms is not None:
        assert config.block_n == d, f"{config.block_n} rows a program, a head has {d}"
        check_output(q_gain, (d,))
        check_output(k_gain, (d,))
    assert v_eps in (0.0, head_eps), "norms of a head have one eps"
    launch(qkv_kernel, (tiles, config.split_k),
        x, weight, x if bias is None else bias, gain, q_gain, k_gain,
        columns.rows, columns.positions, columns.writes, columns.tables, cos, sin, q, k, v,
        *scratch(x, tiles, config, workspace), m, columns.tables.stride(0), eps, head_eps,
        HEADS=heads, KV_HEADS=kv_heads, HALF=d // 2, BLOCK_SIZE=block_size, K=hidden,
        BM=block_m(m), BN=config.block_n, BK=columns_a_turn(x, config), SPLIT=config.split_k,
        BIAS=bias is not None, NORM=fold, NORMED=norms is not None, V_NORMED=v_eps > 0,
        PREFETCH=prefetch_bytes(weight, config, with_pdl),
        EARLY=early_columns(x, config), STAGGER=staggers(config, fold), THREADS=32 * config.warps,
        num_warps=config.warps, num_stages=config.stages, **pdl.options(with_pdl),
    )  # fmt: skip
    return q


def qkv_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    columns: StepColumns,
    cos: Tensor,
    sin: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    heads: int,
    norm: Norm | None = None,
    norms: tuple[Tensor, Tensor, float] | None = None,
    v_eps: float = 0.0,
) -> Tensor:
    """The same in float64 (k and v are written in their own dtype)."""
    y = norm_reference(x, norm) @ weight.double().T
    y = y if bias is None else y + bias.double()
    return rotary_write_reference(y, columns, cos, sin, k, v, heads, norms=norms, v_eps=v_eps)
