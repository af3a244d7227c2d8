"""The phases of a start, timed for whoever reports them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Report = Callable[[str, float], None]  # (phase, seconds it took)


@contextmanager
def phase(name: str, report: Report) -> Iterator[None]:
    """Reports `name` and its seconds when the block ends well."""
    began_s = time.perf_counter()
    yield
    report(name, time.perf_counter() - began_s)
