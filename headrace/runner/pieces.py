"""A checkpoint cut into pieces of a few megabytes, each with its place in the parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, TypeVar

import msgspec

from headrace.models.slots import Slot
from headrace.runner.checkpoint import Checkpoint

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

Rows = TypeVar("Rows", "Tensor", "npt.NDArray[np.float32]")

_CHUNK_BYTES = 16 * 2**20  # of float32, unless one head is larger


class Piece(msgspec.Struct, frozen=True):
    """Rows [start, stop) of the checkpoint tensor `name`, for rows of `parameter` from `at` on.

    `order` not (): they are whole heads, whose rows are put into that order.
    transposed: the tensor is stored with columns first, and this is all of it.
    shift: added to every value.
    """

    parameter: str
    at: int
    name: str
    start: int
    stop: int
    order: tuple[int, ...] = ()
    transposed: bool = False
    shift: float = 0.0

    def read(self, checkpoint: Checkpoint) -> Tensor:
        """The rows as the parameter has them, in a plain float type."""
        if self.transposed:
            columns = checkpoint.tensors[self.name].shape[0]
            rows = checkpoint.read(self.name, 0, columns).t()
        else:
            rows = checkpoint.read(self.name, self.start, self.stop)
        rows = ordered(rows, self.order)
        return rows.float() + self.shift if self.shift else rows

    def target(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """The rows of the parameter that this piece fills."""
        return parameters[self.parameter][self.at : self.at + self.stop - self.start]


def pieces(slot: Slot, name: str, *, gguf: bool) -> Iterator[Piece]:
    """All of the tensor `name`, which goes to `slot`, in the order of its rows."""
    rows = slot.shape[0]
    columns = max(1, math.prod(slot.shape[1:]))
    order, transposed = slot.order(gguf=gguf), slot.transposed(gguf=gguf)
    unit = len(order) or 1  # rows that must stay together
    assert not order or unit * slot.heads == rows, f"{name}: heads of {unit} rows"
    step = max(1, _CHUNK_BYTES // (4 * columns * unit)) * unit
    if transposed or (len(slot.shape) == 1 and not order):
        step = rows
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        at, shift = slot.start + start, slot.shift(gguf=gguf)
        yield Piece(slot.parameter, at, name, start, stop, order, transposed, shift)


def ordered(stored: Rows, order: tuple[int, ...]) -> Rows:
    """Rows of each head in the order given: [heads * d, ...] -> the same shape; () = as stored."""
    if not order:
        return stored
    heads = stored.reshape(-1, len(order), *stored.shape[1:])
    return heads[:, list(order)].reshape(stored.shape)
