"""How many requests are answered at once, in all HTTP processes of one server."""

from __future__ import annotations

import mmap
from pathlib import Path

from headrace.errors import TooManyStreams

PLACES = 512  # HTTP processes that one file has room for
ITEM_BYTES = 8


class Seats:
    """At most `most` requests at once; 0 = no limit, and nothing is counted.

    Each process writes its own count into its place of a shared file, so no lock is needed. It
    counts itself in before it looks at the sum: the limit is never exceeded, though of two that
    come in the same instant for the last seat both may be refused.
    """

    def __init__(self, most: int, file: Path | None = None, worker: int = 0) -> None:
        """`file` is the same for all processes; None: this process is the only one."""
        assert 0 <= worker < PLACES, f"worker {worker}: {PLACES} processes have a place"
        self._most, self._worker = most, worker
        if not most:
            return
        if file is None:
            shared = mmap.mmap(-1, PLACES * ITEM_BYTES)
        else:
            with file.open("a+b") as handle:
                handle.truncate(PLACES * ITEM_BYTES)  # new places hold zeros
                shared = mmap.mmap(handle.fileno(), PLACES * ITEM_BYTES)
        self._counts = memoryview(shared).cast("q")
        self._counts[worker] = 0  # of a process that ended, whose place this was

    def take(self) -> None:
        """One more. Raises TooManyStreams; else `leave` must follow."""
        if not self._most:
            return
        self._counts[self._worker] += 1
        if sum(self._counts) > self._most:
            self.leave()
            raise TooManyStreams(f"{self._most} requests are being answered: try again later")

    def leave(self) -> None:
        """The end of one that `take` let in."""
        if self._most:
            self._counts[self._worker] -= 1
