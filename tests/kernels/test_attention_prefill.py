"""Prefill attention against plain torch in float64, and the plan of its tiles."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.kernels.attention import prefill_reference
from headrace.kernels.attention_configs import PREFILL_CANDIDATES, PrefillConfig, prefill_config
from headrace.kernels.attention_prefill import prefill
from headrace.kernels.chunks import Chunks
from tests.kernels.attention_cache import paged
from tests.kernels.conftest import CUDA, assert_close

DEVICE = torch.device("cuda" if CUDA else "cpu")
SMALL = PrefillConfig(rows=16, tile_keys=16, warps=4, stages=2)


def check(
    spans: list[tuple[int, int]],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    d: int = 16,
    page: int = 16,
    dtype: torch.dtype = torch.float32,
    window: int = 0,
    softcap: float = 0.0,
    sinks: bool = False,
    config: PrefillConfig | None = SMALL,
    seed: int = 0,
) -> None:
    """spans: (start, count) of each chunk; one token between two chunks belongs to none."""
    generator = torch.Generator().manual_seed(seed)
    cache = paged(
        [start + count for start, count in spans],
        kv_heads=kv_heads,
        page=page,
        d=d,
        dtype=dtype,
        device=DEVICE,
        generator=generator,
    )
    starts, counts = [s for s, _ in spans], [c for _, c in spans]
    firsts = [sum(counts[:i]) + i for i in range(len(spans))]
    rows = list(range(len(spans)))[::-1]
    config = config or prefill_config(dtype, d)
    # Chunk i is in row rows[i]: the lengths of rows follow the chunks in that order.
    plan = Chunks.plan(
        rows,
        [starts[r] for r in rows],
        [counts[r] for r in rows],
        [firsts[r] for r in rows],
        group=heads // kv_heads,
        tile_rows=config.rows,
    )
    chunks = Chunks.of(torch.from_numpy(plan).to(DEVICE), len(spans), config.rows)
    tokens = firsts[-1] + counts[-1]
    wide = torch.randn(tokens, heads + 2 * kv_heads, d, generator=generator)
    q = wide.to(DEVICE, dtype)[:, :heads]
    logits = torch.randn(heads, generator=generator).to(DEVICE, dtype) if sinks else None
    extras = {"scale": d**-0.5, "window": window, "softcap": softcap, "sinks": logits}
    reference = prefill_reference(q, cache.k, cache.v, cache.tables, chunks, **extras)
    out = torch.full(q.shape, torch.nan, dtype=dtype, device=DEVICE)
    result = prefill(q, cache.k, cache.v, cache.tables, chunks, **extras, out=out, config=config)
    assert result is out
    of_none = reference[:, 0, 0].isnan()
    assert out[of_none].isnan().all(), "a token of no chunk was written"
    assert_close(out[~of_none], reference[~of_none], dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (5, 1), (34, 2)])
def test_grouped_heads_in_every_dtype(dtype: torch.dtype, heads: int, kv_heads: int) -> None:
    check([(0, 13), (20, 7), (37, 1)], heads=heads, kv_heads=kv_heads, dtype=dtype)


@pytest.mark.parametrize("d", [16, 80, 96, 256])
def test_head_dimensions(d: int) -> None:
    check([(21, 18)], d=d)


@pytest.mark.parametrize("page", [1, 8, 32])
def test_block_sizes(page: int) -> None:
    check([(0, 19), (9, 11)], page=page)


@pytest.mark.parametrize("window", [1, 5, 16, 31, 1000])
def test_window_leaves_old_keys(window: int) -> None:
    check([(0, 25), (60, 30), (16, 1)], window=window)


def test_soft_cap_and_sinks() -> None:
    check([(0, 18), (30, 9)], softcap=1.5)
    check([(0, 18), (30, 9)], sinks=True)
    check([(0, 18), (30, 9)], softcap=0.7, sinks=True, window=20, dtype=torch.bfloat16)


def test_old_keys_behind_a_window_are_not_followed() -> None:
    """Blocks that a window has left may have been given to others: the table forgets them."""
    generator = torch.Generator().manual_seed(1)
    shape = {"kv_heads": 1, "page": 8, "d": 16}
    cache = paged([60], **shape, dtype=torch.float32, device=DEVICE, generator=generator)
    plan = Chunks.plan([0], [50], [10], [0], group=2, tile_rows=16)
    chunks = Chunks.of(torch.from_numpy(plan).to(DEVICE), 1, 16)
    q = torch.randn(10, 2, 16, generator=generator).to(DEVICE)
    at = (q, cache.k, cache.v, cache.tables, chunks)
    reference = prefill_reference(*at, scale=1.0, window=10)
    cache.tables[0, : 41 // 8] = 2**30
    out = prefill(*at, scale=1.0, window=10, config=SMALL)
    assert_close(out, reference, torch.float32)


@settings(max_examples=10, deadline=None)
@given(
    spans=st.lists(st.tuples(st.integers(0, 50), st.integers(1, 30)), min_size=1, max_size=4),
    window=st.sampled_from([0, 0, 3, 24]),
    seed=st.integers(0, 1000),
)
def test_any_chunks(spans: list[tuple[int, int]], window: int, seed: int) -> None:
    check(spans, window=window, seed=seed, heads=3, kv_heads=1)


@given(
    spans=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 99)), min_size=1, max_size=20),
    group=st.integers(1, 9),
    tile_rows=st.sampled_from([16, 64, 128]),
)
def test_plan_covers_every_row_once_and_puts_long_tiles_first(
    spans: list[tuple[int, int]], group: int, tile_rows: int
) -> None:
    starts, counts = [s for s, _ in spans], [c for _, c in spans]
    firsts = [sum(counts[:i]) for i in range(len(spans))]
    plan = Chunks.plan(range(len(spans)), starts, counts, firsts, group=group, tile_rows=tile_rows)
    assert plan.dtype == np.int32
    chunks = Chunks.of(torch.from_numpy(plan), len(spans), tile_rows)
    assert chunks.firsts.tolist() == firsts
    tiles = [tuple(pair) for pair in chunks.tiles.tolist()]
    expected = {
        (c, i) for c, count in enumerate(counts) for i in range(-(-count * group // tile_rows))
    }
    assert len(tiles) == len(expected)
    assert set(tiles) == expected
    keys = [starts[c] + min((i + 1) * tile_rows // group, counts[c]) for c, i in tiles]
    assert keys == sorted(keys, reverse=True)


@pytest.mark.skipif(not CUDA, reason="no GPU: larger shapes run on the card")
class TestOnTheCard:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("d", [64, 80, 128, 256])
    def test_long_chunks(self, dtype: torch.dtype, d: int) -> None:
        spans = [(0, 1000), (3000, 500), (4099, 1), (255, 257), (0, 1)]
        check(spans, heads=20, kv_heads=4, d=d, dtype=dtype, config=None)

    @pytest.mark.parametrize("config", PREFILL_CANDIDATES, ids=str)
    def test_candidates(self, config: PrefillConfig) -> None:
        spans = [(0, 700), (1500, 333), (77, 1)]
        check(spans, heads=10, kv_heads=2, d=128, dtype=torch.bfloat16, config=config)

    @pytest.mark.parametrize("window", [100, 512])
    def test_window_soft_cap_and_sinks(self, window: int) -> None:
        spans = [(0, 1500), (2000, 700)]
        shape = {"heads": 16, "kv_heads": 4, "d": 64, "window": window}
        check(spans, **shape, dtype=torch.bfloat16, config=None, softcap=20.0, sinks=True)
