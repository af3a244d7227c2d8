"""Configurations of the attention kernels: data; the default is safe on every card.

`benchmarks/gpu/attention.py` times the candidates and prints the best of each shape.
"""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """tile_keys: keys a turn of the loop; min_share_keys: a program's least part of a context;
    stages: depth of the loads in flight."""

    tile_keys: int
    warps: int
    stages: int
    min_share_keys: int = 256


# Tiles of K and V in flight: stages * tile_keys * head_dim * 2 * itemsize, within 227 KB a
# multiprocessor; two programs of it where they fit.
DECODE_CANDIDATES = (
    DecodeConfig(64, 4, 2),
    DecodeConfig(64, 4, 3),
    DecodeConfig(64, 4, 4),
    DecodeConfig(128, 4, 3),
    DecodeConfig(128, 8, 3),
    DecodeConfig(32, 4, 5),
    DecodeConfig(32, 2, 4),
    DecodeConfig(32, 4, 3),
    DecodeConfig(32, 1, 3),
)


def decode_config(dtype: torch.dtype, head_dim: int) -> DecodeConfig:
    """By bytes of a line: longer lines, shorter tiles.

    Of many rows with short contexts each program waits for few loads after another: more programs
    at once hide that better than more loads of each do.
    """
    if dtype == torch.float32:
        return DecodeConfig(16, 4, 2)
    if head_dim > 128:
        return DecodeConfig(32, 4, 3)
    return DecodeConfig(64, 4, 2)


@dataclasses.dataclass(frozen=True)
class PrefillConfig:
    """rows: queries times heads of one program; tile_keys: keys a turn of the loop;
    resident: programs that a multiprocessor holds at once, by their registers and memory."""

    rows: int
    tile_keys: int
    warps: int
    stages: int
    resident: int = 1


# Hopper's wgmma takes 64 rows a group of four warps. Tiles of 128 keys, and 128 rows in four
# warps, spill registers at head_dim 128.
PREFILL_CANDIDATES = (
    PrefillConfig(128, 64, 8, 3),
    PrefillConfig(128, 64, 8, 2),
    PrefillConfig(128, 32, 8, 4),
    PrefillConfig(64, 64, 4, 2, resident=2),
)


def prefill_config(dtype: torch.dtype, head_dim: int) -> PrefillConfig:
    """By bytes of a line, as `decode_config`."""
    if dtype == torch.float32:  # no matrix units: tiles that fit the registers
        return PrefillConfig(32, 16, 8, 2)
    if head_dim > 128:
        return PrefillConfig(128, 32, 8, 2)
    return PrefillConfig(128, 64, 8, 3)
