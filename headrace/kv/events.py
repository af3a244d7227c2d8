"""What becomes known and unknown in the prefix cache, as data, for whoever mirrors it elsewhere.

A block is known by its chain digest (see `prefix`), so a mirror needs no block ids. Integers and
digests only: who sends them, and how, is nobody's business here.

Groups: layers with equal windows are one group here, in however many groups they lie in memory. A
block is known in a group from when all these layers have it until the first of them loses it. So
what `room.reusable` says of a mirror is what the cache itself would find.
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
    """Blocks that follow one another can be hit in a group from now on."""

    scope: Scope
    parent: bytes | None  # digest of the block before the first; None: a sequence begins with them
    digests: list[bytes]
    tokens: list[int]  # of all of them, in order
    group: int = 0  # index into `groups_of`


class Removed(NamedTuple):
    """These blocks can be hit no more in a group."""

    digests: list[bytes]
    group: int = 0


class Cleared(NamedTuple):
    """Nothing can be hit any more."""


KVEvent = Stored | Removed | Cleared


def groups_of(windows: Sequence[int]) -> tuple[int, ...]:
    """The window of each group that events tell of. windows: of those in memory; 0 = no window."""
    return tuple(dict.fromkeys(windows))


class EventLog:
    """Events since the last `take`. What follows one another directly is told as one event."""

    __slots__ = ("_events",)

    def __init__(self) -> None:
        self._events: list[KVEvent] = []

    def stored(
        self,
        scope: Scope,
        parent: bytes | None,
        digest: bytes,
        tokens: Sequence[int],
        group: int = 0,
    ) -> None:
        """The block with these tokens is in the index."""
        last = self._events[-1] if self._events else None
        follows = type(last) is Stored and last.group == group and last.digests[-1] == parent
        if type(last) is Stored and follows:
            last.digests.append(digest)
            last.tokens.extend(tokens)
        else:
            self._events.append(Stored(scope, parent, [digest], list(tokens), group))

    def removed(self, digest: bytes, group: int = 0) -> None:
        """The block is not in the index any more."""
        for event in reversed(self._events):  # those of several groups come in turns
            if type(event) is not Removed:
                break
            if event.group == group:
                event.digests.append(digest)
                return
        self._events.append(Removed([digest], group))

    def cleared(self) -> None:
        """The index is empty: nothing before it matters."""
        self._events = [Cleared()]

    def take(self) -> list[KVEvent]:
        """All of them, in the order in which they happened."""
        events, self._events = self._events, []
        return events
