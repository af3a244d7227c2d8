"""A small paged cache and the columns of a step over it, drawn at random."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from headrace.kernels.columns import StepColumns


@dataclasses.dataclass(frozen=True)
class Paged:
    """k, v [blocks + 1, kv_heads, block_size, d] full of NaN; tables of half the angles' dims."""

    columns: StepColumns
    cos: Tensor
    sin: Tensor
    k: Tensor
    v: Tensor


def paged(
    tokens: int, kv_heads: int, d: int, dtype: torch.dtype, device: torch.device, *, seed: int = 0
) -> Paged:
    """Every token is at a random position of a row of its own; each third one writes nothing."""
    block_size, width = 4, 3
    rng = torch.Generator().manual_seed(seed)
    blocks = tokens * width
    tables = torch.randperm(blocks, generator=rng).view(tokens, width)
    tables = torch.cat((tables, torch.full((1, width), blocks)))  # the spare row
    columns = StepColumns(
        rows=torch.randperm(tokens, generator=rng).int().to(device),
        positions=torch.randint(block_size * width, (tokens,), generator=rng).int().to(device),
        writes=(torch.arange(tokens) % 3 != 2).int().to(device),
        tables=tables.int().to(device),
    )
    angles = torch.rand(block_size * width, d // 2, generator=rng) * 6
    cache = torch.full((2, blocks + 1, kv_heads, block_size, d), float("nan"), dtype=dtype)
    k, v = cache.to(device)
    return Paged(columns, angles.cos().to(device), angles.sin().to(device), k, v)


def written(cache: Tensor) -> Tensor:
    """Which elements of a cache that began as NaN hold a value."""
    return ~cache.isnan()
