"""The tuner on a tiny shape with a clock that does not measure: what it tries, keeps and writes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.kernels import tune
from benchmarks.kernels.candidates import candidates, worth
from benchmarks.kernels.layers import Shape
from benchmarks.kernels.tune import Tuner, merged, run
from headrace.kernels.gate_up_tiles import TileConfig
from headrace.kernels.product import Config
from headrace.kernels.tuned import (
    KINDS,
    card_file,
    choose,
    choose_tiles,
    default,
    entries,
    tile_entry,
)

TINY = Shape(hidden=32, heads=2, kv_heads=1, head_dim=16, ffn=32, vocab=48)


class Counter:
    """Runs what it is given once and says the next number."""

    def __init__(self, numbers: Iterator[int]) -> None:
        self.numbers = numbers

    def __call__(self, launches: Callable[[], Any], replays: int) -> float:
        launches()
        return float(next(self.numbers))


BUCKETS = {16: (3,), 32: (17,)}


def tuner(device: torch.device, numbers: Iterator[int]) -> Tuner:
    return Tuner(TINY, torch.float16, device, clock=Counter(numbers), buckets=BUCKETS)


def test_what_is_written_is_chosen(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "copies", lambda n, k, element_bytes: 1)
    numbers = itertools.count(10_000, -1)  # later is faster: ours, and the last variants
    made = run(tuner(device, numbers), most=2, layers=1, card="Card X")
    path = card_file("Card X", tmp_path)
    path.write_text(json.dumps(merged(made, path)))
    assert len(made["entries"]) == len(KINDS) * len(BUCKETS)
    for kind, (n, k) in TINY.matrices().items():
        config = choose(kind, 3, n, k, "Card X", folder=tmp_path)
        assert config is not None
        assert config.prefetch_bytes == 131072
        assert not config.fold_norm, "the last variant was the fastest"
    rates = made["chain"]["terabytes_per_s"]
    assert set(rates["library"]) == {3, 17}


def test_a_faster_library_is_kept(device: torch.device) -> None:
    slow = tuner(device, itertools.count(1))
    for outcome in slow.tune("out", slow.weights("out", 2), most=1):
        assert outcome.config is None
        assert outcome.best == default(outcome.bucket, outcome.n, outcome.k)
        assert outcome.error < 2e-3
        assert outcome.json()["config"] is None


def test_a_wrong_product_is_caught(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tuner(device, itertools.count(1))
    monkeypatch.setattr(made.steps[17], "reference", lambda *_: torch.ones(17, 32, device=device))
    with pytest.raises(AssertionError, match="relative error"):
        made.check("out", made.weights("out", 1)[0], default(32, 32, 32), 32)


def test_other_shapes_stay_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "card.json"
    old = [{"kind": "out", "n": n, "k": 8, "bucket": 16, "config": None} for n in (8, 16)]
    path.write_text(json.dumps({"entries": old}))
    new = {"kind": "out", "n": 16, "k": 8, "bucket": 16, "config": {"block_n": 1}}
    assert merged({"entries": [new]}, path)["entries"] == [old[0], new]


def test_tiles_of_a_shape_are_replaced_together(tmp_path: Path) -> None:
    """A number of tokens that has no entry any more is for the one below it."""
    path = card_file("Card X", tmp_path)
    old = [tile_entry(96, 64, at, TileConfig()) for at in (112, 768)]
    other = tile_entry(96, 32, 112, TileConfig())
    path.write_text(json.dumps(merged({"tiles": [*old, other]}, path)))
    path.write_text(json.dumps(merged({"tiles": [tile_entry(96, 64, 128, None)]}, path)))
    for tokens in (112, 128, 768):
        assert choose_tiles(tokens, 96, 64, "Card X", folder=tmp_path) is None
    assert choose_tiles(112, 96, 32, "Card X", folder=tmp_path) == TileConfig()
    assert entries(path) == {}, "of its other kernels nothing was measured"


@pytest.mark.parametrize("bucket", [16, 32, 64, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_candidates_of_a_real_shape(kind: str, bucket: int) -> None:
    n, k = Shape().matrices()[kind]
    made = candidates(bucket, n, k, most=48)
    assert made[0] == default(bucket, n, k)
    assert 20 <= len(made) <= 48
    assert len(set(made)) == len(made)
    assert made == candidates(bucket, n, k, most=48)


def test_what_cannot_be_fast_is_not_tried() -> None:
    assert worth(Config(32, 256, 4, 4), 16, 5120, 5120)
    assert not worth(Config(64, 128, 4, 4), 16, 5120, 5120), "80 programs for 132 multiprocessors"
    assert worth(Config(64, 128, 4, 6, 2), 16, 5120, 5120)
    assert not worth(Config(64, 512, 4, 8), 16, 27648, 5120), "more than there is shared memory"
    assert not worth(Config(16, 64, 4, 8), 16, 27648, 5120), "tiles too small"
