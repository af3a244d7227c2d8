"""The choice of a configuration: measured where somebody measured, else a safe default."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from headrace.kernels.product import BUCKETS, Config, block_m, columns_a_turn, shared_bytes
from headrace.kernels.tuned import FOLDER, KINDS, card_file, choose, default, entries, entry

MEASURED = Config(64, 128, 4, 5, 2, 65536, False)


def test_measured_default_and_library(tmp_path: Path) -> None:
    made = [entry("qkv", 7168, 5120, 16, MEASURED), entry("qkv", 7168, 5120, 64, None)]
    card_file("Card X-1", tmp_path).write_text(json.dumps({"entries": made}))
    assert (tmp_path / "card-x-1.json").exists()
    for m in (1, 16):
        assert choose("qkv", m, 7168, 5120, "Card X-1", folder=tmp_path) == MEASURED
    assert choose("qkv", 33, 7168, 5120, "Card X-1", folder=tmp_path) is None
    assert choose("qkv", 32, 7168, 5120, "Card X-1", folder=tmp_path) == default(32, 7168)
    assert choose("out", 1, 7168, 5120, "Card X-1", folder=tmp_path) == default(1, 7168)
    assert choose("qkv", 1, 7168, 5120, "Card Y", folder=tmp_path) is None, "an unknown card"


def test_beyond_these_kernels_the_library() -> None:
    for m in (65, 129):
        assert choose("out", m, 64, 64, "any") is None
    with pytest.raises(AssertionError, match="is none of"):
        choose("matmul", 1, 64, 64, "any")


@pytest.mark.parametrize("m", [1, 17, 64])
@pytest.mark.parametrize("n", [512, 5120, 152064])
def test_two_programs_of_the_default_fit_a_measured_card(m: int, n: int) -> None:
    config = default(m, n)
    assert shared_bytes(config, block_m(m)) <= 105 << 10
    assert config.split_k == 1, "a default needs no workspace"
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.empty(m, 4096, dtype=dtype)
        assert columns_a_turn(x, config) * x.element_size() <= config.block_k * 2


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
