"""Prefill by torch's own attention kernels, which want K and V dense: gather, attend, merge.

A chunk behind cached context is two calls: all of it over the context (no mask), and over
itself (causal); their outputs are merged by their log-sum-exp, as in flash decoding. No window,
soft-cap or sinks: those are `attention_prefill.prefill`'s.

cuDNN plans anew for every shape that it has not seen, on the host, in milliseconds: it is for
callers whose chunk lengths repeat. Flash has no such cost.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.attention import check_layout, output_like
from headrace.kernels.launch import launch

# q [1, heads, n, d], k and v [1, kv_heads, s, d], causal, scale ->
# output [1, heads, n, d] and log-sum-exp (natural) of heads * n elements in that order.
Attend = Callable[[Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor]]


def flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """FlashAttention 2 of torch: bfloat16 and float16, head_dim a multiple of 8 up to 256."""
    results = torch.ops.aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, causal, False, scale=scale
    )
    return results[0], results[1]


def cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """cuDNN's attention: bfloat16 and float16, head_dim a multiple of 8 up to 128."""
    results = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )
    return results[0], results[1]


@dataclasses.dataclass(frozen=True)
class Span:
    """Positions [start, start + count) of the sequence in device row `row`; queries from `first`
    on. The host's view of one chunk of `Chunks`."""

    row: int
    start: int
    count: int
    first: int


