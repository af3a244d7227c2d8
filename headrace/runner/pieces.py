"""A checkpoint cut into pieces of a few megabytes, each with its place in the parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec
import torch
from torch import Tensor

from headrace.models.slots import Slot
from headrace.runner.checkpoint import Checkpoint

_CHUNK_BYTES = 16 * 2**20  # of float32, unless one head is larger


class Piece(msgspec.Struct, frozen=True):
    """Rows [start, stop) of the checkpoint tensor `name`, for rows of `parameter` from `at` on.

    `heads` > 0: they are whole heads, this many, whose rows are interleaved rotary pairs.
    """

    parameter: str
    at: int
    name: str
    start: int
    stop: int
    heads: int

    def read(self, checkpoint: Checkpoint) -> Tensor:
        """The rows as the parameter has them, in the type that the checkpoint gives."""
        rows = checkpoint.read(self.name, self.start, self.stop)
        return halves(rows, self.heads) if self.heads else rows

    def target(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """The rows of the parameter that this piece fills."""
        return parameters[self.parameter][self.at : self.at + self.stop - self.start]


def pieces(slot: Slot, name: str, *, gguf: bool) -> Iterator[Piece]:
    """All of the tensor `name`, which goes to `slot`, in the order of its rows."""
    rows = slot.shape[0]
    columns = max(1, torch.Size(slot.shape[1:]).numel())
    heads = slot.interleaved_heads if gguf else 0
    unit = rows // heads if heads else 1  # rows that must stay together
    step = max(1, _CHUNK_BYTES // (4 * columns * unit)) * unit
    if len(slot.shape) == 1 and not heads:
        step = rows
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        yield Piece(
            slot.parameter,
            slot.start + start,
            name,
            start,
            stop,
            (stop - start) // unit * (heads > 0),
        )


def halves(stored: Tensor, heads: int) -> Tensor:
    """Rows of each head from interleaved rotary pairs (a0 b0 a1 b1 ...) to (a0 a1 ... b0 b1 ...).

    stored [heads * d, ...] -> the same shape.
    """
    pairs = stored.reshape(heads, stored.shape[0] // heads // 2, 2, *stored.shape[1:])
    return pairs.transpose(1, 2).reshape(stored.shape)
