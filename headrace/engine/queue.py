"""WaitQueue: sequences that wait for a row, best key first. O(log n), lazy removal that is bounded.

Entries are not searched for: a sequence that leaves forgets its entry (`queued`), and such entries
are skipped when they surface, or swept out when they outnumber the live ones.
"""

from __future__ import annotations

from collections import deque
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from headrace.engine.policy import Key
from headrace.engine.request import Sequence

SWEEP_AT = 64


class Entry(NamedTuple):
    """One stay in the queue. `number` is unique, so that sequences are never compared."""

    key: Key
    number: int
    since_s: float
    rows: int
    tokens: int
    sequence: Sequence


class WaitQueue:
    """The waiting sequences, in two orders: by key, and by the time they began to wait."""

    __slots__ = (
        "_aside",
        "_by_key",
        "_by_time",
        "_live",
        "_passed_by_key",
        "_passed_by_time",
        "_pushed",
        "rows",
        "tokens",
    )

    def __init__(self) -> None:
        self._by_key: list[Entry] = []
        self._by_time: deque[Entry] = deque()
        self._live = 0
        self._pushed = 0
        self._aside: set[int] = set()  # numbers of entries
        self._passed_by_key: list[Entry] = []  # of these, those that `first` took out
        self._passed_by_time: list[Entry] = []  # and `oldest`, in their order
        self.rows = 0  # device rows that all waiting sequences would take
        self.tokens = 0  # of all their prompts, and of what they drew before a preemption

    def __len__(self) -> int:
        return self._live

    def push(self, sequence: Sequence, now: float) -> None:
        """The sequence waits from `now` on. `now` never falls from call to call."""
        assert sequence.queued is None, "a sequence waits twice"
        self._pushed += 1
        rows, tokens = sequence.request.rows, sequence.base
        entry = Entry(sequence.key, self._pushed, now, rows, tokens, sequence)
        sequence.queued = entry
        heappush(self._by_key, entry)
        self._by_time.append(entry)
        self._live += 1
        self.rows += rows
        self.tokens += tokens

    def remove(self, sequence: Sequence) -> None:
        """The sequence waits no longer: admitted, or ended."""
        entry: Entry = sequence.queued
        assert entry is not None, "a sequence that does not wait is removed from the queue"
        sequence.queued = None
        self._live -= 1
        self.rows -= entry.rows
        self.tokens -= entry.tokens
        if len(self._by_key) + len(self._by_time) > 4 * self._live + SWEEP_AT:
            self._sweep()

    def first(self) -> Sequence | None:
        """The waiting sequence with the best key, of those that are not set aside."""
        heap = self._by_key
        while heap and (heap[0].sequence.queued is not heap[0] or heap[0].number in self._aside):
            entry = heappop(heap)
            if entry.number in self._aside:
                self._passed_by_key.append(entry)
        return heap[0].sequence if heap else None

    def oldest(self) -> tuple[Sequence, float] | None:
        """The sequence that has waited longest, of those that are not set aside, and since when."""
        line = self._by_time
        while line and (line[0].sequence.queued is not line[0] or line[0].number in self._aside):
            entry = line.popleft()
            if entry.number in self._aside:
                self._passed_by_time.append(entry)
        return (line[0].sequence, line[0].since_s) if line else None

    def set_aside(self, sequence: Sequence) -> None:
        """It goes on waiting, and others are looked at, until `restore`."""
        assert sequence.queued is not None, "a sequence that does not wait is set aside"
        self._aside.add(sequence.queued.number)

    def restore(self) -> None:
        """All that were set aside stand where they stood."""
        if self._aside:
            for entry in self._passed_by_key:
                heappush(self._by_key, entry)
            self._by_time.extendleft(reversed(self._passed_by_time))
            self._passed_by_key, self._passed_by_time = [], []
            self._aside.clear()

    def _sweep(self) -> None:
        self._by_key = [entry for entry in self._by_key if entry.sequence.queued is entry]
        heapify(self._by_key)
        self._by_time = deque(e for e in self._by_time if e.sequence.queued is e)
