"""Lateness: by how much steps take longer than predicted, learned from those that have ended.

A prediction is measured at the start, in a moment, on a card that was cool. Under a load that lasts
the same card is at its power limit and its clock falls, by a tenth or so, and comes back when the
load ends. So what was late counts at once, and what was early little by little: the factor stays
near the slowest of the last steps.
"""

from __future__ import annotations

_LATE, _EARLY = 0.5, 0.05  # of the way to a step's own factor, by which side it lies on
_LEAST, _MOST = 0.9, 1.25  # what a clock can explain
_FAR = 0.4  # a step this much off shows something else: a graph was captured, a driver slept


class Lateness:
    """`factor` times a prediction is what a step should take."""

    def __init__(self) -> None:
        self.factor = 1.0

    def learn(self, predicted_s: float, busy_s: float) -> None:
        """A step of which `predicted_s` > 0 was expected kept the device busy for `busy_s`."""
        seen = busy_s / predicted_s
        if abs(seen - 1.0) > _FAR:
            return
        gain = _LATE if seen > self.factor else _EARLY
        self.factor = min(_MOST, max(_LEAST, self.factor + gain * (seen - self.factor)))
