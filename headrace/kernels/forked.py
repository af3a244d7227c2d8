"""Work that leaves its results on disk, done by children of this process side by side.

Threads of one Python take turns with all that is Python, which half of a compilation is. A child
begins with what its parent has in memory, so the work needs no other form. It may use no GPU: the
parent's context is not the child's. And it ends with its parent, however that ends: it would go on
with the jobs for minutes, and keep from others what its parent held, a device's memory among it.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import struct
import time
import warnings
from collections.abc import Callable, Sequence

from headrace.children import die_with_parent

log = logging.getLogger(__name__)

_NEXT = struct.Struct("<H")  # what a child takes from the pipe: the number of a job
_LONGEST_S = 120.0  # until children that hang are ended


def run_forked(jobs: Sequence[Callable[[], bool]], workers: int) -> int:
    """Each job once, in one of `workers` children, the first ones first -> how many said True.

    A job that fails, or a child that does or cannot begin, is passed over: what it should have left
    is missing.
    """
    assert len(jobs) < 1 << 14, "their numbers fit a pipe"
    take, give = os.pipe()
    heard, said = os.pipe()
    os.write(give, b"".join(_NEXT.pack(i) for i in range(len(jobs))))
    os.close(give)
    children = set[int]()
    with os.fdopen(heard, "rb") as answers:
        try:
            _begin(children, min(workers, len(jobs)), jobs, take, said)
            _wait(children)
        finally:
            _end(children)
            os.close(take)
            os.close(said)
        return len(answers.read())


def _begin(
    children: set[int], count: int, jobs: Sequence[Callable[[], bool]], take: int, said: int
) -> None:
    """As many of `count` children as there may be."""
    parent, collects = os.getpid(), gc.isenabled()
    gc.disable()  # a child that collected before it froze would free what is its parent's
    try:
        for _ in range(count):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # 3.12: other threads are lost
                child = os.fork()
            if child == 0:
                _work(jobs, take, said, parent)
            children.add(child)
    except OSError as error:
        log.warning("kernels: %d processes compile, not %d: %s", len(children), count, error)
    finally:
        if collects:
            gc.enable()


def _work(jobs: Sequence[Callable[[], bool]], take: int, said: int, parent: int) -> None:
    """The child's life. It ends here: nothing of its parent's is closed or flushed twice, or freed:
    what its parent left for the garbage collector may belong to a device, and would abort it."""
    try:
        gc.freeze()
        gc.enable()
        die_with_parent(signal.SIGKILL, parent)
        while number := os.read(take, _NEXT.size):
            with contextlib.suppress(Exception):
                if jobs[_NEXT.unpack(number)[0]]():
                    os.write(said, b"+")
    finally:
        os._exit(0)


def _wait(children: set[int]) -> None:
    """Until all have ended, or it took too long; those that ended are children no more."""
    until_s = time.monotonic() + _LONGEST_S
    while children and time.monotonic() < until_s:
        children -= {child for child in children if _ended(child, os.WNOHANG)}
        if children:
            time.sleep(0.01)


def _end(children: set[int]) -> None:
    """Those that are left."""
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    for child in children:
        _ended(child, 0)


def _ended(child: int, options: int) -> bool:
    try:
        return os.waitpid(child, options)[0] == child
    except ChildProcessError:  # where nobody asks how children ended, none is left to ask about
        return True
