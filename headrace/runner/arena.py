"""Which parts of a fixed stretch of integers are taken: lists of rows that come and go."""

from __future__ import annotations


class Arena:
    """Addresses 0..size-1, handed out in one piece each, the lowest that fits."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = [(0, size)]  # (begin, end), ascending, never touching

    def take(self, count: int) -> int | None:
        """The first of `count` addresses, count > 0; None if no free piece is as long."""
        for i, (begin, end) in enumerate(self._free):
            if end - begin >= count:
                self._free[i : i + 1] = [(begin + count, end)] * (end - begin > count)
                return begin
        return None

    def give(self, begin: int, count: int) -> None:
        """A piece that `take` handed out is free again."""
        pieces = sorted([*self._free, (begin, begin + count)])
        joined = pieces[:1]
        for first, end in pieces[1:]:
            assert first >= joined[-1][1], f"addresses {first}.. were free already"
            if first == joined[-1][1]:
                joined[-1] = (joined[-1][0], end)
            else:
                joined.append((first, end))
        self._free = joined
