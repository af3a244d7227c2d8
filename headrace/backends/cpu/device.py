"""Facts about this processor and its memory."""

from __future__ import annotations

import functools
import os
from pathlib import Path

KV_SHARE = 4  # one part in this many of free memory goes to a KV cache
_BF16_FLAGS = ("avx512_bf16", "amx_bf16")


@functools.cache
def flags() -> frozenset[str]:
    """The processor's feature flags as Linux names them; empty where there is no /proc/cpuinfo."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    found = next((ln for ln in lines if ln.startswith(("flags", "Features"))), "")
    return frozenset(found.partition(":")[2].split())


def native_bfloat16(found: frozenset[str]) -> str:
    """The flag that makes bfloat16 products fast, "" if there is none."""
    return next((flag for flag in _BF16_FLAGS if flag in found), "")


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_memory_bytes(
    meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")
) -> int:
    """What can still be allocated: MemAvailable, or less where the control group allows less.

    Half of the memory there is, on systems without /proc/meminfo.
    """
    if not meminfo.exists():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    available = next(
        int(line.split()[1]) * 1024
        for line in meminfo.read_text().splitlines()
        if line.startswith("MemAvailable:")
    )
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
    except OSError:
        return available
    return available if limit == "max" else max(0, min(available, int(limit) - used))
