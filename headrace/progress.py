"""The bar that a batch of `headrace.LLM` shows: prompts done, and tokens a second. rich is imported
where one is drawn."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress


class Bar:
    """On stderr, so that a program's own output stays clean. Not `shown`: does nothing."""

    def __init__(self, prompts: int, shown: bool) -> None:
        self._begun_s = time.monotonic()
        self._progress = _drawn() if shown else None
        if self._progress is not None:
            self._task = self._progress.add_task("", total=prompts, rate=0.0)

    def show(self, prompts: int, tokens: int) -> None:
        """So many are done. Cheap: the terminal is written ten times a second at most."""
        if self._progress is not None:
            rate = tokens / max(time.monotonic() - self._begun_s, 1e-9)
            self._progress.update(self._task, completed=prompts, rate=rate)

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()


def _drawn() -> Progress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    return Progress(
        TextColumn("prompts"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:.0f} tokens/s"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )
