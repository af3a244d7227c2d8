"""The memory of the paged KV cache, on the CPU; no torch.

One K and one V array for each layer of a group, [blocks + 1, kv_heads, block_size, head_dim]: a
head's keys within a block lie next to each other. Layers of several groups share an array, for
their blocks differ. The extra last block stays zero for ever: padding reads it, so that
no stale value (not even NaN) can reach a sequence that does not own it.

int8 caches hold x = scale * q, a float32 scale for each line: one token of one head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.native.memory import zeros

Array = npt.NDArray[Any]

# numpy has no bfloat16: its bits are kept.
_BITS = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16, "int8": np.int8}


class KvMemory:
    """K and V of every layer, of type `dtype` (float32, float16, bfloat16 or int8). A block takes
    memory from its first write on.

    layers: of one KV group. places: of each layer of the model, its group and its array; None = one
    group of all of them.

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
        dtype: str,
        keys_are_values: bool = False,
        places: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        assert not (keys_are_values and dtype == "int8"), "int8 is written by native kernels"
        self.blocks, self.kv_heads = blocks, kv_heads
        self.block_size, self.head_dim, self.dtype = block_size, head_dim, dtype
        self.places = list(places or ((0, layer) for layer in range(layers)))
        self.groups = 1 + max(group for group, _ in self.places)
        shape = (blocks + 1, kv_heads, block_size, head_dim)
        self.k: list[Array] = [zeros(shape, _BITS[dtype]) for _ in range(layers)]
        self.v = self.k
        if not keys_are_values:
            self.v = [zeros(shape, _BITS[dtype]) for _ in range(layers)]
        scaled = layers if dtype == "int8" else 0  # else there are no scales
        self.k_scales: list[Array] = [zeros(shape[:-1], np.float32) for _ in range(scaled)]
        self.v_scales: list[Array] = [zeros(shape[:-1], np.float32) for _ in range(scaled)]

    def arrays(self) -> list[Array]:
        """All of it, each once."""
        values = [] if self.v is self.k else self.v
        return [*self.k, *values, *self.k_scales, *self.v_scales]

    @property
    def size_bytes(self) -> int:
        """Of all blocks, the extra one too."""
        return sum(array.nbytes for array in self.arrays())

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, target), as if all at once."""
        if pairs:
            sources, targets = (list(column) for column in zip(*pairs, strict=True))
            for array in self.arrays():
                array[targets] = array[sources]
