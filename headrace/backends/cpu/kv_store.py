"""The paged KV cache as torch's tensors, on the CPU: views of `kv_memory`."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from headrace.backends.cpu.kv_memory import Array, KvMemory


class KvStore:
    """K and V of `memory`, for what computes on torch."""

    def __init__(self, memory: KvMemory) -> None:
        assert memory.dtype != "int8", "int8 is read and written by native kernels"
        self.blocks, self.kv_heads = memory.blocks, memory.kv_heads
        self.block_size, self.head_dim = memory.block_size, memory.head_dim
        self._places = memory.places
        dtype: torch.dtype = getattr(torch, memory.dtype)
        self.k = [_tensor(array, dtype) for array in memory.k]
        same = memory.v is memory.k
        self.v = self.k if same else [_tensor(array, dtype) for array in memory.v]

    def group(self, layer: int) -> int:
        """The KV group of a layer: whose tables say where its lines are."""
        return self._places[layer][0]

    def lines(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V as [(blocks + 1) * kv_heads * block_size, head_dim]; see `line_index`."""
        at = self._places[layer][1]
        return self.k[at].view(-1, self.head_dim), self.v[at].view(-1, self.head_dim)

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
        """index [tokens * kv_heads] lines, k and v [tokens, kv_heads, head_dim]."""
        k_lines, v_lines = self.lines(layer)
        k_lines.index_copy_(0, index, k.reshape(-1, self.head_dim))
        if self.v is not self.k:
            v_lines.index_copy_(0, index, v.reshape(-1, self.head_dim))


def _tensor(array: Array, dtype: torch.dtype) -> Tensor:
    bits = array.view(np.int16) if dtype == torch.bfloat16 else array
    return torch.from_numpy(bits).view(dtype)
