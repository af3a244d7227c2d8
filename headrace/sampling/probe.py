"""A probe in the sampler: what one draw looked like after each stage. Only recorded rows have one.

It reads the values that the stages are made of, where they are, and changes none of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.messages import StageView, Tap
from headrace.sampling.logprobs import log_sum

TOP = 10  # candidates shown of each stage
_GROUP = 64


class Probe:
    """Of draw `draw` of a step. uniform: what decides; -1 = nothing is left to chance."""

    def __init__(self, draw: int, *, greedy: bool) -> None:
        self.draw, self.greedy, self.uniform = draw, greedy, -1.0
        self.stages: list[StageView] = []

    def note(self, name: str, logits: npt.NDArray[Any]) -> None:
        """What a stage left: logits [vocab], -inf = out."""
        kept = int(np.count_nonzero(logits > -np.inf))
        ids = likeliest(logits, min(TOP, kept))
        self.stages.append(StageView(name, kept, ids.tolist(), logits[ids].tolist()))

    def note_odds(self, logits: npt.NDArray[np.float64]) -> None:
        """The probabilities of what is left: logits [vocab] float64, the draw's own."""
        stays = logits > -np.inf
        kept = int(np.count_nonzero(stays))
        ids = likeliest(logits, min(TOP, kept))
        odds = np.exp(logits[ids] - log_sum(logits[stays])).tolist()
        self.stages.append(StageView("softmax", kept, ids.tolist(), odds))

    def tap(self) -> Tap:
        """All of it."""
        return Tap(self.draw, self.greedy, self.uniform, self.stages)


def likeliest(logits: npt.NDArray[Any], count: int) -> npt.NDArray[np.int64]:
    """The ids of the `count` largest, falling, lowest id first among equals; as many of them must
    be above -inf. Reads the row once: they lie in groups whose maximum is among the `count` largest
    maxima. Group j of `width`: ids j, j + width, ...
    """
    width = logits.size // _GROUP
    if width <= count:
        ids = np.arange(logits.size)
    else:
        maxima = logits[: width * _GROUP].reshape(_GROUP, width).max(0)
        edge = np.partition(maxima, -count)[-count] if count else np.inf
        groups = np.flatnonzero((maxima >= edge) & (maxima > -np.inf))
        inside = (np.arange(_GROUP)[:, None] * width + groups).ravel()
        ids = np.concatenate((inside, np.arange(width * _GROUP, logits.size)))
    order = np.lexsort((ids, -logits[ids]))
    return ids[order[:count]]
