"""The circuit breaker of one worker. It counts what says the worker is ill, and nothing else."""

from __future__ import annotations


class Breaker:
    """Closed until `failures` in a row; then open for `open_s`; then one request tries it."""

    def __init__(self, failures: int, open_s: float) -> None:
        self._limit, self._open_s = failures, open_s
        self._failures = 0
        self.closed = True
        self._until_s = 0.0
        self._trying = False

    @property
    def state(self) -> str:
        """closed, open (until its time is over) or trying."""
        if self.closed:
            return "closed"
        return "trying" if self._trying else "open"

    def admits(self, now_s: float) -> bool:
        """Whether a request may go there. It changes nothing: `placed` follows if one does."""
        return self.closed or (now_s >= self._until_s and not self._trying)

    def placed(self) -> None:
        """A request goes there."""
        self._trying = not self.closed

    def succeeded(self) -> None:
        """It answered."""
        self._failures, self.closed, self._trying = 0, True, False

    def failed(self, now_s: float) -> None:
        """A connect error, a 5xx or a timeout."""
        self._failures += 1
        self.closed = self._failures < self._limit
        self._trying = False
        self._until_s = now_s + self._open_s

    def released(self) -> None:
        """The request that tried it ended without saying anything of the worker: another may."""
        self._trying = False
