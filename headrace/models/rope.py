"""Rotary frequencies and angles in all their kinds, as numpy arrays: what torch and native kernels
share."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from headrace.models.spec import ModelSpec, Rope

Floats = npt.NDArray[np.float32]

_POSITIONS_AT_ONCE = 4096  # whose angles are in memory as float64


def _powers(rope: Rope, dims: int) -> Floats:
    """theta ** (2i / dims): [dims / 2] float32, each rounded once."""
    exponents = np.arange(0, dims, 2, dtype=np.float32) / dims
    return (rope.theta ** exponents.astype(np.float64)).astype(np.float32)


def inverse_frequencies(rope: Rope, dims: int, length: int = 0) -> Floats:
    """[dims / 2] float32, for sequences of `length` tokens (see `Rope.by_length`).

    Factors of a checkpoint (`Rope.kind` "factors") are not in it: whoever holds them divides.
    """
    if rope.kind == "dynamic":
        return 1.0 / _powers(_grown(rope, dims, length), dims)
    frequencies = 1.0 / _powers(rope, dims)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, frequencies)
    if rope.kind == "yarn":
        return _yarn(rope, frequencies)
    if rope.kind == "longrope":
        factors = rope.long if length > rope.original_positions else rope.short
        return 1.0 / (np.array(factors, np.float32) * _powers(rope, dims))
    return frequencies


def frequencies_by_length(rope: Rope, dims: int, lengths: Sequence[int]) -> Floats:
    """`inverse_frequencies` of each length: [lengths, dims / 2] float32."""
    if rope.kind != "dynamic":
        return np.stack([inverse_frequencies(rope, dims, length) for length in lengths])
    thetas = np.array([[_grown(rope, dims, length).theta] for length in lengths])
    exponents = np.arange(0, dims, 2, dtype=np.float32) / dims
    return 1.0 / (thetas ** exponents.astype(np.float64)).astype(np.float32)


def _grown(rope: Rope, dims: int, length: int) -> Rope:
    """NTK-aware scaling by the length: https://arxiv.org/abs/2309.00071, section 3.3."""
    longest = max(length, rope.original_positions)
    grown = rope.factor * longest / rope.original_positions - (rope.factor - 1)
    return Rope(rope.theta * grown ** (dims / (dims - 2)))


def _llama3(rope: Rope, frequencies: Floats) -> Floats:
    """Llama 3.1: https://arxiv.org/abs/2407.21783, and Meta's reference `apply_scaling`."""
    turns = rope.original_positions * frequencies / (2 * math.pi)  # over the original context
    blend = ((turns - rope.low_freq) / (rope.high_freq - rope.low_freq)).clip(0, 1)
    blended = (1 - blend) * frequencies / rope.factor + blend * frequencies
    return blended.astype(np.float32, copy=False)


def _yarn(rope: Rope, frequencies: Floats) -> Floats:
    """NTK by parts: https://arxiv.org/abs/2309.00071, section 3.2; bounds as in its code."""
    dims = 2 * frequencies.size

    def pair(turns: float) -> float:
        """Which pair turns so often over the original context."""
        wavelength = rope.original_positions / (turns * 2 * math.pi)
        return dims * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = pair(rope.fast), pair(rope.slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    width = high - low or 0.001
    pairs = np.arange(dims // 2, dtype=np.float32)
    slowed = ((pairs - low) / width).clip(0, 1)
    blended: Floats = frequencies / rope.factor * slowed + frequencies * (1 - slowed)
    return blended


def turns(
    rope: Rope, head_dim: int, positions: int, factors: Floats | None
) -> tuple[Floats, Floats]:
    """cos and sin at positions 0 ... positions - 1, each [positions, head_dim / 2] float32; see
    `positions.Rotary`. `factors`: a checkpoint's, which divide the frequencies.

    Not for frequencies that go by the length of a sequence.
    """
    assert not rope.by_length, "one table for sequences of every length"
    dims = rope.dims or head_dim
    frequencies = inverse_frequencies(rope, dims)
    if factors is not None:
        frequencies = frequencies / factors
    cos = np.ones((positions, head_dim // 2), np.float32)  # pairs that do not turn stay as here
    sin = np.zeros_like(cos)
    for first in range(0, positions, _POSITIONS_AT_ONCE):
        some = slice(first, min(first + _POSITIONS_AT_ONCE, positions))
        angles = np.arange(some.start, some.stop, dtype=np.float32)[:, None] * frequencies
        wide = angles.astype(np.float64)  # so that each value is rounded once
        cos[some, : dims // 2] = np.cos(wide) * rope.magnitude
        sin[some, : dims // 2] = np.sin(wide) * rope.magnitude
    return cos, sin


def ropes_of(spec: ModelSpec) -> dict[str, Rope]:
    """By `LayerSpec.rope`: what each layer that turns q and k needs."""
    used = {layer.rope for layer in spec.every_layer()}
    found: dict[str, Rope] = {}
    for name, rope in (("global", spec.rope), ("local", spec.local_rope)):
        if name in used:
            assert rope is not None, f"a layer has the {name} rotary embedding, the model none"
            found[name] = rope
    return found


def alibi_slopes(heads: int, steepest: float) -> tuple[float, ...]:
    """What one token of distance takes off a head's scores: https://arxiv.org/abs/2108.12409.

    2 ** (-steepest * i / heads), i = 1 ... heads; where heads is no power of two, those of the next
    power: its even ones first, then its odd ones.
    """
    power = 2 ** math.ceil(math.log2(heads))
    slopes = [2.0 ** (-steepest * i / power) for i in range(1, power + 1)]
    if power != heads:
        slopes = (slopes[1::2] + slopes[::2])[:heads]
    return tuple(slopes)
