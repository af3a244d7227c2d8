"""A probe in the sampler: what one draw looked like after each stage. Only recorded rows have one.

It reads the values that the stages are made of, where they are, and changes none of them.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace.messages import StageView, Tap
from headrace.sampling.logprobs import largest

TOP = 10  # candidates shown of each stage


class Probe:
    """Of draw `draw` of a step. uniform: what decides; -1 = nothing is left to chance."""

    def __init__(self, draw: int, *, greedy: bool) -> None:
        self.draw, self.greedy, self.uniform = draw, greedy, -1.0
        self.stages: list[StageView] = []

    def note(self, name: str, values: Tensor | npt.NDArray[np.float64]) -> None:
        """What a stage left: logits [vocab], -inf = out."""
        logits = torch.as_tensor(values)
        kept = int((logits > -torch.inf).sum())
        ids, best = largest(logits[None], min(TOP, kept))
        self.stages.append(StageView(name, kept, ids[0], best[0].tolist()))

    def note_odds(self, logits: Tensor) -> None:
        """The probabilities of what is left: logits [vocab] float64, the draw's own."""
        kept = int((logits > -torch.inf).sum())
        ids, values = largest(logits[None], min(TOP, kept))
        norm = float(torch.logsumexp(logits, -1))
        odds = [math.exp(value - norm) for value in values[0].tolist()]
        self.stages.append(StageView("softmax", kept, ids[0], odds))

    def tap(self) -> Tap:
        """All of it."""
        return Tap(self.draw, self.greedy, self.uniform, self.stages)
