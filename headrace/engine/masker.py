"""Masker: the grammar masks of a step, made on the host while the step's forward pass runs."""

from __future__ import annotations

import numpy as np

from headrace.engine.draft import Flight
from headrace.engine.protocol import Capacity, Grammars, Masks
from headrace.engine.request import Sequence

_ONE = np.uint32(1)


class Masker:
    """One buffer of mask rows, used again for every step."""

    def __init__(self, grammars: Grammars, capacity: Capacity) -> None:
        self._grammars = grammars
        self._words = -(-capacity.vocab_size // 32)
        self._bits = np.zeros((0, self._words), np.int32)

    def masks(self, flight: Flight) -> tuple[Masks, list[Sequence]]:
        """The masks, and sequences that turned out to be complete: only their end may follow.

        Needs: every step before it was applied. A row of a sequence that has ended, or whose next
        token is known, is there for form: that draw is dropped.
        """
        draws, sequences = self._constrained(flight)
        known = [self._known(flight, *pair) for pair in zip(draws, sequences, strict=True)]
        open_ = [i for i, token in enumerate(known) if token < 0]
        bits = self._room(len(draws))
        some = bits if len(open_) == len(draws) else np.zeros_like(bits[: len(open_)])
        if open_:
            self._grammars.fill([sequences[i].matcher for i in open_], some)
        if some is not bits:
            bits[open_] = some
        words = bits.view(np.uint32)
        for i, token in enumerate(known):
            if token >= 0:
                _only(words[i], token)
        return Masks(draws, bits), [
            sequences[i] for i in open_ if not self._close(words[i], sequences[i])
        ]

    def _constrained(self, flight: Flight) -> tuple[list[int], list[Sequence]]:
        both = [*flight.decoders, *flight.drawers]
        draws = [j for j, sequence in enumerate(both) if sequence.matcher is not None]
        return draws, [both[j] for j in draws]

    def _room(self, rows: int) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
        if rows > len(self._bits):
            self._bits = np.zeros((rows, self._words), np.int32)
        return self._bits[:rows]

    @staticmethod
    def _known(flight: Flight, draw: int, sequence: Sequence) -> int:
        """The token that the draw is for, where it is known or wanted no more; else -1."""
        if sequence.ended:
            return 0
        plan = flight.plan
        source = plan.draw_from[draw]
        position = plan.starts[source] + plan.counts[source]
        return sequence.tokens[position] if position < len(sequence.tokens) else -1

    def _close(self, row: np.ndarray[tuple[int], np.dtype[np.uint32]], sequence: Sequence) -> bool:
        """End ids are allowed exactly where the grammar accepts. False: nothing else may follow."""
        matcher = sequence.matcher
        assert matcher is not None, "a mask without a grammar"
        stops = sequence.request.submit.stop_ids
        for token in (*self._grammars.end_ids, *stops):
            row[token >> 5] &= ~(_ONE << np.uint32(token & 31))
        if not matcher.accepts:
            return True
        if not row.any():
            _only(row, 0)
            return False
        for token in stops:
            row[token >> 5] |= _ONE << np.uint32(token & 31)
        return True


def _only(row: np.ndarray[tuple[int], np.dtype[np.uint32]], token: int) -> None:
    row[:] = 0
    row[token >> 5] = _ONE << np.uint32(token & 31)
