"""cos and sin of a model's rotary embeddings on a GPU.

Tables by position, made once. Where frequencies go by the length of a sequence (`Rope.by_length`)
there is no such table: the rows of a step's tokens are made as the step begins.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headrace.kernels.columns import StepColumns
from headrace.models.layers import Decoder
from headrace.models.positions import Rotary
from headrace.models.rope import frequencies_by_length


class Turn(NamedTuple):
    """Each [n, pairs] float32; `by_token`: row t is that of the step's token t, else of position
    t."""

    cos: Tensor
    sin: Tensor
    by_token: bool


class Turns:
    """Of one model, for `positions` positions and steps of at most `tokens` tokens.

    prompts [rows] int32: the tokens of each device row's prompt.
    """

    def __init__(self, model: Decoder, positions: int, tokens: int, prompts: Tensor) -> None:
        device, spec = prompts.device, model.spec
        still = torch.zeros((1, spec.head_dim // 2), device=device)
        self._turns = {"none": Turn(still, still, by_token=False)}
        self._steps: list[_ByLength] = []
        every = torch.arange(positions, device=device)
        for name, rotary in model.rotaries.items():
            assert isinstance(rotary, Rotary), "a table of rotary embeddings"
            if rotary.rope.by_length:
                step = _ByLength(rotary, spec.head_dim, positions, tokens, prompts)
                self._steps.append(step)
                self._turns[name] = step.turn
                continue
            cos, sin = (t[:, 0].contiguous() for t in rotary(every, torch.float32))
            if spec.latent is not None:  # a part of what the cache keeps is turned
                pairs = spec.latent.rope_dim // 2
                cos, sin = (t[:, :pairs].contiguous() for t in (cos, sin))
            self._turns[name] = Turn(cos, sin, by_token=False)

    def of(self, name: str) -> Turn:
        """By `LayerSpec.rope`; of "none" nothing is to be read."""
        return self._turns[name]

    def begin(self, columns: StepColumns) -> None:
        """Queue what a step needs; its positions are settled."""
        for step in self._steps:
            step.make(columns)


class _ByLength:
    """Rows for the tokens of one step. `Rotary` says which length counts for a token."""

    def __init__(
        self, rotary: Rotary, head_dim: int, positions: int, tokens: int, prompts: Tensor
    ) -> None:
        rope = rotary.rope
        self._first, self._magnitude, self._prompts = (
            rope.original_positions,
            rope.magnitude,
            prompts,
        )
        longest = positions if rope.kind == "dynamic" else self._first + 1
        lengths = range(self._first, max(longest, self._first) + 1)
        frequencies = frequencies_by_length(rope, rope.dims or head_dim, lengths)
        self._frequencies = torch.from_numpy(frequencies).to(
            prompts.device
        )  # [lengths, pairs that turn]
        cos = torch.ones((tokens, head_dim // 2), device=prompts.device)
        self.turn = Turn(cos, torch.zeros_like(cos), by_token=True)

    def make(self, columns: StepColumns) -> None:
        """Queue it."""
        prompts = self._prompts.index_select(0, columns.rows)
        lengths = torch.maximum(prompts, columns.positions + 1)
        at = (lengths - self._first).clamp_(0, self._frequencies.shape[0] - 1)
        angles = columns.positions.float()[:, None] * self._frequencies.index_select(0, at)
        n, pairs = angles.shape
        torch.mul(angles.cos(), self._magnitude, out=self.turn.cos[:n, :pairs])
        torch.mul(angles.sin(), self._magnitude, out=self.turn.sin[:n, :pairs])
