"""Triton's key of itself, found before it is needed.

The name of every compiled kernel on disk holds a digest of all of Triton, 0.4 GB, which takes a
third of a second and more. Reading and digesting leave Python to others, so a thread does it while
they import.
"""

from __future__ import annotations

import contextlib
import threading

from triton.runtime.cache import triton_key  # remembers what it found

_finding: threading.Thread | None = None


def find() -> None:
    """Begin, once a process."""
    global _finding
    if _finding is None:
        _finding = threading.Thread(target=_find, name="triton-key", daemon=True)
        _finding.start()


def _find() -> None:
    with contextlib.suppress(Exception):  # whoever needs it hears of it
        triton_key()


def wait() -> None:
    """Until it is found, where that has begun: two would each do all of it."""
    if _finding is not None:
        _finding.join()
