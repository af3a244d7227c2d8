"""Vectors of a step on a GPU: sums of its last hidden states, and what the head says of them."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.backends.cuda.buffers import Buffers
from headrace.backends.cuda.upload import Upload
from headrace.kernels.layer_norm import layer_norm
from headrace.kernels.pool import pool
from headrace.kernels.rms_norm import inverse_rms
from headrace.models.layers import Decoder, RMSNorm


class Pooler:
    """Of one model; all is queued on the current stream. At most one vector a device row."""

    def __init__(self, model: Decoder, buffers: Buffers, *, with_pdl: bool) -> None:
        rows, width = buffers.chosen.shape
        device = buffers.x.device
        self._norm, self._buffers, self._pdl = model.norm, buffers, with_pdl
        self._head = None if model.classifier is None else model.classifier.weight
        self._spans = torch.zeros((rows, 2), dtype=torch.int32, device=device)
        self._upload = Upload((rows, 2), device)
        self.vectors = torch.zeros((rows, width), dtype=torch.float32, device=device)
        labels = model.spec.labels
        self.scores = torch.zeros((rows, labels), dtype=torch.float32, device=device)

    def queue(self, x: Tensor, spans: list[tuple[int, int]], *, scored: bool) -> None:
        """vectors[i] = the sum of the normed rows [first, first + count) of x [T, hidden], the
        stream before the last norm, for spans[i]; `scored`: scores[i] = what the head says of it.
        """
        slot = self._upload.slot()
        slot[: len(spans)] = spans
        self._upload.send(self._spans, len(spans))
        self._sum(x, len(spans))
        if scored:
            assert self._head is not None, "a model without a classification head"
            count = len(spans)
            torch.mm(self.vectors[:count], self._head.t(), out=self.scores[:count])

    def _sum(self, x: Tensor, count: int) -> None:
        scale, norm = self._buffers.scale[: x.shape[0]], self._norm
        weight: Tensor = norm.weight
        if isinstance(norm, RMSNorm):
            inverse_rms(x, norm.eps, out=scale, with_pdl=self._pdl)
        else:
            normed = self._buffers.normed[: x.shape[0]]
            x = layer_norm(x, weight, norm.bias, norm.eps, out=normed, with_pdl=self._pdl)
            scale, weight = scale.fill_(1.0), torch.ones_like(weight)
        pool(
            x,
            scale,
            weight,
            self._spans[:count],
            out=self.vectors[:count],
            with_pdl=self._pdl,
        )

    def compile(self) -> None:
        """Launch every kernel, for `kernels.launch.compiling`."""
        self._sum(self._buffers.x, self._spans.shape[0])

    @property
    def size_bytes(self) -> int:
        """Device memory of it."""
        tensors = (self._spans, self.vectors, self.scores)
        return sum(t.numel() * t.element_size() for t in tensors)
