"""Configurations worth timing: enough bytes in flight, enough programs, and room on Hopper."""

from __future__ import annotations

import dataclasses
import itertools
import random

from headrace.kernels.product import Config, shared_bytes
from headrace.kernels.tuned import default

SHARED_BYTES = 227 << 10  # of one multiprocessor
THREADS = 2048
MULTIPROCESSORS = 132
# Latency of a loaded memory (about 0.9 us) times its rate (4.8 TB/s on an H200).
IN_FLIGHT_BYTES = 4 << 20


def worth(config: Config, bucket: int, n: int, k: int) -> bool:
    """Whether it can keep the memory busy, by arithmetic alone."""
    tile = config.block_n * config.block_k * 2
    shared = shared_bytes(config, bucket)
    programs = -(-n // config.block_n) * config.split_k
    if not 4096 <= tile <= 32768 or shared > SHARED_BYTES - 1024 or config.block_n > 2 * n:
        return False
    if not _splits(config, bucket, n, k) or not _holds(config, bucket):
        return False
    resident = min(SHARED_BYTES // (shared + 1024), THREADS // (32 * config.warps))
    in_flight = min(programs, resident * MULTIPROCESSORS) * tile * (config.stages - 2)
    return programs >= 0.75 * MULTIPROCESSORS and in_flight >= IN_FLIGHT_BYTES


def _splits(config: Config, bucket: int, n: int, k: int) -> bool:
    """Whether the workspace holds its partial sums and every part has as many columns."""
    if config.split_k == 1:
        return True
    programs = -(-n // config.block_n) * config.split_k
    few = programs <= 8 * MULTIPROCESSORS
    return (
        few and programs * config.block_n * bucket * 4 <= 32 << 20 and not k % (config.split_k * 32)
    )


def _holds(config: Config, bucket: int) -> bool:
    """In registers: 64 sums a thread, or 128 of the most tokens; two turns of x if it is early."""
    threads = 32 * config.warps
    turns = not config.early or bucket * config.block_k <= 64 * threads
    return turns and config.block_n * bucket <= (128 if bucket == 128 else 64) * threads


def candidates(bucket: int, n: int, k: int, *, most: int, seed: int = 0) -> list[Config]:
    """The default and up to `most` - 1 others, drawn at random but the same ones each time."""
    sizes = itertools.product(
        (16, 32, 64, 128, 256), (64, 128, 256, 512), (2, 4, 8), (3, 4, 5, 6, 8, 10), (1, 2, 4, 8)
    )
    ways = ((False, False), (True, False), (False, True))  # early, stagger
    made = [
        Config(*values, prefetch_bytes=32768, fold_norm=False, early=early, stagger=stagger)
        for values in sizes
        for early, stagger in ways
    ]
    good = [config for config in made if worth(config, bucket, n, k)]
    first = default(bucket, n, k)
    good = [config for config in good if config != first]
    return [first, *random.Random(seed).sample(good, min(most - 1, len(good)))]


PREFETCHES_BYTES = (0, 16384, 32768, 65536, 131072)


def neighbours(config: Config, bucket: int, n: int, k: int) -> list[Config]:
    """One size halved or doubled, one stage more or less, or as many bytes in another tile."""
    made = [
        dataclasses.replace(config, **{name: size})
        for name in ("block_n", "block_k", "warps", "split_k")
        for size in (getattr(config, name) // 2, getattr(config, name) * 2)
    ]
    made.append(dataclasses.replace(config, early=not config.early))
    made.append(dataclasses.replace(config, stagger=not config.stagger))
    made += [dataclasses.replace(config, stages=config.stages + step) for step in (-1, 1)]
    wide, narrow = (
        (config.block_n * 2, config.block_k // 2),
        (config.block_n // 2, config.block_k * 2),
    )
    made += [
        dataclasses.replace(config, block_n=size, block_k=turn) for size, turn in (wide, narrow)
    ]
    return [c for c in made if _runs(c, bucket) and _splits(c, bucket, n, k)]


def _runs(config: Config, bucket: int) -> bool:
    sizes = config.block_n >= 16 and config.block_k >= 32 and config.stages >= 2
    groups = 1 <= config.warps <= 8 and 1 <= config.split_k <= 8
    fits = _holds(config, bucket)
    return sizes and groups and fits and shared_bytes(config, bucket) <= SHARED_BYTES - 1024


def shortlist(
    standing: Config | None, bucket: int, n: int, k: int, *, most: int
) -> list[Config | None]:
    """The library, the neighbours of what stands, and others up to `most`."""
    found: list[Config | None] = [None]
    if standing is not None:
        found += neighbours(standing, bucket, n, k)
    others = [c for c in candidates(bucket, n, k, most=most) if c not in found]
    return found + others[: max(0, most - len(found))]


def switches(config: Config, *, folds: bool) -> list[Config]:
    """The same tiles with every prefetch, and the norm apart too where it folds in."""
    return [
        dataclasses.replace(config, prefetch_bytes=size, fold_norm=fold)
        for size in PREFETCHES_BYTES
        for fold in ((True, False) if folds else (config.fold_norm,))
    ]
