"""How much of the weights is loaded, for whoever waits. rich is imported where a bar is drawn."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress

LINE_S = 5.0  # between two lines about weights that load
REFRESH_S = 0.1  # between two looks of the bar


class LoadBar:
    """How much of the weights is loaded: a bar on stderr if `shown`, else a line to `say` every few
    seconds. The bar is gone after `stop`, or when all is loaded."""

    def __init__(self, say: Callable[[str], None], shown: bool) -> None:
        self._say, self._shown = say, shown
        self._progress: Progress | None = None
        self._said_s = time.monotonic()

    def show(self, done_bytes: int, total_bytes: int) -> None:
        """So many are loaded. Any thread, one at a time."""
        if not self._shown:
            now_s = time.monotonic()
            if now_s - self._said_s >= LINE_S:
                self._said_s = now_s
                self._say(f"loaded {_gib(done_bytes)} of {_gib(total_bytes)} GiB of weights")
            return
        if self._progress is None:
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                DownloadColumn,
                Progress,
                TextColumn,
                TransferSpeedColumn,
            )

            self._progress = Progress(
                TextColumn("  load weights"),
                BarColumn(),
                DownloadColumn(binary_units=True),
                TransferSpeedColumn(),
                console=Console(stderr=True),
                auto_refresh=False,
                transient=True,
            )
            self._progress.start()
            self._progress.add_task("", total=total_bytes)
        self._progress.update(self._progress.task_ids[0], completed=done_bytes)
        now_s = time.monotonic()
        if now_s - self._said_s >= REFRESH_S:
            self._said_s = now_s
            self._progress.refresh()
        if done_bytes >= total_bytes:
            self.stop()

    def stop(self) -> None:
        """Give the terminal back."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f}"
