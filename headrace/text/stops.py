"""Stop strings in a stream: find the first, never send a part of it.

The first stop string to be complete wins; of two that are complete at the same character, the
longer. That is the one rule that does not depend on how the text was cut into pieces, and does not
wait for text that need not have been generated.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


class StopStrings:
    """A feed/flush machine: one Knuth-Morris-Pratt automaton a stop, O(1) memory over the text.

    `matched` is the stop that was found, else None. After a match, `feed` gives nothing more.
    """

    __slots__ = ("_fails", "_firsts", "_held", "_include", "_states", "_stops", "matched")

    @property
    def held(self) -> str:
        """What may begin a stop string."""
        return self._held

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        assert all(stops), "an empty stop string matches everywhere: refuse it upstream"
        self._stops = sorted(set(stops), key=len, reverse=True)  # the longer one is tried first
        self._fails = [_failures(stop) for stop in self._stops]
        self._firsts = {stop[0] for stop in self._stops}
        self._states = [0] * len(self._stops)  # characters of each stop that the text ends with
        self._include = include
        self._held = ""  # ends the text so far; the longest of `_states` in characters
        self.matched: str | None = None

    def feed(self, text: str, *, ignore: bool = False) -> str:
        """The text that is safe to send. `ignore`: a stop that ends in it is none."""
        if self.matched is not None:
            return ""
        if not self._held and self._firsts.isdisjoint(text):
            return text
        found = self._scan(text, ignore)
        whole = self._held + text
        if found is not None:
            stop, at = found
            end = len(self._held) + at
            self.matched, self._held = stop, ""
            return whole[:end] if self._include else whole[: end - len(stop)]
        keep = len(whole) - max(self._states)
        self._held = whole[keep:]
        return whole[:keep]

    def flush(self) -> str:
        """What was held back for a stop that never came. Call once, at the end."""
        held, self._held = self._held, ""
        return held

    def _scan(self, text: str, ignore: bool) -> tuple[str, int] | None:
        """Advance the automata over `text`; the first stop and where in `text` it ends, if any."""
        states = self._states
        automata = list(zip(range(len(states)), self._stops, self._fails, strict=True))
        firsts = self._firsts
        for at, char in enumerate(text):
            if char not in firsts and not any(states):
                continue
            for n, stop, fails in automata:
                state = states[n]
                while state and stop[state] != char:
                    state = fails[state - 1]
                if stop[state] == char:
                    state += 1
                    if state == len(stop):
                        if not ignore:
                            return stop, at + 1
                        state = fails[state - 1]
                states[n] = state
        return None


@lru_cache(maxsize=256)  # the choices of one request share their stops
def _failures(stop: str) -> tuple[int, ...]:
    """[i] -> length of the longest proper prefix of stop that ends stop[: i + 1]."""
    fails = [0] * len(stop)
    state = 0
    for at in range(1, len(stop)):
        while state and stop[state] != stop[at]:
            state = fails[state - 1]
        if stop[state] == stop[at]:
            state += 1
        fails[at] = state
    return tuple(fails)
