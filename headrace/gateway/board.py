"""The load of workers as each gateway process of this machine counts it, for all of them to see.

A file that every process maps: one table a process, one row a worker: a key made of the worker's
name, then the counts of `WorkerView`. Each process writes its own table alone, a row at a time, and
adds up the rows of the others when it reads; 64-bit stores need no lock, and a count that is a
moment old does no harm. Nothing is sent, so nobody waits for anybody.
"""

from __future__ import annotations

import logging
import mmap
from hashlib import blake2b
from pathlib import Path

log = logging.getLogger("headrace.gateway")

MAX_WORKERS = 1024
_FIELDS = 5  # key, requests, waiting, pending tokens, decode tokens
_FREE, _LEFT = 0, -1  # keys of rows: never used; used once, found no more
Counts = tuple[int, int, int, int]


def key_of(name: str) -> int:
    """A worker's key: never 0 or -1."""
    return int.from_bytes(blake2b(name.encode(), digest_size=7).digest(), "big") + 1


class Board:
    """`processes` tables in the file at `path`; the one at `own` is this process's."""

    def __init__(self, path: Path, processes: int, own: int) -> None:
        size = 8 * _FIELDS * MAX_WORKERS
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), size * processes)
        self._cells = memoryview(self._map).cast("q")
        self._first = [p * _FIELDS * MAX_WORKERS for p in range(processes)]  # cell of each table
        self._own = self._first[own]
        self._others = [first for first in self._first if first != self._own]

    @staticmethod
    def create(path: Path, processes: int) -> None:
        """An empty one."""
        path.write_bytes(bytes(8 * _FIELDS * MAX_WORKERS * processes))

    def close(self) -> None:
        """This process looks no more."""
        self._cells.release()
        self._map.close()

    def clear(self, process: int) -> None:
        """It died: its requests are gone."""
        first = self._first[process]
        for cell in range(first, first + _FIELDS * MAX_WORKERS):
            self._cells[cell] = 0

    def enter(self, key: int) -> int:
        """The row of a worker in this process's table, to be given to `write`; 0 counts until then.
        -1: there are more than `MAX_WORKERS`, and this one is counted by each process alone.
        """
        for i in range(MAX_WORKERS):
            row = self._own + _FIELDS * ((key + i) % MAX_WORKERS)
            if self._cells[row] in (_FREE, _LEFT):
                self.write(row, (0, 0, 0, 0))
                self._cells[row] = key
                return row
        log.error("more than %d workers: what others send to the last is not known", MAX_WORKERS)
        return -1

    def leave(self, row: int) -> None:
        """The worker is gone."""
        if row >= 0:
            self._cells[row] = _LEFT

    def write(self, row: int, counts: Counts) -> None:
        """What this process has at that worker."""
        cells = self._cells
        cells[row + 1], cells[row + 2], cells[row + 3], cells[row + 4] = counts

    def others(self, key: int) -> Counts:
        """What all other processes have there."""
        cells = self._cells
        requests = waiting = pending = decode = 0
        for first in self._others:
            row = self._find(first, key)
            if row >= 0:
                requests += cells[row + 1]
                waiting += cells[row + 2]
                pending += cells[row + 3]
                decode += cells[row + 4]
        return requests, waiting, pending, decode

    def _find(self, first: int, key: int) -> int:
        """The row of a table; -1 = it has none."""
        for i in range(MAX_WORKERS):
            row = first + _FIELDS * ((key + i) % MAX_WORKERS)
            if self._cells[row] == key:
                return row
            if self._cells[row] == _FREE:
                break
        return -1
