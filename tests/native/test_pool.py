"""The pool's threads cost nothing while no step runs."""

from __future__ import annotations

import time

import numpy as np

from headrace.native.library import Library
from headrace.native.pool import Pool
from tests.native import rig

_IDLE_S = 0.4


def test_idle_threads_take_no_processor_time(pool: Pool, library: Library) -> None:
    rng = np.random.default_rng(3)
    matrix = rig.pack(library, rig.random_raw(rng, "Q4_1", 64, 64), "Q4_1", 64)
    rig.linear(pool, library, rng.standard_normal((2, 64), np.float32), [matrix], exact=False)
    time.sleep(0.2)  # longer than workers, and threads of numpy, spin after work
    began_s = time.process_time()  # of all threads
    time.sleep(_IDLE_S)
    assert time.process_time() - began_s < 0.25 * _IDLE_S, "a thread spins between steps"
