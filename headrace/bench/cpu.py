"""CPU time of a process and of all it started, read from the system."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import psutil

from headrace.errors import ConfigError


class CpuMeter:
    """CPU seconds of the tree under `pid`, children that have ended since included.

    A child that starts and ends between two readings is not seen; hence `reading`, which takes one
    every half second. Raises ConfigError when no such process lives.
    """

    def __init__(self, pid: int) -> None:
        try:
            self._root = psutil.Process(pid)
        except psutil.NoSuchProcess:
            raise ConfigError(f"no process {pid}", param="pid") from None
        self._seen_s: dict[tuple[int, float], float] = {}  # (pid, start) -> user + system

    def total_s(self) -> float:
        """User plus system seconds so far. Never falls."""
        gone = (psutil.NoSuchProcess, psutil.AccessDenied)
        tree = []
        with contextlib.suppress(*gone):
            tree = [self._root, *self._root.children(recursive=True)]
        for process in tree:
            with contextlib.suppress(*gone):
                times = process.cpu_times()
                self._seen_s[process.pid, process.create_time()] = times.user + times.system
        return sum(self._seen_s.values())


class Cores:
    """Filled when `measured` ends: CPU seconds a second, None where nothing was to measure."""

    server: float | None = None
    client: float | None = None


@contextlib.asynccontextmanager
async def measured(meter: CpuMeter | None, period_s: float = 0.5) -> AsyncIterator[Cores]:
    """Cores that the server's tree and this process used while the block ran."""
    cores = Cores()
    wall, own = time.monotonic(), time.process_time()
    before_s = meter.total_s() if meter else 0.0

    async def sample() -> None:
        while meter:
            await asyncio.sleep(period_s)
            meter.total_s()

    sampler = asyncio.create_task(sample())
    try:
        yield cores
    finally:
        sampler.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sampler
        took_s = max(time.monotonic() - wall, 1e-9)
        cores.client = (time.process_time() - own) / took_s
        if meter:
            cores.server = (meter.total_s() - before_s) / took_s
