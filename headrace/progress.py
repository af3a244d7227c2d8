"""The bar that a batch of `headrace.LLM` shows: prompts done, and tokens a second."""

from __future__ import annotations

import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Bar:
    """On stderr, so that a program's own output stays clean. Not `shown`: does nothing."""

    def __init__(self, prompts: int, shown: bool) -> None:
        self._shown, self._begun_s = shown, time.monotonic()
        self._progress = Progress(
            TextColumn("prompts"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]:.0f} tokens/s"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            disable=not shown,
        )
        self._task = self._progress.add_task("", total=prompts, rate=0.0)

    def show(self, prompts: int, tokens: int) -> None:
        """So many are done. Cheap: the terminal is written ten times a second at most."""
        if self._shown:
            rate = tokens / max(time.monotonic() - self._begun_s, 1e-9)
            self._progress.update(self._task, completed=prompts, rate=rate)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
