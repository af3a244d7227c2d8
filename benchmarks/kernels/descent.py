"""Coordinate descent over named choices, each judged by a time that is noisy.

One name at a time: all its candidates briefly, then the most promising in turns with what stands,
and a change is kept only if it gains more than the same thing timed twice differs by.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

Choices = Mapping[str, Any]  # name -> what is chosen for it; values can be compared
BRIEF, LONG = 5, 21  # replays of one timing
ROUNDS = 3  # timings of each finalist, in turns
FINALISTS = 3
LEAST_GAIN = 0.0005  # of the time, however quiet the clock is


class Unfit(Exception):
    """These choices cannot run here: too much shared memory, say."""


class Timer(Protocol):
    """Milliseconds of a step (or of several, added up) with these choices.

    `name`: which choice is being judged, for that says at which steps to look. Raises Unfit.
    """

    def __call__(self, choices: Choices, name: str, replays: int) -> float: ...


def gains(standing: list[float], other: list[float]) -> bool:
    """Whether `other`'s median is below that of `standing` by more than the noise of both."""
    noise = max(max(times) - min(times) for times in (standing, other))
    before, after = statistics.median(standing), statistics.median(other)
    return before - after > max(noise, LEAST_GAIN * before)


@dataclasses.dataclass
class Descent:
    """`choices` is what stands; `until_s` (of `clock`) ends every search, done or not."""

    timer: Timer
    choices: dict[str, Any]
    until_s: float = float("inf")
    clock: Callable[[], float] = time.monotonic
    say: Callable[[str], None] = print
    tried: int = 0

    def visit(self, name: str, candidates: Iterable[Any]) -> bool:
        """Settle `name`; True: it changed. Raises Unfit if what stands cannot run."""
        standing_ms = self._time(self.choices, name, BRIEF)
        brief: list[tuple[float, Any]] = []
        for candidate in candidates:
            if candidate == self.choices[name]:
                continue
            if self.late():
                self.say(f"{name}: the time is up")
                break
            try:
                ms = self._time(self._with(name, candidate), name, BRIEF)
            except Unfit as error:
                self.say(f"{name}, {candidate}: {error}")
                continue
            brief.append((ms, candidate))
        promising = [pair for pair in brief if pair[0] < standing_ms * 1.01]
        finalists = [c for _, c in sorted(promising, key=lambda pair: pair[0])[:FINALISTS]]
        return bool(finalists) and self._final(name, finalists)

    def late(self) -> bool:
        """Whether the time is up."""
        return self.clock() > self.until_s

    def _with(self, name: str, candidate: Any) -> dict[str, Any]:
        return self.choices | {name: candidate}

    def _time(self, choices: Choices, name: str, replays: int) -> float:
        self.tried += 1
        return self.timer(choices, name, replays)

    def _final(self, name: str, finalists: list[Any]) -> bool:
        """Rounds in turns, so that a card that grows warm is warm for all."""
        all_choices = [self.choices, *(self._with(name, c) for c in finalists)]
        times: list[list[float]] = [[] for _ in all_choices]
        for _ in range(ROUNDS):
            for mine, choices in zip(times, all_choices, strict=True):
                mine.append(self._time(choices, name, LONG))
        best = min(range(1, len(times)), key=lambda i: statistics.median(times[i]))
        before, after = statistics.median(times[0]), statistics.median(times[best])
        if not gains(times[0], times[best]):
            return False
        self.say(f"{name}: {before:.3f} -> {after:.3f} ms with {finalists[best - 1]}")
        self.choices = self._with(name, finalists[best - 1])
        return True
