"""The tensors of the paged KV cache, on the CPU.

One K and one V tensor a layer, [blocks + 1, kv_heads, block_size, head_dim]: a head's keys within a
block lie next to each other. The extra last block stays zero for ever: padding reads it, so that
no stale value (not even NaN) can reach a sequence that does not own it.

int8 caches hold x = scale * q, a float32 scale for each line: one token of one head.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor


def _zero_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that take memory only once written: numpy asks the system, torch would write them."""
    return (
        torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8))
        .view(dtype)
        .view(shape)
    )


class KvStore:
    """K and V of every layer. A block takes memory from its first write on.

    keys_are_values: one line is both, as in latent attention.
    """

    def __init__(
        self,
        *,
        layers: int,
        blocks: int,
        kv_heads: int,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,
        keys_are_values: bool = False,
    ) -> None:
        assert not (keys_are_values and dtype == torch.int8), "int8 is written by native kernels"
        self.blocks, self.kv_heads = blocks, kv_heads
        self.block_size, self.head_dim = block_size, head_dim
        shape = (blocks + 1, kv_heads, block_size, head_dim)
        self.k = [_zero_pages(shape, dtype) for _ in range(layers)]
        self.v = self.k if keys_are_values else [_zero_pages(shape, dtype) for _ in range(layers)]
        scaled = layers if dtype == torch.int8 else 0  # else there are no scales
        self.k_scales = [_zero_pages(shape[:-1], torch.float32) for _ in range(scaled)]
        self.v_scales = [_zero_pages(shape[:-1], torch.float32) for _ in range(scaled)]

    def lines(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V as [(blocks + 1) * kv_heads * block_size, head_dim]; see `line_index`."""
        return self.k[layer].view(-1, self.head_dim), self.v[layer].view(-1, self.head_dim)

    def line_index(self, tables: Tensor, positions: Tensor) -> Tensor:
        """Where positions of sequences lie in `lines`.

        tables [n, width] blocks, positions [n, m] -> [n, kv_heads, m].
        """
        blocks = tables.gather(1, positions // self.block_size)[:, None]
        heads = torch.arange(self.kv_heads)[:, None]
        offsets = (positions % self.block_size)[:, None]
        return (blocks * self.kv_heads + heads) * self.block_size + offsets

    @property
    def zero_line(self) -> int:
        """A line of zeros."""
        return self.blocks * self.kv_heads * self.block_size

    def write(self, layer: int, index: Tensor, k: Tensor, v: Tensor) -> None:
        """index [tokens * kv_heads] lines, k and v [tokens, kv_heads, head_dim]. Not for int8:
        only native kernels, which write by themselves, make it."""
        assert not self.k_scales, "int8 is written by native kernels"
        k_lines, v_lines = self.lines(layer)
        k_lines.index_copy_(0, index, k.reshape(-1, self.head_dim))
        if self.v is not self.k:
            v_lines.index_copy_(0, index, v.reshape(-1, self.head_dim))

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, target), as if all at once."""
        if not pairs:
            return
        source, target = torch.tensor(pairs, dtype=torch.int64).unbind(1)
        values = [] if self.v is self.k else self.v
        for tensor in (*self.k, *values, *self.k_scales, *self.v_scales):
            tensor.index_copy_(0, target, tensor.index_select(0, source))
