"""Attention over the paged cache, in plain torch: what the kernels compute; and what they share.

Kernels: attention_decode.py (one query a token), attention_prefill.py (chunks of queries).
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from headrace.kernels.chunks import Chunks
from headrace.kernels.columns import StepColumns

LOG2E = tl.constexpr(1.4426950408889634)  # softmax in base 2: exp2 is one instruction


def check_layout(q: Tensor, k: Tensor, v: Tensor) -> None:
    """q [T, heads, d], dense but for its row stride; caches contiguous."""
    assert k.is_contiguous(), "cache layout"
    assert v.is_contiguous(), "cache layout"
    assert k.shape == v.shape, (k.shape, v.shape)
    assert q.stride()[1:] == (q.shape[2], 1), "q layout"
    assert q.shape[2] == k.shape[3], (q.shape, k.shape)
    assert q.shape[1] % k.shape[1] == 0, "query heads share KV heads evenly"


def output_like(q: Tensor, out: Tensor | None) -> Tensor:
    """`out`, or a new tensor of q's shape, contiguous."""
    if out is None:
        return torch.empty(q.shape, dtype=q.dtype, device=q.device)
    assert out.is_contiguous(), "out layout"
    assert out.shape == q.shape, (out.shape, q.shape)
    return out


def cached(cache: Tensor, table: Tensor, length: int) -> Tensor:
    """Lines of the first `length` positions of a row -> [kv_heads, length, d].

    cache [blocks, kv_heads, block_size, d]; table [width] block ids.
    """
    blocks = table[: -(-length // cache.shape[2])].long()
    lines = cache[blocks]  # [n, kv_heads, block_size, d]
    return lines.transpose(0, 1).flatten(1, 2)[:, :length]


def attend_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: int,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
) -> Tensor:
    """One sequence in float64: q [n, heads, d] at positions [start, start + n), causal.

    k, v [kv_heads, length, d] from position 0 on, length >= start + n. -> [n, heads, d] float64.
    """
    n, heads, _ = q.shape
    group = heads // k.shape[0]
    keys, values = (x.double().repeat_interleave(group, 0) for x in (k, v))
    scores = torch.einsum("nhd,hld->hnl", q.double(), keys) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    position = torch.arange(start, start + n, device=q.device)[:, None]
    key = torch.arange(k.shape[1], device=q.device)[None]
    if slopes is not None:
        scores = scores + slopes.double()[:, None, None] * (key - position)
    hidden = key > position
    if window > 0:
        hidden |= key <= position - window
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        sink = sinks.double()[:, None, None].expand(heads, n, 1)
        scores = torch.cat((scores, sink), -1)
    weights = scores.softmax(-1)[..., : k.shape[1]]
    return torch.einsum("hnl,hld->nhd", weights, values)


def decode_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    columns: StepColumns,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
) -> Tensor:
    """What `attention_decode.decode` computes, token by token, in float64."""
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    rows, positions = columns.rows.tolist(), columns.positions.tolist()
    for t, (row, position) in enumerate(zip(rows, positions, strict=True)):
        keys, values = (cached(x, columns.tables[row], position + 1) for x in (k, v))
        out[t : t + 1] = attend_reference(
            q[t : t + 1],
            keys,
            values,
            position,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
            slopes=slopes,
        )
    return out


def prefill_reference(
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
    slopes: Tensor | None = None,
) -> Tensor:
    """What `attention_prefill.prefill` computes, chunk by chunk, in float64; NaN elsewhere."""
    out = torch.full(q.shape, torch.nan, dtype=torch.float64, device=q.device)
    columns = (chunks.rows, chunks.starts, chunks.counts, chunks.firsts)
    for row, start, count, first in zip(*(x.tolist() for x in columns), strict=True):
        keys, values = (cached(x, tables[row], start + count) for x in (k, v))
        out[first : first + count] = attend_reference(
            q[first : first + count],
            keys,
            values,
            start,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
            slopes=slopes,
        )
    return out
