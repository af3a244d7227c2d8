"""Positions: rotary embedding in all its kinds, and the slopes of ALiBi."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from headrace.models.spec import ModelSpec, Rope


def _powers(rope: Rope, dims: int) -> Tensor:
    """theta ** (2i / dims): [dims / 2] float32."""
    # Not where the model is: on the meta device this would import torch's compiler (3 s, 80 MB).
    exponents = torch.arange(0, dims, 2, dtype=torch.float32, device="cpu") / dims
    return rope.theta**exponents


def inverse_frequencies(rope: Rope, dims: int, length: int = 0) -> Tensor:
    """[dims / 2] float32, on the CPU, for sequences of `length` tokens (see `Rope.by_length`).

    `Rotary`, which holds the tensor, applies `factors`.
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
        return 1.0 / (torch.tensor(factors, device="cpu") * _powers(rope, dims))
    return frequencies


def frequencies_by_length(rope: Rope, dims: int, lengths: Sequence[int]) -> Tensor:
    """`inverse_frequencies` of each length: [lengths, dims / 2] float32, on the CPU."""
    if rope.kind != "dynamic":
        return torch.stack([inverse_frequencies(rope, dims, length) for length in lengths])
    thetas = torch.tensor([[_grown(rope, dims, length).theta] for length in lengths], device="cpu")
    exponents = torch.arange(0, dims, 2, dtype=torch.float32, device="cpu") / dims
    return 1.0 / thetas**exponents


def _grown(rope: Rope, dims: int, length: int) -> Rope:
    """NTK-aware scaling by the length: https://arxiv.org/abs/2309.00071, section 3.3."""
    longest = max(length, rope.original_positions)
    grown = rope.factor * longest / rope.original_positions - (rope.factor - 1)
    return Rope(rope.theta * grown ** (dims / (dims - 2)))


def _llama3(rope: Rope, frequencies: Tensor) -> Tensor:
    """Llama 3.1: https://arxiv.org/abs/2407.21783, and Meta's reference `apply_scaling`."""
    turns = rope.original_positions * frequencies / (2 * math.pi)  # over the original context
    blend = ((turns - rope.low_freq) / (rope.high_freq - rope.low_freq)).clamp(0, 1)
    return (1 - blend) * frequencies / rope.factor + blend * frequencies


def _yarn(rope: Rope, frequencies: Tensor) -> Tensor:
    """NTK by parts: https://arxiv.org/abs/2309.00071, section 3.2; bounds as in its code."""
    dims = 2 * frequencies.numel()

    def pair(turns: float) -> float:
        """Which pair turns so often over the original context."""
        wavelength = rope.original_positions / (turns * 2 * math.pi)
        return dims * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = pair(rope.fast), pair(rope.slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    width = high - low or 0.001
    pairs = torch.arange(dims // 2, dtype=torch.float32, device="cpu")
    slowed = ((pairs - low) / width).clamp(0, 1)
    return frequencies / rope.factor * slowed + frequencies * (1 - slowed)


class Rotary(nn.Module):
    """Rotary embedding of halves: pair i of a head is (x[i], x[i + d/2]).

    Where a part of the head turns, its pairs come first, and the others turn by nothing. Where
    frequencies go by the length of the sequence (`Rope.by_length`), the length that counts for a
    token is that of the prompt, or of the sequence up to the token where that is more: what
    transformers computes with a KV cache, in which keys stay as they were written.
    """

    frequencies: Tensor

    def __init__(self, rope: Rope, head_dim: int) -> None:
        super().__init__()
        self.rope, self._dims = rope, rope.dims or head_dim
        self._still = head_dim // 2 - self._dims // 2  # pairs that do not turn
        for factors in (rope.short, rope.long):
            assert len(factors) in (0, self._dims // 2), "checked by whoever reads the config"
        device = torch.get_default_device()
        self.register_buffer("frequencies", self._of_length(0).to(device), persistent=False)
        stored = rope.kind == "factors"
        empty = torch.empty(self._dims // 2, dtype=torch.float32)
        self.factors = nn.Parameter(empty, requires_grad=False) if stored else None

    def _of_length(self, length: int) -> Tensor:
        return inverse_frequencies(self.rope, self._dims, length)

    def forward(
        self, positions: Tensor, dtype: torch.dtype, lengths: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """positions [T] -> cos, sin, each [T, 1, d/2]. `lengths` [T]: of the sequence of each
        token, as said above; needed where frequencies go by it."""
        frequencies = self.frequencies
        if self.factors is not None:
            frequencies = frequencies / self.factors
        if self.rope.by_length:
            assert lengths is not None, "these frequencies go by the length"
            known, which = torch.unique(lengths, return_inverse=True)
            rows = [self._of_length(length) for length in known.tolist()]
            frequencies = torch.stack(rows).to(positions.device)[which][:, None]
        angles = positions.to(torch.float32)[:, None, None] * frequencies
        cos, sin = angles.cos() * self.rope.magnitude, angles.sin() * self.rope.magnitude
        if self._still:
            cos = nn.functional.pad(cos, (0, self._still), value=1.0)
            sin = nn.functional.pad(sin, (0, self._still))
        return cos.to(dtype), sin.to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, d] turned by the angles of `Rotary`."""
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def rotaries(spec: ModelSpec) -> nn.ModuleDict:
    """By `LayerSpec.rope`: what each layer that turns q and k needs."""
    used = {layer.rope for layer in spec.every_layer()}
    ropes = {"global": spec.rope, "local": spec.local_rope}
    found = nn.ModuleDict()
    for name, rope in ropes.items():
        if name in used:
            assert rope is not None, f"a layer has the {name} rotary embedding, the model none"
            found[name] = Rotary(rope, spec.head_dim)
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
