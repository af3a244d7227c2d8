"""The ids of one sequence, for draws that look at what came before them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]

_FIRST_ROOM = 256  # ids; doubles


class History:
    """Ids by position. Each is written before a draw reads it; rewriting one changes nothing."""

    __slots__ = ("_ids", "_known")

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids: Ids = np.zeros(max(_FIRST_ROOM, 2 * len(ids)), np.int64)
        self._known = 0
        self.put(0, ids)

    def put(self, position: int, ids: Sequence[int]) -> None:
        """ids stand at positions [position, position + len(ids)); no hole before them."""
        assert position <= self._known, f"position {position}, but only {self._known} are known"
        end = position + len(ids)
        if end > self._ids.size:
            self._ids = np.concatenate((self._ids, np.zeros(max(end, self._ids.size), np.int64)))
        self._ids[position:end] = ids
        self._known = max(self._known, end)

    def last(self, position: int, window: int) -> Ids:
        """The ids before `position`, the last `window` of them; 0 = all. A view."""
        assert position <= self._known, f"position {position}, but only {self._known} are known"
        return self._ids[max(0, position - window) if window else 0 : position]
