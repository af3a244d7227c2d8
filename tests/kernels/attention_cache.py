"""Random paged caches for the attention tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.kernels.columns import StepColumns


@dataclasses.dataclass(frozen=True)
class Paged:
    """A cache whose rows hold `lengths` tokens, in shuffled blocks.

    Slots that no row has written hold NaN: who reads them, fails. Block ids of a table beyond a
    row's length are far out of range: who follows one, fails. The last row is the spare one.
    """

    k: Tensor  # [blocks + 1, kv_heads, page, d]; the last block is zeros
    v: Tensor
    tables: Tensor  # [len(lengths) + 1, width] int32


def paged(
    lengths: Sequence[int],
    *,
    kv_heads: int,
    page: int,
    d: int,
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
) -> Paged:
    needed = [-(-length // page) for length in lengths]
    blocks, width = sum(needed) + 3, max(needed) + 2
    shape = (blocks + 1, kv_heads, page, d)
    k, v = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
    k[-1], v[-1] = 0, 0
    tables = torch.full((len(lengths) + 1, width), 2**30, dtype=torch.int32)
    tables[-1] = blocks
    ids = torch.randperm(blocks, generator=generator).tolist()
    for row, length in enumerate(lengths):
        for i in range(needed[row]):
            block = ids.pop()
            tables[row, i] = block
            used = min(page, length - i * page)
            for cache in (k, v):
                cache[block, :, :used] = torch.randn(kv_heads, used, d, generator=generator)
    return Paged(k.to(device, dtype), v.to(device, dtype), tables.to(device))


def decode_columns(cache: Paged, rows: Sequence[int], positions: Sequence[int]) -> StepColumns:
    columns = torch.tensor([rows, positions, [1] * len(rows)], dtype=torch.int32)
    columns = columns.to(cache.tables.device)
    return StepColumns(columns[0], columns[1], columns[2], cache.tables)
