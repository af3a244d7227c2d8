"""Floats to quantised blocks: as close as the format allows, on every kernel table."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.native.library import Library
from headrace.native.pool import Pool
from headrace.native.weights import quantise
from tests.native import rig

FUZZ = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
MADE = ("Q4_1", "Q8_0")
Array = npt.NDArray[Any]


def stored(x: rig.Floats, source: str) -> tuple[rig.Bytes, rig.Floats]:
    """x as rows of type `source`, and what those rows mean."""
    if source == "F32":
        return x.view(np.uint8), x
    if source == "F16":
        halves = x.astype(np.float16)
        return halves.view(np.uint8), halves.astype(np.float32)
    high = (x.view(np.uint32) >> 16).astype(np.uint16)
    return high.view(np.uint8), (high.astype(np.uint32) << 16).view(np.float32)


def made(pool: Pool, library: Library, raw: rig.Bytes, name: str, source: str, n: int) -> Array:
    kinds = rig.ggml_type(name), rig.ggml_type(source)
    return rig.floats(quantise(library, *kinds, raw, n, pool.isa), name)


def block_errors(a: Array, b: Array) -> Array:
    """Squared error of each block of 32."""
    squares = (a.astype(np.float64) - b) ** 2
    out: Array = squares.reshape(a.shape[0], -1, 32).sum(-1)
    return out


def best_line(x: Array) -> Array:
    """Squared error of the best of many Q4_1 grids with exact d and m: no block can beat it by
    much. x [blocks, 32]."""
    least = np.full(x.shape[0], np.inf)
    low, high = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
    for steps in np.arange(13.0, 18.0, 0.05):
        d, m = (high - low) / steps, low
        for _ in range(3):
            u = np.clip(np.rint((x - m) / d), 0, 15)
            centred = u - u.mean(-1, keepdims=True)
            d = (centred * x).sum(-1, keepdims=True) / (centred**2).sum(-1, keepdims=True)
            m = x.mean(-1, keepdims=True) - d * u.mean(-1, keepdims=True)
            least = np.minimum(least, ((x - m - d * u) ** 2).sum(-1))
    return least


@pytest.mark.parametrize("source", rig.PLAIN)
@pytest.mark.parametrize("name", MADE)
def test_no_worse_than_ggml(pool: Pool, library: Library, name: str, source: str) -> None:
    rng = np.random.default_rng(4)
    x = rng.standard_normal((37, 96), np.float32) * rng.uniform(0.01, 3, (37, 1)).astype(np.float32)
    raw, x = stored(x, source)
    ours = block_errors(made(pool, library, raw, name, source, 96), x)
    theirs = rig.floats(quantize(x, GGMLQuantizationType[name]), name)
    assert ours.mean() <= block_errors(theirs, x).mean() * (0.85 if name == "Q4_1" else 1.0)


def test_four_bits_reach_least_squares(pool: Pool, library: Library) -> None:
    x = np.random.default_rng(5).standard_normal((64, 64), np.float32)
    ours = block_errors(made(pool, library, x.view(np.uint8), "Q4_1", "F32", 64), x)
    best = best_line(x.reshape(-1, 32).astype(np.float64)).reshape(64, 2)
    assert (ours >= best * 0.97).all(), "better than the best: the reference is wrong"
    assert ours.mean() <= best.mean() * 1.06


def test_eight_bits_are_rounded(pool: Pool, library: Library) -> None:
    x = np.random.default_rng(6).standard_normal((5, 64), np.float32)
    out = made(pool, library, x.view(np.uint8), "Q8_0", "F32", 64)
    step = np.abs(x.reshape(5, 2, 32)).max(-1, keepdims=True) / 127 * 1.001
    assert (np.abs(out - x).reshape(5, 2, 32) <= step / 2 + 1e-7).all()


@FUZZ
@given(
    rows=st.integers(1, 40),
    blocks=st.integers(1, 5),
    scale=st.sampled_from([0.0, 1e-7, 1e-4, 1.0, 1e3]),
    name=st.sampled_from(MADE),
    source=st.sampled_from(rig.PLAIN),
    seed=st.integers(0, 2**31),
)
def test_any_values(
    pool: Pool,
    library: Library,
    rows: int,
    blocks: int,
    scale: float,
    name: str,
    source: str,
    seed: int,
) -> None:
    """Few different values, so that constant blocks and exact grids occur; bounded error always."""
    rng = np.random.default_rng(seed)
    x = rng.integers(-rng.integers(1, 9), 9, (rows, 32 * blocks)).astype(np.float32)
    x[rng.integers(0, rows)] = 3.0
    raw, x = stored(x * np.float32(scale), source)
    out = made(pool, library, raw, name, source, 32 * blocks)
    by_block = x.reshape(rows, blocks, 32)
    reach = by_block.max(-1) - by_block.min(-1) if name == "Q4_1" else np.abs(by_block).max(-1)
    # Half a step of the first try or better, plus what half precision does to d and m.
    step = reach / (15 if name == "Q4_1" else 127)
    slack = np.abs(by_block).max(-1) * 2e-3 + 1e-6
    root_mean = np.sqrt(block_errors(out, x) / 32)
    assert (root_mean <= step / 2 + slack).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", MADE)
def test_what_is_not_finite_is_not_lost(
    pool: Pool, library: Library, name: str, bad: float
) -> None:
    x = np.random.default_rng(7).standard_normal((3, 64), np.float32)
    x[1, 40] = bad
    out = made(pool, library, x.view(np.uint8), name, "F32", 64).reshape(3, 2, 32)
    assert np.isnan(out[1, 1]).all()
    out[1, 1] = 0.0
    assert np.isfinite(out).all()


def test_only_known_pairs(library: Library) -> None:
    x = np.zeros((1, 48), np.float32)
    with pytest.raises(AssertionError, match="48 columns"):
        quantise(library, rig.ggml_type("Q8_0"), rig.ggml_type("F32"), x.view(np.uint8), 48)
    raw = np.zeros((1, 36), np.uint8)
    with pytest.raises(AssertionError, match="type 2 "):
        quantise(library, rig.ggml_type("Q8_0"), rig.ggml_type("Q4_0"), raw, 64)
