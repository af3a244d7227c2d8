"""Where a checkpoint tensor goes: the place in our (fused) parameters, under both of its names, and
how its rows lie there."""

from __future__ import annotations

from typing import Literal

import msgspec


class Slot(msgspec.Struct, frozen=True):
    """Rows [start, start + shape[0]) of `parameter` come from the tensor `hf` or `gguf`; of
    parameter "" it may be there and is not read.

    `heads` > 0: the rows are so many heads, and row i of each is row `hf_order[i]` (or
    `gguf_order[i]`) of the stored one; () = they lie as they are stored. Our q and k have rotary
    pairs (i, i + d/2), whatever the checkpoint has: see `head_order`.
    """

    parameter: str
    hf: str  # "" = no such tensor in Hugging Face checkpoints
    gguf: str
    shape: tuple[int, ...]
    start: int = 0
    heads: int = 0
    hf_order: tuple[int, ...] = ()
    gguf_order: tuple[int, ...] = ()
    hf_shift: float = 0.0  # added to what a Hugging Face checkpoint stores
    hf_transposed: bool = False  # a Hugging Face checkpoint stores [shape[1], shape[0]]
    mapped: bool = False  # stays in the checkpoint's memory map where that is its order of rows
    dummy: Literal["normal", "ones"] = "normal"  # how --load-format dummy fills it

    def order(self, *, gguf: bool) -> tuple[int, ...]:
        """The order of a head's rows in that kind of checkpoint."""
        return self.gguf_order if gguf else self.hf_order

    def transposed(self, *, gguf: bool) -> bool:
        """Whether that kind of checkpoint stores columns first."""
        return self.hf_transposed and not gguf

    def stored_shape(self, *, gguf: bool) -> tuple[int, ...]:
        """What the checkpoint has."""
        return self.shape[::-1] if self.transposed(gguf=gguf) else self.shape

    def shift(self, *, gguf: bool) -> float:
        """What is added to the stored values."""
        return 0.0 if gguf else self.hf_shift


class Derived(msgspec.Struct, frozen=True):
    """A tensor [shape] that the checkpoint has not, made of one that it has, which is then not read
    itself. `how`:

    rows        rows [start, start + shape[0]) of `source`
    columns     columns [start, start + shape[1]) of `source`
    flat        [n, ...] -> [n * ..., last] or, of two axes, [all]
    transposed  [n, columns, rows] -> [n * rows, columns]
    mxfp4       of `source`_blocks [n, rows, groups, 16] and `source`_scales [n, rows, groups], see
                `quant.mxfp4` -> [n * rows, groups * 32]; where there are none, as transposed
    """

    name: str
    source: str
    shape: tuple[int, ...]
    how: Literal["rows", "columns", "flat", "transposed", "mxfp4"]
    start: int = 0


def head_order(head_dim: int, dims: int = 0, *, paired: bool = False) -> tuple[int, ...]:
    """Of each row of a head of ours, the row that a checkpoint has it in.

    Ours has pair i in rows i and i + head_dim / 2, the pairs that turn first. The checkpoint turns
    its first `dims` rows (0 = all): pair i is its rows i and i + dims / 2 or, `paired`, its rows
    2i and 2i + 1. () where both lie alike.
    """
    turned = dims or head_dim
    pairs, half = turned // 2, head_dim // 2
    low = [2 * i if paired else i for i in range(pairs)]
    high = [2 * i + 1 if paired else i + pairs for i in range(pairs)]
    rest = list(range(turned, head_dim))
    order = (*low, *rest[: half - pairs], *high, *rest[half - pairs :])
    return () if order == tuple(range(head_dim)) else order
