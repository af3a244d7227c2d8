"""Decode attention against plain torch in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.kernels.attention import decode_reference
from headrace.kernels.attention_configs import DecodeConfig
from headrace.kernels.attention_decode import Scratch, choose_splits, decode, most_splits
from tests.kernels.attention_cache import Paged, decode_columns, paged
from tests.kernels.conftest import CUDA, assert_close

DEVICE = torch.device("cuda" if CUDA else "cpu")
SMALL = DecodeConfig(tile_keys=16, warps=4, stages=2, min_share_keys=16)


def check(
    lengths: list[int],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    d: int = 16,
    page: int = 16,
    dtype: torch.dtype = torch.float32,
    splits: int = 4,
    padding: int = 0,
    window: int = 0,
    softcap: float = 0.0,
    sinks: bool = False,
    alibi: bool = False,
    config: DecodeConfig | None = SMALL,
    seed: int = 0,
    replays: int = 1,
) -> None:
    """One token a row at its last position, and `padding` tokens of the spare row."""
    generator = torch.Generator().manual_seed(seed)
    cache = paged(
        lengths,
        kv_heads=kv_heads,
        page=page,
        d=d,
        dtype=dtype,
        device=DEVICE,
        generator=generator,
    )
    rows = list(range(len(lengths))) + [len(lengths)] * padding
    columns = decode_columns(cache, rows, [n - 1 for n in lengths] + [0] * padding)
    # q is a part of a wider row, as in the output of a fused projection.
    wide = torch.randn(len(rows), heads + 2 * kv_heads, d, generator=generator)
    q = wide.to(DEVICE, dtype)[:, :heads]
    logits = torch.randn(heads, generator=generator).to(DEVICE, dtype) if sinks else None
    slopes = torch.rand(heads, generator=generator).to(DEVICE) if alibi else None
    extras = {"scale": d**-0.5, "window": window, "softcap": softcap, "sinks": logits}
    extras["slopes"] = slopes
    reference = decode_reference(q, cache.k, cache.v, columns, **extras)
    scratch = Scratch(len(rows), heads, d, kv_heads, splits, DEVICE)
    for tensor in (scratch.outputs, scratch.stats):
        tensor.fill_(torch.nan)
    for _ in range(replays):
        out = torch.full((len(rows), heads, d), torch.nan, dtype=dtype, device=DEVICE)
        result = decode(
            q,
            cache.k,
            cache.v,
            columns,
            **extras,
            splits=splits,
            scratch=scratch,
            out=out,
            config=config,
        )
        assert result is out
        assert_close(out, reference, dtype)
        assert not scratch.arrived.any(), "the next call expects counters of 0"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (10, 2), (34, 2)])
def test_grouped_heads_in_every_dtype(dtype: torch.dtype, heads: int, kv_heads: int) -> None:
    check([1, 17, 75], heads=heads, kv_heads=kv_heads, dtype=dtype)


@pytest.mark.parametrize("d", [16, 64, 80, 96, 256])
def test_head_dimensions(d: int) -> None:
    check([33, 6], d=d)


@pytest.mark.parametrize("page", [1, 8, 16, 32])
def test_block_sizes(page: int) -> None:
    check([40, 5], page=page)


@pytest.mark.parametrize("window", [1, 5, 16, 31, 1000])
def test_window_leaves_old_keys(window: int) -> None:
    check([1, 16, 70], window=window)


def test_soft_cap_and_sinks() -> None:
    check([1, 70, 20], softcap=1.5)
    check([1, 70, 20], sinks=True)
    check([1, 70, 20], softcap=0.7, sinks=True, window=20, dtype=torch.bfloat16)


def test_alibi() -> None:
    check([1, 70, 20], alibi=True, kv_heads=4)
    check([1, 70, 20], alibi=True, window=20, dtype=torch.float16)


def test_padding_tokens_are_the_spare_row() -> None:
    check([50, 3], padding=5)


def test_scratch_is_ready_again_after_each_call() -> None:
    check([75, 40, 1], replays=3, splits=7)


def test_old_keys_behind_a_window_are_not_followed() -> None:
    """Blocks that a window has left may have been given to others: the table forgets them."""
    generator = torch.Generator().manual_seed(1)
    shape = {"kv_heads": 1, "page": 8, "d": 16}
    cache = paged([60], **shape, dtype=torch.float32, device=DEVICE, generator=generator)
    columns = decode_columns(cache, [0], [59])
    q = torch.randn(1, 2, 16, generator=generator).to(DEVICE)
    reference = decode_reference(q, cache.k, cache.v, columns, scale=1.0, window=10)
    cache.tables[0, : 50 // 8] = 2**30
    scratch = Scratch(1, 2, 16, 1, 3, DEVICE)
    out = decode(
        q,
        cache.k,
        cache.v,
        columns,
        scale=1.0,
        window=10,
        splits=3,
        scratch=scratch,
        config=SMALL,
    )
    assert_close(out, reference, torch.float32)


@settings(max_examples=50 if CUDA else 6, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=18),
    splits=st.integers(1, 12),
    padding=st.integers(0, 3),
    window=st.sampled_from([0, 0, 7, 40]),
    seed=st.integers(0, 1000),
)
def test_any_lengths_and_splits(
    lengths: list[int], splits: int, padding: int, window: int, seed: int
) -> None:
    check(lengths, splits=splits, padding=padding, window=window, seed=seed, heads=2, kv_heads=1)


def test_splits_fill_the_card_once() -> None:
    assert choose_splits(kv_heads=8, sms=132, tokens=1) == 16
    assert choose_splits(kv_heads=8, sms=132, tokens=9) == most_splits(8, 132) == 66
    assert choose_splits(kv_heads=1, sms=1, tokens=1) == 4
    assert choose_splits(kv_heads=1000, sms=2, tokens=1) == 1


def test_scratch_that_is_too_small_is_refused() -> None:
    generator = torch.Generator().manual_seed(0)
    shape = {"kv_heads": 1, "page": 8, "d": 16}
    cache = paged([3, 4], **shape, dtype=torch.float32, device=DEVICE, generator=generator)
    small = Scratch(1, 1, 16, 1, 2, DEVICE)
    q = torch.zeros(2, 1, 16, device=DEVICE)
    columns = decode_columns(cache, [0, 1], [2, 3])
    with pytest.raises(AssertionError, match="scratch too small"):
        decode(q, cache.k, cache.v, columns, scale=1.0, splits=2, scratch=small)


@pytest.mark.skipif(not CUDA, reason="no GPU: larger shapes and graph replays run on the card")
class TestOnTheCard:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("d", [64, 80, 128, 256])
    def test_long_contexts(self, dtype: torch.dtype, d: int) -> None:
        lengths = [1, 255, 256, 257, 4200, 100, 8001]
        check(lengths, heads=40, kv_heads=8, d=d, dtype=dtype, splits=33, config=None, replays=2)

    def test_many_tokens(self) -> None:
        lengths = [(37 * i) % 700 + 1 for i in range(300)]
        check(lengths, heads=8, kv_heads=2, d=128, dtype=torch.bfloat16, splits=33, config=None)

    def test_a_graph_replays_at_other_lengths(self) -> None:
        generator = torch.Generator().manual_seed(3)
        lengths = [5000, 900, 1, 333]
        cache = paged(
            lengths,
            kv_heads=4,
            page=16,
            d=128,
            dtype=torch.bfloat16,
            device=DEVICE,
            generator=generator,
        )
        scratch = Scratch(4, 20, 128, 4, 66, DEVICE)
        q = torch.randn(4, 20, 128, generator=generator).to(DEVICE, torch.bfloat16)
        columns = decode_columns(cache, [0, 1, 2, 3], [0, 0, 0, 0])
        out = torch.empty_like(q)

        def run() -> None:
            decode(q, cache.k, cache.v, columns, scale=0.1, splits=66, scratch=scratch, out=out)

        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(3):
                run()
        for share in (0.3, 1.0, 0.01, 0.7):
            positions = [int(share * (n - 1)) for n in lengths]
            columns.positions.copy_(torch.tensor(positions))
            out.fill_(torch.nan)
            graph.replay()
            self._check(q, cache, columns.positions, out)

    def _check(self, q: Tensor, cache: Paged, positions: Tensor, out: Tensor) -> None:
        columns = decode_columns(cache, [0, 1, 2, 3], positions.tolist())
        reference = decode_reference(q, cache.k, cache.v, columns, scale=0.1)
        assert_close(out, reference, torch.bfloat16)