class Buffer:
    """Dense K and V of one sequence: k, v [kv_heads, tokens, head_dim]; calls share it in turn."""

    def __init__(
        self,
        tokens: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (2, kv_heads, tokens, head_dim)
        self.k, self.v = torch.empty(shape, dtype=dtype, device=device)


@triton.jit(
    do_not_specialize=["row", "width", "length", "padded", "capacity"],
    do_not_specialize_on_alignment=["tables"],
)
def _gather_kernel(
    k,  # [blocks, KV_HEADS, PAGE, D], contiguous
    v,
    tables,  # [rows, width]
    out_k,  # [KV_HEADS, capacity, D]
    out_v,
    row,
    width,
    length,
    padded,
    capacity,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    TILE: tl.constexpr,
):
    kv_head = tl.program_id(0) % KV_HEADS
    position = tl.program_id(0) // KV_HEADS * TILE + tl.arange(0, TILE)
    d = tl.arange(0, D_PAD)
    table = tables + row.to(tl.int64) * width
    block = tl.load(table + position // PAGE, mask=position < length, other=0).to(tl.int64)
    line = block * (KV_HEADS * PAGE * D) + (kv_head * (PAGE * D) + position % PAGE * D)
    inside = (position < length)[:, None] & (d < D)[None, :]
    written = (position < padded)[:, None] & (d < D)[None, :]
    source = line[:, None] + d[None, :]
    target = (kv_head * capacity.to(tl.int64) + position)[:, None] * D + d[None, :]
    tl.store(out_k + target, tl.load(k + source, mask=inside, other=0.0), mask=written)
    tl.store(out_v + target, tl.load(v + source, mask=inside, other=0.0), mask=written)


def gather(
    k: Tensor,
    v: Tensor,
    tables: Tensor,
    row: int,
    length: int,
    out_k: Tensor,
    out_v: Tensor,
    *,
    padded: int | None = None,
) -> None:
    """Copy the first `length` positions of a row out of the paged cache.

    k, v [blocks, kv_heads, block_size, d]; tables [rows, width]; out_k, out_v
    [kv_heads, >= length, d], contiguous. Positions [length, padded) are set to zero.
    """
    _, kv_heads, page, d = k.shape
    padded = length if padded is None else padded
    assert 0 < length <= padded <= out_k.shape[1], (length, padded, out_k.shape)
    assert out_k.is_contiguous(), "out layout"
    assert out_v.is_contiguous(), "out layout"
    assert out_k.shape == out_v.shape, (out_k.shape, out_v.shape)
    tile = 64
    launch(
        _gather_kernel,
        (triton.cdiv(padded, tile) * kv_heads,),
        k,
        v,
        tables,
        out_k,
        out_v,
        row,
        tables.shape[1],
        length,
        padded,
        out_k.shape[1],
        KV_HEADS=kv_heads,
        PAGE=page,
        D=d,
        D_PAD=triton.next_power_of_2(d),
        TILE=tile,
    )


def gather_reference(cache: Tensor, tables: Tensor, row: int, length: int) -> Tensor:
    """-> [kv_heads, length, d]."""
    position = torch.arange(length, device=cache.device)
    blocks = tables[row].long()[position // cache.shape[2]]
    return cache[blocks, :, position % cache.shape[2]].transpose(0, 1).contiguous()


@triton.jit(
    do_not_specialize=["n"],  # strides divide by 16: their loads are wide
    do_not_specialize_on_alignment=["a_lse", "b_lse"],
)
def _merge_kernel(
    a,  # [n, HEADS, D], strides a_token, a_head, 1
    b,
    a_lse,  # [HEADS, n]
    b_lse,
    out,  # [n, HEADS, D], contiguous
    n,
    a_token,
    a_head,
    b_token,
    b_head,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    TILE: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)  # token * HEADS + head
    token, head = line // HEADS, line % HEADS
    d = tl.arange(0, D_PAD)
    here = token < n
    inside = here[:, None] & (d < D)[None, :]
    la = tl.load(a_lse + head * n + token, mask=here, other=0.0)
    lb = tl.load(b_lse + head * n + token, mask=here, other=0.0)
    # Weights exp(la) / (exp(la) + exp(lb)) and its complement; the larger exponent is 0.
    ea, eb = tl.exp(la - tl.maximum(la, lb)), tl.exp(lb - tl.maximum(la, lb))
    x = tl.load(a + (token * a_token + head * a_head)[:, None] + d[None, :], mask=inside, other=0)
    y = tl.load(b + (token * b_token + head * b_head)[:, None] + d[None, :], mask=inside, other=0)
    merged = x.to(tl.float32) * (ea / (ea + eb))[:, None]
    merged += y.to(tl.float32) * (eb / (ea + eb))[:, None]
    tl.store(out + line[:, None] * D + d[None, :], merged.to(out.dtype.element_ty), mask=inside)


def merge(a: Tensor, a_lse: Tensor, b: Tensor, b_lse: Tensor, out: Tensor) -> None:
    """Attention over two disjoint sets of keys as one.

    a, b [n, heads, d], dense in d: outputs over either set; a_lse, b_lse [heads, n] float32: their
    log-sum-exp; out [n, heads, d], contiguous.
    """
    n, heads, d = out.shape
    assert a.shape == b.shape == out.shape, (a.shape, b.shape, out.shape)
    assert a_lse.shape == b_lse.shape == (heads, n), (a_lse.shape, b_lse.shape)
    assert a.stride(2) == b.stride(2) == 1, "outputs dense in d"
    assert out.is_contiguous(), "out layout"
    tile = 16
    launch(
        _merge_kernel,
        (triton.cdiv(n * heads, tile),),
        a,
        b,
        a_lse.contiguous(),
        b_lse.contiguous(),
        out,
        n,
        a.stride(0),
        a.stride(1),
        b.stride(0),
        b.stride(1),
        HEADS=heads,
        D=d,
        D_PAD=triton.next_power_of_2(d),
        TILE=tile,
    )


def merge_reference(a: Tensor, a_lse: Tensor, b: Tensor, b_lse: Tensor) -> Tensor:
    """-> [n, heads, d] float64."""
    weights = torch.stack((a_lse, b_lse)).double().softmax(0).transpose(1, 2)[..., None]
    return a.double() * weights[0] + b.double() * weights[1]


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: Tensor,
    spans: Sequence[Span],
    *,
    scale: float,
    attend: Attend,
    buffer: Buffer,
    out: Tensor | None = None,
) -> Tensor:
    """What `attention_prefill.prefill` computes without its switches; K and V are in the cache.

    q [T, heads, d]; k, v [blocks, kv_heads, block_size, d]; tables [rows, width] int32; `attend`
    is `flash` or `cudnn`; `buffer` holds the longest span's context and itself.
    -> out [T, heads, d], new where None; tokens of no span are left as they are.
    """
    check_layout(q, k, v)
    out = output_like(q, out)
    for span in spans:
        start, end = span.start, span.start + span.count
        gather(k, v, tables, span.row, end, buffer.k, buffer.v)
        own_q = _batched(q[span.first : span.first + span.count])
        target = out[span.first : span.first + span.count]
        keys, values = (x[None, :, start:end] for x in (buffer.k, buffer.v))
        own, own_lse = attend(own_q, keys, values, True, scale)
        if start == 0:
            target.copy_(own[0].transpose(0, 1))
            continue
        keys, values = (x[None, :, :start] for x in (buffer.k, buffer.v))
        old, old_lse = attend(own_q, keys, values, False, scale)
        heads = q.shape[1]
        merge(
            old[0].transpose(0, 1),
            old_lse.reshape(heads, span.count),
            own[0].transpose(0, 1),
            own_lse.reshape(heads, span.count),
            target,
        )
    return out


def _batched(x: Tensor) -> Tensor:
    """[n, heads, d] -> [1, heads, n, d], a view."""
    return x.transpose(0, 1)[None]
