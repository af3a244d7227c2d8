"""Who computes a step: a thread of its own, or the thread that asks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Pending(Protocol[T_co]):
    """Work that was asked for."""

    def done(self) -> bool:
        """`result` would not wait."""

    def result(self) -> T_co:
        """Wait for it. Raises what it raised."""


class Worker(Protocol):
    """Does what it is asked in that order."""

    def submit(self, work: Callable[[], T]) -> Pending[T]:
        """Ask for work. Never raises what the work raises."""

    def close(self) -> None:
        """Nothing more is asked for."""


class ThreadWorker:
    """One thread: the engine plans the next step while it computes. `begin` is the first that it
    runs."""

    def __init__(self, begin: Callable[[], None] | None = None) -> None:
        self._pool = ThreadPoolExecutor(1, "runner", initializer=begin)

    def submit(self, work: Callable[[], T]) -> Pending[T]:
        """See `Worker`."""
        return self._pool.submit(work)

    def close(self) -> None:
        """See `Worker`; ends the thread."""
        self._pool.shutdown(wait=True)


class _Done(Generic[T]):
    def __init__(self, work: Callable[[], T]) -> None:
        self._error: Exception | None = None
        try:
            self._value = work()
        except Exception as error:
            self._error = error

    def done(self) -> bool:
        return True

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        return self._value


class InlineWorker:
    """The thread that asks. For an engine that would only wait: a step costs no hand-over to
    another thread and back, which takes long where others want the cores."""

    def submit(self, work: Callable[[], T]) -> Pending[T]:
        """See `Worker`; the work is done when this returns."""
        return _Done(work)

    def close(self) -> None:
        """See `Worker`."""
