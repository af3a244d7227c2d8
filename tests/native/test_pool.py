"""The pool's threads cost nothing while no step runs."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import pytest

from headrace.native.library import Library
from headrace.native.pool import Pool
from tests.native import rig

_TASKS = Path("/proc/self/task")
_LOOKS = 50  # far more than a busy machine needs
_IDLE_S = 0.2


def _threads() -> set[int]:
    return {int(task.name) for task in _TASKS.iterdir()}


def _state(thread: int) -> str:
    """R: runs or would run; S: sleeps."""
    return (_TASKS / str(thread) / "stat").read_text().rpartition(")")[2].split()[0]


def _processor_ns(thread: int) -> int:
    """What one thread has used; the clock's number is the kernel's coding of a thread's id."""
    return time.clock_gettime_ns((~thread << 3) | 6)


def _sleep_through(workers: set[int]) -> bool:
    """Whether they sleep and use no processor time at all for _IDLE_S."""
    before_ns = [_processor_ns(worker) for worker in workers]
    time.sleep(_IDLE_S)
    asleep = all(_state(worker) == "S" for worker in workers)
    return asleep and [_processor_ns(worker) for worker in workers] == before_ns


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/task")
def test_workers_sleep_between_steps(pool: Pool, library: Library) -> None:
    """However busy the machine is: a worker that spins is runnable, with or without a core."""
    rng = np.random.default_rng(3)
    matrix = rig.pack(library, rig.random_raw(rng, "Q4_1", 64, 64), "Q4_1", 64)
    x = rng.standard_normal((2, 64), np.float32)
    before = _threads()
    own = Pool(library, 3, isa=pool.isa)
    workers = _threads() - before
    assert len(workers) == own.threads - 1
    for _ in range(3):
        rig.linear(own, library, x, [matrix], exact=False)
    assert any(_sleep_through(workers) for _ in range(_LOOKS)), "a worker spins between steps"
    own.close()
