"""Rotary embedding on torch; `rope` has the frequencies."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headrace.models.rope import inverse_frequencies, ropes_of
from headrace.models.spec import ModelSpec, Rope


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
        return torch.from_numpy(inverse_frequencies(self.rope, self._dims, length))

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
    ropes = ropes_of(spec)
    return nn.ModuleDict({name: Rotary(rope, spec.head_dim) for name, rope in ropes.items()})
