"""How far the weights are loaded, told piece by piece."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int], None]  # (bytes loaded, bytes in all)


class Count:
    """Adds up pieces for a `Progress`, which may be None. One thread at a time."""

    def __init__(self, total_bytes: int, progress: Progress | None) -> None:
        self._done_bytes, self._total_bytes, self._progress = 0, total_bytes, progress

    def add(self, size_bytes: int) -> None:
        """So many more bytes are loaded."""
        self._done_bytes += size_bytes
        if self._progress is not None:
            self._progress(self._done_bytes, self._total_bytes)
