"""gate, up and their activation over tiles, against float64."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels.activation import ACTS
from headrace.kernels.gate_up_tiles import (
    TileConfig,
    fits,
    gate_up_tiles,
    gate_up_tiles_reference,
)
from tests.kernels.conftest import CUDA, assert_close
from tests.kernels.test_linear import draw, poisoned

DTYPES = [torch.float16, torch.bfloat16]
LARGE = pytest.mark.skipif(not CUDA, reason="NOT RUN: large shapes need the GPU")
SIZES = [  # T, F, K: tiles cut off at every side, more tiles than programs, and fewer
    (1, 8, 8),
    (17, 40, 72),
    (150, 136, 200),
    pytest.param(2051, 13824, 5120, marks=LARGE),
    pytest.param(4096, 13824, 5120, marks=LARGE),
]
PROGRAMS = 132 if CUDA else 3
SMALL = TileConfig(tokens=64, columns=64, depth=64, warps=4, stages=3, flat=False)
CONFIGS = [TileConfig(), SMALL] if CUDA else [SMALL]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize(("tokens", "ffn", "k"), SIZES)
def test_tiles(
    tokens: int,
    ffn: int,
    k: int,
    config: TileConfig,
    scaled: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    x = draw(tokens, k, dtype=dtype, device=device)
    weight = draw(2 * ffn, k, dtype=dtype, device=device, scale=k**-0.5)
    scale = torch.rand(tokens, device=device) + 0.5 if scaled else None
    out = poisoned(tokens, ffn, dtype=dtype, device=device)
    gate_up_tiles(x, weight, scale=scale, out=out, config=config, multiprocessors=PROGRAMS)
    assert_close(out, gate_up_tiles_reference(x, weight, scale=scale), dtype)


@pytest.mark.parametrize("act", ACTS)
def test_every_activation(act: str, device: torch.device) -> None:
    x = draw(5, 24, dtype=torch.float16, device=device)
    weight = draw(80, 24, dtype=torch.float16, device=device, scale=24**-0.5)
    made = gate_up_tiles(x, weight, act, config=SMALL, multiprocessors=PROGRAMS)
    assert_close(made, gate_up_tiles_reference(x, weight, act), torch.float16)


def test_no_token(device: torch.device) -> None:
    weight = draw(80, 24, dtype=torch.float16, device=device)
    x = torch.empty(0, 24, dtype=torch.float16, device=device)
    assert gate_up_tiles(x, weight, config=SMALL, multiprocessors=PROGRAMS).shape == (0, 40)


def test_what_the_copy_engine_takes(device: torch.device) -> None:
    def two(k: int, n: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
        return torch.zeros(3, k, dtype=dtype), torch.zeros(n, k, dtype=dtype)

    assert fits(*two(24, 80))
    assert not fits(*two(24, 80, torch.float32))
    assert not fits(*two(20, 80))  # rows of 40 bytes
    assert not fits(*two(24, 84))  # rows of the result of 84 bytes
    x, weight = two(24, 80)
    assert not fits(torch.zeros(3 * 24 + 1, dtype=x.dtype)[1:].view(3, 24), weight)
