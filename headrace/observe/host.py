"""What the machine says of itself: the server's processes, its memory, energy where it can be read.

Energy of processors comes from RAPL (Linux' powercap, readable by root on most systems). Where it
cannot be read there is none.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NamedTuple

import psutil

POWERCAP = Path("/sys/class/powercap")


class ProcessReading(NamedTuple):
    """One process at one moment."""

    cpu_s: float  # of processor time since it began
    rss_bytes: int


class Processes:
    """Readings of processes that come and go."""

    def __init__(self) -> None:
        self._known: dict[int, psutil.Process] = {}

    def read(self, pid: int) -> ProcessReading | None:
        """None: it is gone."""
        try:
            process = self._known.get(pid) or psutil.Process(pid)
            self._known[pid] = process
            with process.oneshot():
                times = process.cpu_times()
                return ProcessReading(times.user + times.system, process.memory_info().rss)
        except psutil.Error:
            self._known.pop(pid, None)
            return None


class Rapl:
    """Energy counters of processor packages, and of memory that they do not count."""

    def __init__(self, root: Path = POWERCAP) -> None:
        self._zones: dict[str, tuple[Path, int]] = {}  # name -> file, where it starts again
        for zone in sorted(root.glob("intel-rapl:*")):  # AMD's processors come under that name too
            with contextlib.suppress(OSError, ValueError):
                name = (zone / "name").read_text().strip()
                if name != "dram" and zone.name.count(":") > 1:
                    continue  # a part of its package
                limit = int((zone / "max_energy_range_uj").read_text())
                file = zone / "energy_uj"
                int(file.read_text())  # readable
                self._zones[f"{name}:{zone.name.split(':', 1)[1]}"] = (file, limit)
        self._last: dict[str, int] = {}

    def read(self) -> dict[str, float]:
        """Zone -> joules since the last call; the first call says 0."""
        grown: dict[str, float] = {}
        for name, (file, limit) in self._zones.items():
            with contextlib.suppress(OSError, ValueError):
                now = int(file.read_text())
                before = self._last.get(name, now)
                grown[name] = (now - before + (limit if now < before else 0)) / 1e6
                self._last[name] = now
        return grown


def memory() -> tuple[int, int]:
    """Bytes of the machine's memory: all, and what programs could still get."""
    found = psutil.virtual_memory()
    return found.total, found.available


def cpu_ratio() -> float:
    """Share of all cores that worked since the last call; the first call says nothing of worth."""
    return float(psutil.cpu_percent(None)) / 100
