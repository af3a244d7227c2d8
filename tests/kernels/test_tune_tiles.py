"""What the tuner of gate and up keeps, by a clock that does not measure."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from benchmarks.kernels import tiles
from headrace.kernels.gate_up_tiles import TileConfig

FIRST, SECOND = TileConfig(), TileConfig(stages=3)


@dataclasses.dataclass
class Layer:
    """Remembers what ran last."""

    ran: str = ""
    error_of: float = 1e-3

    def library(self) -> None:
        self.ran = "library"

    def ours(self, config: TileConfig) -> None:
        self.ran = str(config)

    def error(self, config: TileConfig) -> float:
        return self.error_of


def kept(
    monkeypatch: pytest.MonkeyPatch, layer: Layer, us: dict[str, float], before: TileConfig | None
) -> TileConfig | None:
    def lasting_us(run: Any, once_ms: float) -> float:
        run()
        return us.get(layer.ran, 200.0)

    monkeypatch.setattr(tiles, "once_ms", lambda run: 1.0)
    monkeypatch.setattr(tiles, "lasting_us", lasting_us)
    config, seen = tiles.measure(layer, 512, before)  # type: ignore[arg-type]
    assert set(seen) == {"library", *map(str, tiles.CANDIDATES)}
    return config


def test_the_fastest_unless_another_is_as_good(monkeypatch: pytest.MonkeyPatch) -> None:
    us = {"library": 120.0, str(FIRST): 100.0, str(SECOND): 100.9}
    assert kept(monkeypatch, Layer(), us, None) == FIRST
    assert kept(monkeypatch, Layer(), us, SECOND) == SECOND, "no kernel more for a hundredth"
    assert kept(monkeypatch, Layer(), us | {str(SECOND): 102.0}, SECOND) == FIRST
    assert kept(monkeypatch, Layer(), us | {"library": 100.5}, SECOND) is None


def test_a_wrong_result_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    us = {"library": 120.0, str(FIRST): 100.0}
    with pytest.raises(AssertionError, match="relative error"):
        kept(monkeypatch, Layer(error_of=0.5), us, None)
