"""The choice of a configuration: measured where somebody measured, else a safe default."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from headrace.kernels.gate_up_tiles import TileConfig
from headrace.kernels.product import (
    BUCKETS,
    Config,
    Workspace,
    block_m,
    columns_a_turn,
    shared_bytes,
)
from headrace.kernels.shapes import power_of_two
from headrace.kernels.tuned import (
    FOLDER,
    KINDS,
    card_file,
    choose,
    choose_tiles,
    default,
    entries,
    entry,
    of_heads,
    tile_entries,
    tile_entry,
)

MEASURED = Config(64, 128, 4, 5, 2, 65536, False)


def test_measured_default_and_library(tmp_path: Path) -> None:
    made = [entry("qkv", 7168, 5120, 16, MEASURED), entry("qkv", 7168, 5120, 64, None)]
    card_file("Card X-1", tmp_path).write_text(json.dumps({"entries": made}))
    assert (tmp_path / "card-x-1.json").exists()
    for m in (1, 16):
        assert choose("qkv", m, 7168, 5120, "Card X-1", folder=tmp_path) == MEASURED
    assert choose("qkv", 33, 7168, 5120, "Card X-1", folder=tmp_path) is None
    assert choose("qkv", 32, 7168, 5120, "Card X-1", folder=tmp_path) == default(32, 7168, 5120)
    assert choose("out", 1, 7168, 5120, "Card X-1", folder=tmp_path) == default(1, 7168, 5120)
    assert choose("qkv", 1, 7168, 5120, "Card Y", folder=tmp_path) is None, "an unknown card"
    heads = of_heads(1, 1024, 512, 128)
    assert choose("qkv", 1, 1024, 512, "Card X-1", normed_head=128, folder=tmp_path) == heads
    assert choose("out", 1, 1024, 512, "Card X-1", normed_head=128, folder=tmp_path) != heads


def test_beyond_these_kernels_the_library() -> None:
    for m in (65, 129):
        assert choose("out", m, 64, 64, "any") is None
    with pytest.raises(AssertionError, match="is none of"):
        choose("matmul", 1, 64, 64, "any")


@pytest.mark.parametrize("m", [1, 17, 64])
@pytest.mark.parametrize(("n", "k"), [(512, 48), (5120, 2048), (2048, 4096), (152064, 5120)])
def test_the_default_fits_a_measured_card(m: int, n: int, k: int) -> None:
    config = default(m, n, k)
    assert shared_bytes(config, block_m(m)) <= 150 << 10
    tiles = -(-n // config.block_n)
    if config.split_k > 1:
        assert tiles * config.split_k <= 256, "split no further than the card"
        assert Workspace(torch.device("cpu")).fits(tiles, block_m(m), config)
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.empty(m, 4096, dtype=dtype)
        assert columns_a_turn(x, config) * x.element_size() <= config.block_k * 2


@pytest.mark.parametrize("k", [16, 48, 53, 640, 2048, 5120])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256])
def test_programs_of_a_head(head_dim: int, k: int) -> None:
    config = of_heads(3, 6 * head_dim, k, head_dim)
    if head_dim == 80:  # no power of two
        assert config is None
        return
    assert config is not None
    sizes = (config.block_n, config.block_k, config.warps, config.split_k)
    assert all(size == power_of_two(size) for size in sizes), "as kernels take them"
    assert config.block_n == head_dim
    assert shared_bytes(config, 16) <= 150 << 10
    assert of_heads(33, 6 * head_dim, k, head_dim) is None


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_files_of_cards(path: Path) -> None:
    assert path == card_file(json.loads(path.read_text())["card"])
    for (kind, n, k, bucket), config in entries(path).items():
        assert kind in KINDS
        assert min(n, k) > 0
        assert bucket in BUCKETS
        if config is not None:
            for size in (config.block_n, config.block_k, config.warps):
                assert size & (size - 1) == 0, "powers of two"


def test_tiles_from_a_number_of_tokens_on(tmp_path: Path) -> None:
    few, many = TileConfig(stages=3), TileConfig()
    made = [tile_entry(96, 64, at, config) for at, config in ((129, None), (768, many), (64, few))]
    card_file("Card X-1", tmp_path).write_text(json.dumps({"entries": [], "tiles": made}))
    by_tokens = {63: None, 64: few, 128: few, 129: None, 767: None, 768: many, 8192: many}
    for tokens, config in by_tokens.items():
        assert choose_tiles(tokens, 96, 64, "Card X-1", folder=tmp_path) == config
    assert choose_tiles(768, 96, 32, "Card X-1", folder=tmp_path) is None, "another shape"
    assert choose_tiles(768, 96, 64, "Card Y", folder=tmp_path) is None, "an unknown card"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_tiles_of_cards_fit_their_memory(path: Path) -> None:
    for of_shape in tile_entries(path).values():
        for _, config in of_shape:
            if config is not None:
                turn = (config.tokens + 2 * config.columns) * config.depth * 2
                out = config.tokens * config.columns * 2
                assert turn * config.stages + out <= 227 << 10, "of Hopper's shared memory"
