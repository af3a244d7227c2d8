"""Child processes that end with their parent."""

from __future__ import annotations

import ctypes
import os
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def die_with_parent(number: int, parent: int | None = None) -> None:
    """Call in a child: `number` is sent to it when the thread that started it ends, however.

    On Linux; elsewhere it does nothing. A child whose `parent` (a process id) has gone already
    ends at once.
    """
    if _libc is not None:
        _libc.prctl(PR_SET_PDEATHSIG, number)
    if parent is not None and os.getppid() != parent:
        raise SystemExit(1)
