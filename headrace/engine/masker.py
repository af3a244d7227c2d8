"""Masker: the grammar masks of a step, made on the host while the step's forward pass runs.

A mask costs tens of microseconds, hundreds inside a string. A draw whose token is certain needs
none: its mask has that token alone. Certain is what the grammar forces, and what the runner says
that the draw takes if it is allowed (`Ticket.likely`), where the grammar allows it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headrace.engine.draft import Flight
from headrace.engine.protocol import Capacity, Grammars, Masks, Ticket
from headrace.engine.request import Sequence

_ONE = np.uint32(1)


class Masker:
    """One buffer of mask rows, used again for every step."""

    def __init__(self, grammars: Grammars, capacity: Capacity) -> None:
        self._grammars = grammars
        self._ends = frozenset(grammars.end_ids)
        self._words = -(-capacity.vocab_size // 32)
        self._bits = np.zeros((0, self._words), np.int32)

    def masks(self, flight: Flight, ticket: Ticket) -> tuple[Masks, list[Sequence]]:
        """The masks, and sequences that turned out to be complete: only their end may follow.

        Needs: every step before it was applied. A row of a sequence that has ended, or whose next
        token is known, is there for form: that draw is dropped.
        """
        draws, sequences = self._constrained(flight)
        likely = ticket.likely() if draws else ()
        known = [
            self._known(flight, j, sequence, likely[j] if likely else -1)
            for j, sequence in zip(draws, sequences, strict=True)
        ]
        open_ = [i for i, token in enumerate(known) if token < 0]
        bits = self._room(len(draws))
        some = bits if len(open_) == len(draws) else np.zeros_like(bits[: len(open_)])
        if open_:
            self._grammars.fill([sequences[i].matcher for i in open_], some)
        if some is not bits:
            bits[open_] = some
        words = bits.view(np.uint32)
        if len(open_) < len(draws):
            _allow_alone(words, [i for i, token in enumerate(known) if token >= 0], known)
        return Masks(draws, bits), [
            sequences[i] for i in open_ if not self._close(words[i], sequences[i])
        ]

    def _constrained(self, flight: Flight) -> tuple[list[int], list[Sequence]]:
        both = [*flight.decoders, *flight.drawers]
        draws = [j for j, sequence in enumerate(both) if sequence.matcher is not None]
        return draws, [both[j] for j in draws]

    def _room(self, rows: int) -> npt.NDArray[np.int32]:
        if rows > len(self._bits):
            self._bits = np.zeros((rows, self._words), np.int32)
        return self._bits[:rows]

    def _known(self, flight: Flight, draw: int, sequence: Sequence, likely: int) -> int:
        """The token that the draw is for, where it is certain or wanted no more; else -1."""
        if sequence.ended:
            return 0
        plan = flight.plan
        source = plan.draw_from[draw]
        position = plan.starts[source] + plan.counts[source]
        if position < len(sequence.tokens):
            return sequence.tokens[position]
        return self._certain(sequence, likely)

    def _certain(self, sequence: Sequence, likely: int) -> int:
        """The token that its full mask would lead to, where that is found without it; else -1."""
        matcher = sequence.matcher
        assert matcher is not None, "a mask without a grammar"
        forced = matcher.forced()
        token = forced[0] if forced else likely
        if token in sequence.stop_ids or token in self._ends:  # `_close` decides about these
            return -1
        return token if forced or (token >= 0 and matcher.allows(token)) else -1

    def _close(self, row: npt.NDArray[np.uint32], sequence: Sequence) -> bool:
        """End ids are allowed exactly where the grammar accepts. False: nothing else may follow."""
        matcher = sequence.matcher
        assert matcher is not None, "a mask without a grammar"
        stops = sequence.request.submit.stop_ids
        for token in (*self._grammars.end_ids, *stops):
            row[token >> 5] &= ~(_ONE << np.uint32(token & 31))
        if not matcher.accepts:
            return True
        if not row.any():
            row[0] = _ONE
            return False
        for token in stops:
            row[token >> 5] |= _ONE << np.uint32(token & 31)
        return True


def _allow_alone(words: npt.NDArray[np.uint32], rows: list[int], tokens: list[int]) -> None:
    """Row i of `rows` allows tokens[i] and no other."""
    ids = np.array([tokens[i] for i in rows], np.uint32)
    words[rows] = 0
    words[rows, ids >> 5] = _ONE << (ids & 31)
