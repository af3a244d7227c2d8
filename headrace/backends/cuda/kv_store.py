"""The tensors of the paged KV cache on a GPU.

One allocation, [layers, 2, blocks + 1, kv_heads, block_size, head_dim]; K and V of a layer are
views; where keys are values (latent attention) there is one of them.
The extra last block belongs to padding: it is written by nobody and stays zero. Beside them the id
of the token in each slot: whoever shares a block shares its ids, so the sequence of a device row is
read through the row's table, however its tokens got there.
"""

from __future__ import annotations

import torch

from headrace.kernels.state import copy_blocks

ID_BYTES = 4  # of one slot's id


class CudaKvStore:
    """K and V of every layer, all zero at first."""

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
    ) -> None:
        self.blocks, self.kv_heads = blocks, kv_heads
        self.block_size, self.head_dim = block_size, head_dim
        parts = 1 if keys_are_values else 2
        shape = (layers, parts, blocks + 1, kv_heads, block_size, head_dim)
        self._all = torch.zeros(shape, dtype=dtype, device=device)
        self.k = [self._all[layer, 0] for layer in range(layers)]
        self.v = [self._all[layer, parts - 1] for layer in range(layers)]
        self.ids = torch.zeros((blocks + 1, block_size), dtype=torch.int32, device=device)

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
        """K and V of one token in every layer."""
        slots = (self.blocks + 1) * self.block_size
        return self._all.numel() * self._all.element_size() // slots

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
        copy_blocks(self.ids[None], self.ids[None], table, on_device)

    def compile(self) -> None:
        """Launch the kernels of `copy`, for `kernels.launch.compiling`."""
        table = torch.tensor([(0, 1)], dtype=torch.int32)
        self._copy(table, table.to(self._all.device))
