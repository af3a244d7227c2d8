"""An event loop whose clock is virtual: a sleep of an hour takes no time and is exact."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Skip(selectors.SelectSelector):
    """Instead of waiting it tells the clock how long it would have waited."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "all tasks wait for something that will never come"
        self.now_s += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Nothing that waits for the outside world works here."""

    def __init__(self) -> None:
        self._skip = _Skip()
        super().__init__(self._skip)

    def time(self) -> float:
        return self._skip.now_s


def run_virtual(main: Callable[[Callable[[], float]], Coroutine[Any, Any, T]]) -> T:
    """Run `main(clock)` to its end."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        loop = runner.get_loop()
        return runner.run(main(loop.time))
