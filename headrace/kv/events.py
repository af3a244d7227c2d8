"""What becomes known and unknown in the prefix cache, as data, for whoever mirrors it elsewhere.

A block is known by its chain digest (see `prefix`), so a mirror needs no block ids. Integers and
digests only: who sends them, and how, is nobody's business here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Scope(NamedTuple):
    """Prefixes are shared within these three alone."""

    adapter: str = ""
    salt: str = ""
    variant: str = ""


class Stored(NamedTuple):
    """Blocks that follow one another can be hit from now on."""

    scope: Scope
    parent: bytes | None  # digest of the block before the first; None: a sequence begins with them
    digests: list[bytes]
    tokens: list[int]  # of all of them, in order


class Removed(NamedTuple):
    """These blocks can be hit no more."""

    digests: list[bytes]


class Cleared(NamedTuple):
    """Nothing can be hit any more."""


KVEvent = Stored | Removed | Cleared


class EventLog:
    """Events since the last `take`. What follows one another directly is told as one event."""

    __slots__ = ("_events",)

    def __init__(self) -> None:
        self._events: list[KVEvent] = []

    def stored(
        self, scope: Scope, parent: bytes | None, digest: bytes, tokens: Sequence[int]
    ) -> None:
        """The block with these tokens is in the index."""
        last = self._events[-1] if self._events else None
        if type(last) is Stored and parent is not None and last.digests[-1] == parent:
            last.digests.append(digest)
            last.tokens.extend(tokens)
        else:
            self._events.append(Stored(scope, parent, [digest], list(tokens)))

    def removed(self, digest: bytes) -> None:
        """The block is not in the index any more."""
        last = self._events[-1] if self._events else None
        if type(last) is Removed:
            last.digests.append(digest)
        else:
            self._events.append(Removed([digest]))

    def cleared(self) -> None:
        """The index is empty: nothing before it matters."""
        self._events = [Cleared()]

    def take(self) -> list[KVEvent]:
        """All of them, in the order in which they happened."""
        events, self._events = self._events, []
        return events
