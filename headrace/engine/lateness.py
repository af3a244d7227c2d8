"""Lateness: by how much steps take longer than predicted, learned from those that have ended.

A prediction is measured at the start, in a moment, on a card that was cool. Under the load of
prompts the same card reaches its power limit within some hundred milliseconds and its clock falls,
by a tenth or two; while sequences only decode it comes back. So there is a factor for each length
of load behind a step: the first steps of a prompt are fast, and the last ones are not taken for as
fast. What was late counts at once, for longer loads too, and what was early little by little: each
factor stays near the slowest of the last steps of its place. A step that is far late alone does not
count, something else held it up; where all of them are, whatever the cause, the target wants it.
"""

from __future__ import annotations

_PLACE_S, _PLACES = 0.04, 16  # seconds of load that share a factor; the last goes on for ever
_LATE, _EARLY = 0.5, 0.2  # of the way to a step's own factor, by which side it lies on
_LEAST, _MOST = 0.85, 1.35  # what a clock can explain
_FAR = 0.4  # a step this much off, alone, shows something else: a driver slept, nobody measured


class Lateness:
    """`factor(load_s)` times a prediction is what a step should take.

    load_s: how many seconds of steps with prompts lie behind it, less those without; `loaded` adds
    a step. No clock: while nothing runs, nothing cools.
    """

    def __init__(self) -> None:
        self._factors = [1.0] * _PLACES
        self._was_far = False  # the step learned last was far late

    @staticmethod
    def loaded(load_s: float, step_s: float, *, prompts: bool) -> float:
        """The load after a step of `step_s`, with prompts or without."""
        after_s = load_s + step_s if prompts else load_s - step_s
        return min(_PLACE_S * _PLACES, max(0.0, after_s))

    def factor(self, load_s: float) -> float:
        """Of a step behind such a load."""
        return self._factors[_place(load_s)]

    def learn(self, load_s: float, predicted_s: float, busy_s: float) -> None:
        """A step of which `predicted_s` > 0 was expected kept the device busy for `busy_s`."""
        seen = busy_s / predicted_s
        far, alone = abs(seen - 1.0) > _FAR, not self._was_far
        self._was_far = far and seen > 1.0
        if far and (alone or seen < 1.0):
            return
        place = _place(load_s)
        old = self._factors[place]
        gain = _LATE if seen > old else _EARLY
        new = min(_MOST, max(_LEAST, old + gain * (seen - old)))
        self._factors[place] = new
        if new > old:  # no clock comes back under a longer load
            longer = self._factors[place + 1 :]
            self._factors[place + 1 :] = [max(new, factor) for factor in longer]


def _place(load_s: float) -> int:
    return min(_PLACES - 1, int(load_s / _PLACE_S))
