"""Where a checkpoint tensor goes: the place in our (fused) parameters, under both of its names."""

from __future__ import annotations

from typing import Literal

import msgspec


class Slot(msgspec.Struct, frozen=True):
    """Rows [start, start + shape[0]) of `parameter` come from the tensor `hf` or `gguf`.

    `interleaved_heads` > 0: the GGUF tensor stores the rows of each of that many heads as rotary
    pairs (0, d/2, 1, d/2 + 1, ...); they are put back into halves on load.
    """

    parameter: str
    hf: str  # "" = no such tensor in Hugging Face checkpoints
    gguf: str
    shape: tuple[int, ...]
    start: int = 0
    interleaved_heads: int = 0
    dummy: Literal["normal", "ones"] = "normal"  # how --load-format dummy fills it
