"""A checkpoint whose tensors are arranged as a family's slots name them; see `slots.Derived`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from headrace.models.slots import Derived
from headrace.quant import mxfp4
from headrace.quant.ggml import Bytes
from headrace.runner.checkpoint import PickledFolder, SafetensorsFolder, Stored, bytes_of

_PACKED = ("_blocks", "_scales")


class Arranged:
    """`inner` with the derived tensors in the place of those they are made of.

    A derived tensor whose source is not there is left out: whoever needs it will miss it by name.
    """

    gguf = False

    def __init__(
        self, inner: SafetensorsFolder | PickledFolder, derived: Sequence[Derived]
    ) -> None:
        self._inner = inner
        self.tensors: Mapping[str, Stored]
        self.tensors = found = dict(inner.tensors)
        self._derived: dict[str, Derived] = {}
        for one in derived:
            packed = self._packed(one)
            if not packed and one.source not in inner.tensors:
                continue
            for name in [one.source + suffix for suffix in _PACKED] if packed else [one.source]:
                found.pop(name, None)
            kind = "bfloat16" if packed else inner.tensors[one.source].dtype
            self._derived[one.name] = one
            found[one.name] = Stored(one.shape if self._fits(one) else (), kind)

    def _packed(self, one: Derived) -> bool:
        names = self._inner.tensors
        return one.how == "mxfp4" and all(one.source + suffix in names for suffix in _PACKED)

    def _fits(self, one: Derived) -> bool:
        """Whether the source has the axes and elements that the derived one is made of."""
        tensors, shape = self._inner.tensors, one.shape
        if self._packed(one):
            blocks, scales = (tensors[one.source + suffix].shape for suffix in _PACKED)
            whole = len(scales) == 3 and blocks == (*scales, 16)
            return whole and shape == (scales[0] * scales[1], scales[2] * 32)
        stored = tensors[one.source].shape
        if len(stored) != len(shape) + (one.how not in ("rows", "columns")):
            return False
        if one.how == "rows":
            return one.start + shape[0] <= stored[0] and shape[1:] == stored[1:]
        if one.how == "columns":
            return one.start + shape[1] <= stored[1] and shape[0] == stored[0]
        if one.how == "flat":
            return shape == (stored[0] * stored[1], *stored[2:])
        return shape == (stored[0] * stored[2], stored[1])

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) along the first axis, a plain float type. Raises ModelError."""
        one = self._derived.get(name)
        if one is None:
            return self._inner.read(name, start, stop)
        if one.how == "rows":
            return self._inner.read(one.source, one.start + start, one.start + stop)
        if one.how == "columns":
            rows = self._inner.read(one.source, start, stop)
            return rows[:, one.start : one.start + one.shape[1]]
        return self._of_groups(one, start, stop)

    def raw(self, name: str, start: int, stop: int) -> Bytes:
        """See `RawCheckpoint`."""
        return bytes_of(self.read(name, start, stop))

    def _of_groups(self, one: Derived, start: int, stop: int) -> Tensor:
        """Rows of a tensor whose first axis is experts; read are the experts that have them."""
        packed = self._packed(one)
        stored = self._inner.tensors[one.source + "_blocks" if packed else one.source].shape
        each = stored[1] if packed or one.how == "flat" else stored[2]
        first, last = start // each, -(-stop // each)
        if packed:
            blocks, scales = (
                self._inner.bytes(one.source + suffix, first, last) for suffix in _PACKED
            )
            whole = mxfp4.dequantize(blocks, scales).flatten(0, 1).to(torch.bfloat16)
        elif one.how == "flat":
            whole = self._inner.read(one.source, first, last).flatten(0, 1)
        else:
            whole = self._inner.read(one.source, first, last).transpose(1, 2).flatten(0, 1)
        return whole[start - first * each : stop - first * each]
