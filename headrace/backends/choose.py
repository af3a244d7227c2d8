"""Which backend computes, and why. Looks at files and devices, not at torch: it must be quick."""

from __future__ import annotations

from pathlib import Path

from headrace.backends.cpu.device import cores as usable_cores
from headrace.config import Resolved, Settings
from headrace.errors import ConfigError


def resolve_backend(settings: Settings) -> Resolved[str]:
    """`auto` becomes cpu or stays what was asked. Raises ConfigError for one that is not built."""
    if settings.backend == "cuda":
        raise ConfigError(
            "backend = 'cuda': this version has no CUDA backend; use cpu", param="backend"
        )
    if settings.backend != "auto":
        return Resolved(settings.backend, "as set")
    if Path("/dev/nvidiactl").exists():
        return Resolved("cpu", "a GPU is here, but this version has no CUDA backend")
    return Resolved("cpu", f"no GPU found; {usable_cores()} cores")


def resolve_overlap(settings: Settings, backend: str) -> Resolved[bool]:
    """Whether step N+1 is planned while step N runs."""
    if settings.overlap != "auto":
        return Resolved(settings.overlap == "on", "as set")
    if backend == "fake":
        return Resolved(True, "the fake device runs beside the host")
    return Resolved(False, "on the cpu backend host and device are the same cores")


def resolve_api_workers(settings: Settings) -> Resolved[int]:
    """How many HTTP processes: they detokenise and stream, so many cores can use several."""
    if settings.api_workers != "auto":
        return Resolved(int(settings.api_workers), "as set")
    cores = usable_cores()
    if cores < 8:
        return Resolved(1, f"{cores} cores: the rest computes")
    return Resolved(min(4, cores // 8), f"one for each 8 of {cores} cores, at most 4")
