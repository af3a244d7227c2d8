"""Where the list of workers comes from. A source of another kind implements `Registry`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from headrace.errors import ConfigError
from headrace.gateway.settings import WorkerSpec, read_fleet

log = logging.getLogger("headrace.gateway")

Apply = Callable[[Sequence[WorkerSpec]], None]


class Named(Protocol):
    """A name that is asked again and again where its workers are."""

    @property
    def url(self) -> str:
        """As it was configured."""

    @property
    def targets(self) -> Sequence[object]:
        """Where its workers are, one each."""

    @property
    def why(self) -> str:
        """Why these are not of the last answer; "" = they are."""

    @property
    def counts(self) -> Mapping[str, int]:
        """Answers, by their kind."""

    def age_s(self, now_s: float) -> float:
        """Since the answer that they are of."""


class Registry(Protocol):
    """Tells the gateway which workers there should be, whenever that changes."""

    @property
    def names(self) -> Sequence[Named]:
        """Those that workers come from."""

    def start(self, apply: Apply) -> None:
        """Call `apply` with the whole list now, and with the whole list at every change."""

    def tick(self) -> None:
        """Called about once a second in the gateway's loop; must not block it."""

    def close(self) -> None:
        """The gateway ends: `apply` is not called any more."""


class StaticRegistry:
    """The workers of the command line."""

    names: Sequence[Named] = ()

    def __init__(self, specs: Sequence[WorkerSpec]) -> None:
        self._specs = specs

    def start(self, apply: Apply) -> None:
        apply(self._specs)

    def tick(self) -> None:
        """Nothing ever changes."""

    def close(self) -> None:
        """Nothing runs."""


class FileRegistry:
    """The workers of a fleet file, read again when it changes. A bad file changes nothing."""

    names: Sequence[Named] = ()

    def __init__(self, path: Path, more: Sequence[WorkerSpec] = ()) -> None:
        """more: workers beside those of the file."""
        self._path, self._more = path, tuple(more)
        self._seen = self._stamp()
        self._specs = (*self._more, *read_fleet(path).workers)

    def start(self, apply: Apply) -> None:
        self._apply = apply
        apply(self._specs)

    def tick(self) -> None:
        stamp = self._stamp()
        if stamp == self._seen:
            return
        self._seen = stamp
        try:
            self._specs = (*self._more, *read_fleet(self._path).workers)
        except ConfigError as error:
            log.error("%s; the workers stay as they are", error.message)
            return
        log.info("%s changed: %d workers", self._path, len(self._specs))
        self._apply(self._specs)

    def close(self) -> None:
        """Nothing runs."""

    def _stamp(self) -> tuple[int, int]:
        try:
            stat = self._path.stat()
        except OSError:
            return (0, 0)
        return stat.st_mtime_ns, stat.st_size
