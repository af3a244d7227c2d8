"""A probe in the sampler: what one draw looked like after each stage. Only recorded rows have one.

It reads the values that the stages are made of, where they are, and changes none of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.messages import StageView, Tap
from headrace.sampling.logprobs import largest, log_sum

TOP = 10  # candidates shown of each stage


class Probe:
    """Of draw `draw` of a step. uniform: what decides; -1 = nothing is left to chance."""

    def __init__(self, draw: int, *, greedy: bool) -> None:
        self.draw, self.greedy, self.uniform = draw, greedy, -1.0
        self.stages: list[StageView] = []

    def note(self, name: str, logits: npt.NDArray[Any]) -> None:
        """What a stage left: logits [vocab], -inf = out."""
        kept = int(np.count_nonzero(logits > -np.inf))
        ids = largest(logits, min(TOP, kept))
        self.stages.append(StageView(name, kept, ids.tolist(), logits[ids].tolist()))

    def note_odds(self, logits: npt.NDArray[np.float64]) -> None:
        """The probabilities of what is left: logits [vocab] float64, the draw's own."""
        kept = int(np.count_nonzero(logits > -np.inf))
        ids = largest(logits, min(TOP, kept))
        odds = np.exp(logits[ids] - log_sum(logits)).tolist()
        self.stages.append(StageView("softmax", kept, ids.tolist(), odds))

    def tap(self) -> Tap:
        """All of it."""
        return Tap(self.draw, self.greedy, self.uniform, self.stages)
