"""The tensors of the paged KV cache on a GPU.

One allocation, [layers, 2, blocks + 1, kv_heads, block_size, head_dim], of the layers of one KV
group; K and V of a layer are views; where keys are values (latent attention) there is one of them.
Layers of several groups share a view, for their blocks differ. The extra last block belongs to
padding: it is written by nobody and stays zero. Beside them the id of the token in each slot, where
the first group keeps all tokens: whoever shares a block shares its ids, so the sequence of a device
row is read through the row's table, however its tokens got there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.kernels.state import copy_blocks

ID_BYTES = 4  # of one slot's id


class IdSlots(NamedTuple):
    """Where the ids of all sequences stand: token p of device row r at
    ids[tables[r, p // block_size], p % block_size].

    ids [blocks, block_size] int32; tables [rows, width] int32.
    """

    ids: Tensor
    tables: Tensor


class CudaKvStore:
    """K and V of every layer, all zero at first.

    layers: of one KV group. places: of each layer of the model, its group and its place there; None
    = one group of all of them. keeps_ids: it has ids beside K and V, else `ids` has no block.
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
        device: torch.device,
        keys_are_values: bool = False,
        places: Sequence[tuple[int, int]] | None = None,
        keeps_ids: bool = True,
    ) -> None:
        places = places or [(0, layer) for layer in range(layers)]
        self.blocks, self.kv_heads = blocks, kv_heads
        self.block_size, self.head_dim = block_size, head_dim
        parts = 1 if keys_are_values else 2
        shape = (layers, parts, blocks + 1, kv_heads, block_size, head_dim)
        self._all = torch.zeros(shape, dtype=dtype, device=device)
        self.groups = [group for group, _ in places]  # of each layer of the model
        self.k = [self._all[at, 0] for _, at in places]
        self.v = [self._all[at, parts - 1] for _, at in places]
        id_blocks = blocks + 1 if keeps_ids else 0
        self.ids = torch.zeros((id_blocks, block_size), dtype=torch.int32, device=device)

    @property
    def spare_block(self) -> int:
        """The block that padding reads."""
        return self.blocks

    @property
    def size_bytes(self) -> int:
        """All of it."""
        return self._all.numel() * self._all.element_size() + self.ids.numel() * ID_BYTES

    @property
    def token_bytes(self) -> int:
        """K and V of one token, as often as layers of the model read them."""
        slots, layers = (self.blocks + 1) * self.block_size, self._all.shape[0]
        return self._all.numel() * self._all.element_size() // slots * len(self.k) // layers

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, target), as if all at once."""
        if not pairs:
            return
        table = torch.tensor(pairs, dtype=torch.int32)
        pinned = table.pin_memory() if self._all.is_cuda else table
        on_device = pinned.to(self._all.device, non_blocking=True)
        self._copy(table, on_device)

    def _copy(self, table: torch.Tensor, on_device: torch.Tensor) -> None:
        copy_blocks(self._all[:, 0], self._all[:, -1], table, on_device)
        if len(self.ids):
            copy_blocks(self.ids[None], self.ids[None], table, on_device)

    def compile(self) -> None:
        """Launch the kernels of `copy`, for `kernels.launch.compiling`."""
        table = torch.tensor([(0, 1)], dtype=torch.int32)
        self._copy(table, table.to(self._all.device))
