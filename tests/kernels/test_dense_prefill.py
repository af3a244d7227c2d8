"""Gather, merge, and prefill by torch's attention, against plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headrace.kernels.attention import attend_reference, cached
from headrace.kernels.dense_prefill import (
    Attend,
    Buffer,
    Span,
    cudnn,
    dense,
    flash,
    gather,
    gather_reference,
    merge,
    merge_reference,
)
from tests.kernels.attention_cache import Paged, paged
from tests.kernels.conftest import CUDA, assert_close

DEVICE = torch.device("cuda" if CUDA else "cpu")


def on_the_cpu(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Torch's flash attention of the CPU, which wants as many KV heads as heads."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, scale=scale
    )
    return out, lse


def cache_of(lengths: list[int], kv_heads: int, d: int, dtype: torch.dtype) -> Paged:
    generator = torch.Generator().manual_seed(5)
    return paged(
        lengths,
        kv_heads=kv_heads,
        page=8,
        d=d,
        dtype=dtype,
        device=DEVICE,
        generator=generator,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("d", "length"), [(16, 1), (80, 29), (64, 130)])
def test_gather(dtype: torch.dtype, d: int, length: int) -> None:
    cache = cache_of([7, length, 3], 3, d, dtype)
    out_k, out_v = torch.full((2, 3, length + 5, d), torch.nan, dtype=dtype, device=DEVICE)
    gather(cache.k, cache.v, cache.tables, 1, length, out_k, out_v)
    for out, source in ((out_k, cache.k), (out_v, cache.v)):
        assert torch.equal(out[:, :length], gather_reference(source, cache.tables, 1, length))
        assert out[:, length:].isnan().all(), "past the end"
    gather(cache.k, cache.v, cache.tables, 1, length, out_k, out_v, padded=length + 3)
    for out, source in ((out_k, cache.k), (out_v, cache.v)):
        assert torch.equal(out[:, :length], gather_reference(source, cache.tables, 1, length))
        assert (out[:, length : length + 3] == 0).all()
        assert out[:, length + 3 :].isnan().all(), "past the padding"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "heads", "d"), [(1, 1, 16), (7, 5, 80), (33, 3, 64)])
def test_merge(dtype: torch.dtype, n: int, heads: int, d: int) -> None:
    generator = torch.Generator().manual_seed(n)
    a = torch.randn(heads, n, d, generator=generator).to(DEVICE, dtype).transpose(0, 1)
    b = torch.randn(n, heads, d, generator=generator).to(DEVICE, dtype)
    lse = 30 * torch.randn(2, heads, n, generator=generator).to(DEVICE)
    out = torch.full((n, heads, d), torch.nan, dtype=dtype, device=DEVICE)
    merge(a, lse[0], b, lse[1], out)
    assert_close(out, merge_reference(a, lse[0], b, lse[1]), dtype)


def check_dense(spans: list[Span], attend: Attend, d: int, dtype: torch.dtype) -> None:
    heads, kv_heads = 6, 2
    lengths = [0] * len(spans)
    for span in spans:
        lengths[span.row] = span.start + span.count
    cache = cache_of(lengths, kv_heads, d, dtype)
    tokens = max(span.first + span.count for span in spans)
    generator = torch.Generator().manual_seed(6)
    q = torch.randn(tokens, heads + 4, d, generator=generator).to(DEVICE, dtype)[:, :heads]
    out = torch.full(q.shape, torch.nan, dtype=dtype, device=DEVICE)
    buffer = Buffer(max(lengths) + 3, kv_heads, d, dtype, DEVICE)
    at = (q, cache.k, cache.v, cache.tables)
    dense(*at, spans, scale=0.2, attend=attend, buffer=buffer, out=out)
    for span in spans:
        ours = slice(span.first, span.first + span.count)
        table = cache.tables[span.row]
        keys, values = (cached(x, table, lengths[span.row]) for x in (cache.k, cache.v))
        reference = attend_reference(q[ours], keys, values, span.start, scale=0.2)
        assert_close(out[ours], reference, dtype)


@pytest.mark.skipif(CUDA, reason="torch's attention of the CPU, beside our kernels there")
def test_chunks_with_and_without_context() -> None:
    spans = [Span(1, 0, 19, 0), Span(0, 40, 9, 19), Span(2, 5, 1, 28)]
    check_dense(spans, on_the_cpu, 16, torch.float32)


@pytest.mark.skipif(not CUDA, reason="no GPU: flash and cuDNN attention run on the card")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("attend", [flash, cudnn])
def test_attention_of_the_card(attend: Attend, d: int, dtype: torch.dtype) -> None:
    spans = [Span(1, 0, 1900, 0), Span(0, 1000, 300, 1900), Span(2, 5, 1, 2200)]
    check_dense(spans, attend, d, dtype)
