"""Work that leaves its results on disk, done by children of this process side by side.

Threads of one Python take turns with all that is Python, which half of a compilation is. A child
begins with what its parent has in memory, so the work needs no other form. It may use no GPU: the
parent's context is not the child's.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import struct
import time
import warnings
from collections.abc import Callable, Sequence

_NEXT = struct.Struct("<H")  # what a child takes from the pipe: the number of a job
_LONGEST_S = 120.0  # until children that hang are ended


def run_forked(jobs: Sequence[Callable[[], bool]], workers: int) -> int:
    """Each job once, in one of `workers` children, the first ones first -> how many said True.

    A job that fails, or a child that does, is passed over: what it should have left is missing.
    """
    assert len(jobs) < 1 << 14, "their numbers fit a pipe"
    take, give = os.pipe()
    heard, said = os.pipe()
    os.write(give, b"".join(_NEXT.pack(i) for i in range(len(jobs))))
    os.close(give)
    children = []
    for _ in range(min(workers, len(jobs))):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # 3.12: other threads are lost
            child = os.fork()
        if child == 0:
            _work(jobs, take, said)
        children.append(child)
    os.close(take)
    os.close(said)
    _wait(children)
    with os.fdopen(heard, "rb") as answers:
        return len(answers.read())


def _work(jobs: Sequence[Callable[[], bool]], take: int, said: int) -> None:
    """The child's life. It ends here: nothing of its parent's is closed or flushed twice, or freed:
    what its parent left for the garbage collector may belong to a device, and would abort it."""
    gc.freeze()
    try:
        while number := os.read(take, _NEXT.size):
            with contextlib.suppress(Exception):
                if jobs[_NEXT.unpack(number)[0]]():
                    os.write(said, b"+")
    finally:
        os._exit(0)


def _wait(children: list[int]) -> None:
    """Until all have ended, or were ended."""
    until_s = time.monotonic() + _LONGEST_S
    left = set(children)
    while left:
        for child in list(left):
            if os.waitpid(child, os.WNOHANG)[0] == child:
                left.discard(child)
            elif time.monotonic() > until_s:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                left.discard(child)
        if left:
            time.sleep(0.01)
