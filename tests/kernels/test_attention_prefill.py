"""Prefill attention against plain torch in float64, and the plan of its tiles."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.kernels.attention import prefill_reference
from headrace.kernels.attention_configs import PREFILL_CANDIDATES, PrefillConfig, prefill_config
from headrace.kernels.attention_prefill import PrefillScratch, prefill
from headrace.kernels.chunks import TILE_WORDS, Chunks, Tiling, choose_parts
from tests.kernels.attention_cache import paged
from tests.kernels.conftest import CUDA, assert_close

DEVICE = torch.device("cuda" if CUDA else "cpu")
SMALL = PrefillConfig(rows=16, tile_keys=16, warps=4, stages=2)


def check(spans: list[tuple[int, int]], **options: Any) -> None:
    """See `checked`."""
    checked(spans, **options)


def checked(
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
    alibi: bool = False,
    config: PrefillConfig | None = SMALL,
    seed: int = 0,
    places: int = 0,
) -> Chunks:
    """spans: (start, count) of each chunk; one token between two chunks belongs to none. places: of
    the card that the plan is for, 0: tiles stay whole."""
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
    tiling = Tiling(heads // kv_heads, kv_heads, config.rows, config.tile_keys, places)
    # Chunk i is in row rows[i]: the lengths of rows follow the chunks in that order.
    plan = Chunks.plan(
        rows,
        [starts[r] for r in rows],
        [counts[r] for r in rows],
        [firsts[r] for r in rows],
        tiling,
    )
    chunks = Chunks.of(torch.from_numpy(plan).to(DEVICE), len(spans), config.rows)
    tokens = firsts[-1] + counts[-1]
    wide = torch.randn(tokens, heads + 2 * kv_heads, d, generator=generator)
    q = wide.to(DEVICE, dtype)[:, :heads]
    logits = torch.randn(heads, generator=generator).to(DEVICE, dtype) if sinks else None
    slopes = torch.rand(heads, generator=generator).to(DEVICE) if alibi else None
    extras = {"scale": d**-0.5, "window": window, "softcap": softcap, "sinks": logits}
    extras["slopes"] = slopes
    reference = prefill_reference(q, cache.k, cache.v, cache.tables, chunks, **extras)
    out = torch.full(q.shape, torch.nan, dtype=dtype, device=DEVICE)
    extras |= {"scratch": PrefillScratch(tiling, d, DEVICE), "config": config}
    for _ in range(2):  # the second call finds the scratch as the first left it
        out.fill_(torch.nan)
        extras["scratch"].outputs.fill_(torch.nan)
        extras["scratch"].stats.fill_(torch.nan)
        result = prefill(q, cache.k, cache.v, cache.tables, chunks, **extras, out=out)
        assert result is out
        assert not extras["scratch"].arrived.any()
        if not (chunks.tiles[:, 3] > 1).any():
            break
    of_none = reference[:, 0, 0].isnan()
    assert out[of_none].isnan().all(), "a token of no chunk was written"
    assert_close(out[~of_none], reference[~of_none], dtype)
    return chunks


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


def test_alibi() -> None:
    check([(0, 18), (30, 9)], alibi=True)
    check([(0, 18), (30, 9)], alibi=True, window=20, dtype=torch.float16)


def test_old_keys_behind_a_window_are_not_followed() -> None:
    """Blocks that a window has left may have been given to others: the table forgets them."""
    generator = torch.Generator().manual_seed(1)
    shape = {"kv_heads": 1, "page": 8, "d": 16}
    cache = paged([60], **shape, dtype=torch.float32, device=DEVICE, generator=generator)
    tiling = Tiling(group=2, kv_heads=1, rows=16, keys=16, places=0)
    plan = Chunks.plan([0], [50], [10], [0], tiling)
    chunks = Chunks.of(torch.from_numpy(plan).to(DEVICE), 1, 16)
    q = torch.randn(10, 2, 16, generator=generator).to(DEVICE)
    at = (q, cache.k, cache.v, cache.tables, chunks)
    reference = prefill_reference(*at, scale=1.0, window=10)
    cache.tables[0, : 41 // 8] = 2**30
    scratch = PrefillScratch(tiling, 16, DEVICE)
    out = prefill(*at, scale=1.0, scratch=scratch, window=10, config=SMALL)
    assert_close(out, reference, torch.float32)


def test_padding_tiles_do_nothing() -> None:
    generator = torch.Generator().manual_seed(2)
    shape = {"kv_heads": 2, "page": 8, "d": 16}
    cache = paged([40, 30], **shape, dtype=torch.float32, device=DEVICE, generator=generator)
    tiling = Tiling(group=2, kv_heads=2, rows=16, keys=16, places=0)
    words = torch.from_numpy(Chunks.plan([0, 1], [20, 0], [20, 30], [0, 20], tiling))
    padding = torch.tensor([-1, *[2**30] * (TILE_WORDS - 1)] * 3, dtype=torch.int32)
    real = Chunks.of(words.to(DEVICE), 2, 16)
    padded = Chunks.of(torch.cat((words, padding)).to(DEVICE), 2, 16)
    assert len(padded.tiles) == len(real.tiles) + 3
    q = torch.randn(50, 4, 16, generator=generator).to(DEVICE)
    at = (q, cache.k, cache.v, cache.tables)
    out = torch.full(q.shape, torch.nan, device=DEVICE)
    scratch = PrefillScratch(tiling, 16, DEVICE)
    prefill(*at, padded, scale=0.3, scratch=scratch, out=out, config=SMALL)
    assert_close(out, prefill_reference(*at, real, scale=0.3), torch.float32)
    nothing = Chunks.of(torch.cat((words[:8], padding)).to(DEVICE), 2, 16)
    out = torch.full(q.shape, torch.nan, device=DEVICE)
    prefill(*at, nothing, scale=0.3, scratch=scratch, out=out, config=SMALL)
    assert out.isnan().all()


@settings(max_examples=10, deadline=None)
@given(
    spans=st.lists(st.tuples(st.integers(0, 50), st.integers(1, 30)), min_size=1, max_size=4),
    window=st.sampled_from([0, 0, 3, 24]),
    seed=st.integers(0, 1000),
)
def test_any_chunks(spans: list[tuple[int, int]], window: int, seed: int) -> None:
    check(spans, window=window, seed=seed, heads=3, kv_heads=1)


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_tiles_in_parts(dtype: torch.dtype, window: int) -> None:
    """Few tiles for many places: the keys of each are dealt to several programs."""
    options: dict[str, Any] = {"heads": 2, "kv_heads": 1, "places": 20, "sinks": True}
    chunks = checked([(250, 20), (3, 9)], dtype=dtype, window=window, **options)
    assert chunks.tiles[:, 3].max() > 2
    assert chunks.tiles[:, 3].min() == 1


@given(
    spans=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 99)), min_size=1, max_size=20),
    group=st.integers(1, 9),
    tile_rows=st.sampled_from([16, 64, 128]),
    places=st.sampled_from([0, 3, 16, 50, 400]),
)
def test_plan_covers_every_row_and_key_once_and_puts_long_tiles_first(
    spans: list[tuple[int, int]], group: int, tile_rows: int, places: int
) -> None:
    starts, counts = [s for s, _ in spans], [c for _, c in spans]
    firsts = [sum(counts[:i]) for i in range(len(spans))]
    tiling = Tiling(group, 2, tile_rows, 16, places)
    plan = Chunks.plan(range(len(spans)), starts, counts, firsts, tiling)
    assert plan.dtype == np.int32
    assert plan.size <= tiling.words(sum(counts), len(spans))
    chunks = Chunks.of(torch.from_numpy(plan), len(spans), tile_rows)
    assert chunks.firsts.tolist() == firsts
    tiles = [tuple(words) for words in chunks.tiles.tolist()]
    of_tile: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for c, i, *part in tiles:
        of_tile.setdefault((c, i), []).append(tuple(part))
    assert set(of_tile) == {
        (c, i) for c, count in enumerate(counts) for i in range(-(-count * group // tile_rows))
    }
    slots: list[int] = []
    for parts in of_tile.values():
        n, slot = len(parts), parts[0][2]
        assert parts == [(part, n, slot) for part in range(n)]
        slots += range(slot, slot + n) if n > 1 else []
    assert len(slots) == len(set(slots))
    assert max(slots, default=-1) < tiling.max_parts
    keys = [starts[c] + min(-(-(i + 1) * tile_rows // group), counts[c]) for c, i in of_tile]
    assert keys == sorted(keys, reverse=True)


def test_which_tiles_are_cut() -> None:
    """Of 132 places: 35 equal tiles of 8 heads fill them twice; the last two tiles are cut."""
    card = Tiling(group=5, kv_heads=8, rows=128, keys=64, places=132)
    assert choose_parts([126] * 35, card) == [1] * 33 + [8] * 2
    assert choose_parts([126] * 33, card) == [1] * 33
    assert choose_parts(list(range(313, 0, -1)), card) == [1] * 313, "many small ones at the end"
    assert choose_parts([4] * 3, card) == [1] * 3, "too short"
    assert choose_parts([100] * 2, card) == [8] * 2


@pytest.mark.skipif(not CUDA, reason="no GPU: larger shapes run on the card")
class TestOnTheCard:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("d", [64, 80, 128, 256])
    def test_long_chunks(self, dtype: torch.dtype, d: int) -> None:
        spans = [(0, 1000), (3000, 500), (4099, 1), (255, 257), (0, 1)]
        check(spans, heads=20, kv_heads=4, d=d, dtype=dtype, config=None)

    @pytest.mark.parametrize("places", [60, 132, 1000])
    def test_parts(self, places: int) -> None:
        shape: dict[str, Any] = {"heads": 40, "kv_heads": 8, "d": 128, "places": places}
        for spans in ([(4000, 300)], [(2000, 900), (3000, 60)], [(2500, 7)]):
            chunks = checked(spans, **shape, dtype=torch.bfloat16, config=None)
        assert chunks.tiles[:, 3].max() > 1, "one tile of queries would leave most places empty"

    @pytest.mark.parametrize("config", PREFILL_CANDIDATES, ids=str)
    def test_candidates(self, config: PrefillConfig) -> None:
        spans = [(0, 700), (1500, 333), (77, 1)]
        check(spans, heads=10, kv_heads=2, d=128, dtype=torch.bfloat16, config=config)

    @pytest.mark.parametrize("window", [100, 512])
    def test_window_soft_cap_and_sinks(self, window: int) -> None:
        spans = [(0, 1500), (2000, 700)]
        shape = {"heads": 16, "kv_heads": 4, "d": 64, "window": window}
        check(spans, **shape, dtype=torch.bfloat16, config=None, softcap=20.0, sinks=True)
