"""Pinned host memory on its way to the device, without a wait."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_SLOTS = 4  # more than the steps that can be in flight


class Upload:
    """A ring of pinned int32 arrays; a slot is written again only after its copy has ended."""

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        cuda = device.type == "cuda"
        self._slots = [
            torch.zeros(shape, dtype=torch.int32, pin_memory=cuda) for _ in range(_SLOTS)
        ]
        self._copied = [torch.cuda.Event() for _ in range(_SLOTS)] if cuda else []
        self._at = 0

    def slot(self) -> npt.NDArray[np.int32]:
        """The next slot, free to write; `send` comes next."""
        self._at = (self._at + 1) % _SLOTS
        if self._copied:
            self._copied[self._at].synchronize()  # at once, unless the device is far behind
        return self._slots[self._at].numpy()

    def send(self, target: Tensor, count: int) -> None:
        """Copy the slot's first `count` rows to those of `target`, on the current stream."""
        target[:count].copy_(self._slots[self._at][:count], non_blocking=True)
        if self._copied:
            self._copied[self._at].record()
