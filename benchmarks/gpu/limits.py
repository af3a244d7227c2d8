"""What the card can do at most: rates measured with torch's own operations."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from benchmarks.gpu.work import Limits


def median_s(work: Callable[[], object], device: torch.device, runs: int = 10) -> float:
    """Median seconds of one call, after three that warm up."""
    times_s = []
    for i in range(3 + runs):
        _wait(device)
        began_s = time.perf_counter()
        work()
        _wait(device)
        if i >= 3:
            times_s.append(time.perf_counter() - began_s)
    return sorted(times_s)[runs // 2]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(device: torch.device, size_bytes: int = 2 << 30, side: int = 8192) -> Limits:
    """Copy and sum of `size_bytes` of random data; a bfloat16 product of `side` x `side`.

    Data is random: products of zeros can run faster than those of real data.
    """
    copy_s, read_s = _memory_s(device, size_bytes)
    rates = size_bytes / read_s, 2 * size_bytes / copy_s, 2 * side**3 / _matrix_s(device, side)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what comes next sizes itself by what is free
    return Limits(*rates)


def _memory_s(device: torch.device, size_bytes: int) -> tuple[float, float]:
    """Seconds of a copy of `size_bytes`, and of a sum over them."""
    source = torch.empty(size_bytes // 4, dtype=torch.float32, device=device).normal_()
    target = torch.empty_like(source)
    return median_s(lambda: target.copy_(source), device), median_s(source.sum, device)


def _matrix_s(device: torch.device, side: int) -> float:
    a = torch.randn(side, side, dtype=torch.bfloat16, device=device)
    b = torch.randn(side, side, dtype=torch.bfloat16, device=device)
    return median_s(lambda: a @ b, device)


def card_name(device: torch.device) -> str:
    """As the driver spells it; `cpu` for a processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
