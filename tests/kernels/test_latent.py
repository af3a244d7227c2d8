"""Latent attention: the write, the ways in and out of the latent space, the decode over it."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels import pdl
from headrace.kernels.attention_prefill import PrefillScratch
from headrace.kernels.chunks import Chunks, Tiling
from headrace.kernels.latent import (
    LatentShape,
    absorb,
    absorb_reference,
    latent_write,
    latent_write_reference,
    value_up,
    value_up_reference,
)
from headrace.kernels.latent_decode import (
    LatentConfig,
    latent_decode,
    latent_decode_reference,
    latent_scratch,
)
from headrace.kernels.latent_dense import (
    DenseKeys,
    LatentDenseConfig,
    gather_lines,
    latent_dense,
    latent_dense_reference,
)
from headrace.kernels.latent_prefill import (
    LatentPrefillConfig,
    latent_prefill,
    latent_prefill_reference,
)
from tests.kernels import paged as small
from tests.kernels.attention_cache import decode_columns, paged
from tests.kernels.conftest import CUDA, assert_close

DTYPES = [torch.float32, torch.float16, torch.bfloat16] if CUDA else [torch.float32, torch.float16]
SHAPES = {
    "even": LatentShape(heads=2, rank=32, nope=16, rope=8, dv=16),
    "odd": LatentShape(heads=3, rank=40, nope=24, rope=8, dv=40),
    "groups": LatentShape(heads=18, rank=16, nope=8, rope=8, dv=8),
}
CONFIG = LatentConfig(tile_keys=16, warps=4, stages=2, min_share_keys=16)


def nan(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device=device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["odd", "groups"])
def test_write(name: str, dtype: torch.dtype, device: torch.device) -> None:
    shape, tokens = SHAPES[name], 5
    torch.manual_seed(3)
    parts = (shape.heads * shape.query, shape.line)
    both = torch.randn(tokens, sum(parts) + 3).to(device, dtype)
    q, kv = both[:, : parts[0]], both[:, parts[0] : sum(parts)]
    norm = torch.randn(shape.rank).to(device, dtype), 1e-6
    cache = small.paged(tokens, 1, shape.line, dtype, device)
    cos, sin = (t[:, : shape.rope // 2].contiguous() for t in (cache.cos, cache.sin))
    expected = cache.k.clone()
    reference = latent_write_reference(q, kv, norm, cache.columns, cos, sin, expected, shape)
    out = nan(tokens, shape.heads, shape.query, dtype=dtype, device=device)
    latent_write(
        q, kv, norm, cache.columns, cos, sin, cache.k, shape, out=out,
        with_pdl=pdl.supported(device),
    )  # fmt: skip
    assert_close(out, reference, dtype)
    assert torch.equal(cache.k.isnan(), expected.isnan()), "only the slots of these tokens"
    assert_close(cache.k.nan_to_num(), expected.nan_to_num(), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "tokens"), [("even", 3), ("odd", 19)])
def test_up_and_down(name: str, tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    shape = SHAPES[name]
    torch.manual_seed(4)
    up = torch.randn(shape.heads * (shape.nope + shape.dv), shape.rank).to(device, dtype)
    q = torch.randn(tokens, shape.heads, shape.query).to(device, dtype)
    out = nan(tokens, shape.heads, shape.line, dtype=dtype, device=device)
    absorb(q, up, shape, out=out, with_pdl=pdl.supported(device))
    assert_close(out, absorb_reference(q, up, shape), dtype)
    sums = torch.randn(tokens, shape.heads, shape.rank).to(device, dtype)
    values = nan(tokens, shape.heads, shape.dv, dtype=dtype, device=device)
    value_up(sums, up, shape, out=values, with_pdl=pdl.supported(device))
    assert_close(values, value_up_reference(sums, up, shape), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("name", "lengths", "splits"),
    [("even", [1, 33, 16, 70], 1), ("odd", [50, 2], 6), ("groups", [19], 3)],
)
def test_decode(
    name: str, lengths: list[int], splits: int, dtype: torch.dtype, device: torch.device
) -> None:
    shape = SHAPES[name]
    rng = torch.Generator().manual_seed(5)
    cache = paged(
        lengths, kv_heads=1, page=8, d=shape.line, dtype=dtype, device=device, generator=rng
    )
    rows = [*range(len(lengths)), len(lengths)]  # and a padding token
    columns = decode_columns(cache, rows, [n - 1 for n in lengths] + [0])
    q = torch.randn(len(rows), shape.heads, shape.line, generator=rng).to(device, dtype)
    scratch = latent_scratch(len(rows), shape, splits, device)
    for tensor in (scratch.outputs, scratch.stats):
        tensor.fill_(torch.nan)
    out = nan(len(rows), shape.heads, shape.rank, dtype=dtype, device=device)
    scale = shape.query**-0.5
    latent_decode(
        q, cache.k, columns, shape, scale=scale, splits=splits, scratch=scratch, out=out,
        config=CONFIG, with_pdl=pdl.supported(device),
    )  # fmt: skip
    assert_close(out, latent_decode_reference(q, cache.k, columns, shape, scale=scale), dtype)
    assert not scratch.arrived.any(), "the next call expects counters of 0"


def chunks_of(
    parts: list[tuple[int, int]], tiling: Tiling, device: torch.device
) -> tuple[Chunks, int]:
    """Chunks of (start, count), the first after one single token -> and the tokens of all."""
    counts = [count for _, count in parts]
    firsts = [1 + sum(counts[:i]) for i in range(len(parts))]
    words = Chunks.plan(range(len(parts)), [start for start, _ in parts], counts, firsts, tiling)
    plan = torch.from_numpy(words).to(device)
    return Chunks.of(plan, len(parts), tiling.rows), 1 + sum(counts)


def check_chunks(
    shape: LatentShape,
    parts: list[tuple[int, int]],
    places: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Both kernels of chunks, which have one meaning."""
    rng = torch.Generator().manual_seed(6)
    lengths = [start + count for start, count in parts]
    cache = paged(
        lengths, kv_heads=1, page=8, d=shape.line, dtype=dtype, device=device, generator=rng
    )
    tables, scale = cache.tables, shape.query**-0.5
    config = LatentPrefillConfig(16, 16, 4, 2)
    tiling = Tiling(shape.heads, 1, config.rows, config.tile_keys, places)
    chunks, tokens = chunks_of(parts, tiling, device)
    q = torch.randn(tokens, shape.heads, shape.line, generator=rng).to(device, dtype)
    scratch = PrefillScratch(tiling, shape.rank, device)
    for tensor in (scratch.outputs, scratch.stats):
        tensor.fill_(torch.nan)
    out = nan(tokens, shape.heads, shape.rank, dtype=dtype, device=device)
    latent_prefill(
        q, cache.k, tables, chunks, shape, scale=scale, scratch=scratch, out=out, config=config,
        with_pdl=pdl.supported(device),
    )  # fmt: skip
    reference = latent_prefill_reference(q, cache.k, tables, chunks, shape, scale=scale)
    assert_close(out[1:], reference[1:], dtype)
    assert out[0].isnan().all(), "a token of no chunk"
    assert not scratch.arrived.any(), "the next call expects counters of 0"

    up = torch.randn(shape.heads * (shape.nope + shape.dv), shape.rank, generator=rng)
    up = (up * shape.rank**-0.5).to(device, dtype)
    dense = LatentDenseConfig(16, 16, 4, 2)
    chunks, _ = chunks_of(parts, Tiling(1, shape.heads, dense.rows, dense.tile_keys, 0), device)
    ends = chunks.starts + chunks.counts
    keys = DenseKeys(chunks, (ends.cumsum(0) - ends).int(), ends, sum(lengths), max(lengths))
    lines = nan(keys.keys, shape.line, dtype=dtype, device=device)
    gather_lines(cache.k, tables, keys, out=lines, with_pdl=pdl.supported(device))
    expanded = (lines[:, : shape.rank] @ up.T).view(keys.keys, shape.heads, -1)
    q = torch.randn(tokens, shape.heads, shape.query, generator=rng).to(device, dtype)
    out = nan(tokens, shape.heads, shape.dv, dtype=dtype, device=device)
    latent_dense(
        q, expanded, lines, keys, shape, scale=scale, out=out, config=dense,
        with_pdl=pdl.supported(device),
    )  # fmt: skip
    reference = latent_dense_reference(q, cache.k, tables, chunks, up, shape, scale=scale)
    assert_close(out[1:], reference[1:], dtype)
    assert out[0].isnan().all(), "a token of no chunk"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("name", "parts", "places"),
    [("even", [(0, 21), (37, 2)], 0), ("odd", [(90, 3)], 4), ("groups", [(7, 2)], 0)],
)
def test_chunks(
    name: str, parts: list[tuple[int, int]], places: int, dtype: torch.dtype, device: torch.device
) -> None:
    check_chunks(SHAPES[name], parts, places, dtype, device)
