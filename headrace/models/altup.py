"""Gemma 3n's decoder: several streams, of which each layer computes one and corrects the others.

AltUp: https://arxiv.org/abs/2301.13310; LAuReL: https://arxiv.org/abs/2411.07501.
Shapes: T tokens, S streams; the streams of a step are [T, S, hidden].
"""

from __future__ import annotations

import math
from statistics import NormalDist

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace.models.layers import (
    Block,
    Decoder,
    Embedding,
    GatedMlp,
    Linear,
    RMSNorm,
    gated,
    plain,
    unset,
)
from headrace.models.ops import Ops
from headrace.models.spec import AltUp, ModelSpec

_LEAST = 1e-5  # of a mean square that is divided by


class SparseMlp(GatedMlp):
    """A gated MLP whose gate keeps what lies above a share `sparsity` of a normal distribution
    with its mean and deviation, less that bound."""

    def __init__(self, spec: ModelSpec, index: int, sparsity: float, dtype: torch.dtype) -> None:
        super().__init__(spec.hidden, spec.layer(index).ffn or spec.ffn, dtype, spec.act)
        self.deviations = NormalDist().inv_cdf(sparsity)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        deviation = gate.std(-1, keepdim=True, unbiased=False)
        bound = gate.mean(-1, keepdim=True) + deviation * self.deviations
        y: Tensor = self.down(gated(self.act, F.relu(gate - bound), up))
        return y


class AltUpBlock(Block):
    """A layer over the streams. It computes the active one; what comes of it corrects them all."""

    def __init__(self, spec: ModelSpec, index: int, dtype: torch.dtype) -> None:
        super().__init__(spec, index, dtype)
        assert spec.altup is not None, "a spec of this family"
        self.altup: AltUp = spec.altup
        altup, hidden = spec.altup, spec.hidden
        if altup.sparsity[index] > 0:
            self.ffn = SparseMlp(spec, index, altup.sparsity[index], dtype)
        self.scale = unset(hidden, dtype=dtype)
        self.corrections = Linear(altup.streams, altup.streams, dtype)
        self.predictions = Linear(altup.streams, altup.streams**2, dtype)
        self.router = Linear(hidden, altup.streams, dtype)
        self.laurel_left = Linear(hidden, altup.laurel_rank, dtype)
        self.laurel_right = Linear(altup.laurel_rank, hidden, dtype)
        self.layer_gate = Linear(hidden, altup.layer_width, dtype)
        self.layer_out = Linear(altup.layer_width, hidden, dtype)
        self.router_norm, self.laurel_norm, self.layer_norm = (
            RMSNorm(hidden, spec.norm_eps, torch.float32) for _ in range(3)
        )

    def step(self, streams: Tensor, inputs: Tensor, ops: Ops, *, last: bool) -> Tensor:
        """streams [T, S, hidden] and the layer's own vectors [T, layer_width] -> the streams; of
        the last layer those of the tokens that `Ops.narrow` leaves."""
        streams = self._predict(streams)
        x = streams[:, self.altup.active]
        normed = self.attn_norm(x)
        laurel = normed + self.laurel_norm(self.laurel_right(self.laurel_left(normed)))
        q = self.project(x, ops)
        if last:
            tokens, shape = streams.shape[0], streams.shape[1:]
            packed = torch.cat((streams.view(tokens, -1), laurel, inputs), -1)
            packed, q = ops.narrow(packed, q)
            sizes = [shape.numel(), laurel.shape[1], inputs.shape[1]]
            flat, laurel, inputs = torch.split(packed, sizes, -1)
            streams = flat.view(flat.shape[0], *shape)
            x = streams[:, self.altup.active]
            if not x.shape[0]:  # K and V are written, and nobody waits for more
                return streams
        x = (self.attend(x, q, ops) + laurel) / math.sqrt(2)
        return self._correct(streams, self.feed(x, ops), inputs)

    def _modalities(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, S]."""
        routed = self.router(self.router_norm(x) * x.shape[-1] ** -1.0)
        return torch.tanh(routed.float()).to(x.dtype)

    def _predict(self, streams: Tensor) -> Tensor:
        count = self.altup.streams
        weights: Tensor = self.predictions(self._modalities(streams[:, self.altup.active]))
        return streams + weights.view(streams.shape[0], count, count) @ streams

    def _correct(self, streams: Tensor, x: Tensor, inputs: Tensor) -> Tensor:
        """x: what the layer made of the active stream."""
        weights = self.corrections(self._modalities(x)) + 1.0
        news = x - streams[:, self.altup.active]
        streams = streams + weights[..., None] * news[:, None]
        first: Tensor = streams[:, self.altup.active]
        if self.altup.scaled:
            first = first * self.scale
        first = plain(self.ffn.act, self.layer_gate(first)) * inputs
        first = self.layer_norm(self.layer_out(first))
        return torch.cat((streams[:, :1], streams[:, 1:] + first[:, None]), 1)


class AltUpDecoder(Decoder):
    """See the module."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype) -> None:
        super().__init__(spec, dtype, AltUpBlock)
        assert spec.altup is not None, "a spec of this family"
        self.altup: AltUp = spec.altup
        altup, hidden = spec.altup, spec.hidden
        width = spec.layers * altup.layer_width
        scale = altup.layer_width**0.5
        self.layer_table = Embedding(altup.layer_rows, width, dtype, scale, partial=True)
        self.layer_projection = Linear(hidden, width, dtype)
        self.layer_norm = RMSNorm(altup.layer_width, spec.norm_eps, torch.float32)
        self.spread, self.gather = (
            nn.ModuleList(Linear(hidden, hidden, dtype) for _ in range(altup.streams - 1))
            for _ in range(2)
        )

    def forward(self, ops: Ops) -> Tensor:
        """See `Decoder`."""
        x = ops.embed(self.embed, None).clone()
        inputs = self._inputs(x, ops.embed(self.layer_table, None))
        others = [_as_large(linear(x), x) for linear in self.spread]
        streams = torch.stack((x, *others), 1)
        for i, block in enumerate(self.blocks):
            assert isinstance(block, AltUpBlock), "its layers are of one kind"
            streams = block.step(streams, inputs[:, i], ops, last=i == len(self.blocks) - 1)
        first = streams[:, 0]
        rest = zip(self.gather, streams[:, 1:].unbind(1), strict=True)
        others = [_as_large(linear(stream), first) for linear, stream in rest]
        return torch.stack((first, *others)).mean(0)

    def _inputs(self, x: Tensor, rows: Tensor) -> Tensor:
        """x [T, hidden], rows [T, layers * layer_width] -> [T, layers, layer_width]."""
        shape = (x.shape[0], self.spec.layers, self.altup.layer_width)
        projected = self.layer_projection(x) * torch.tensor(x.shape[-1] ** -0.5, dtype=x.dtype)
        normed: Tensor = self.layer_norm(projected.view(shape))
        return (normed + rows.view(shape)) * torch.tensor(0.5**0.5, dtype=x.dtype)


def _as_large(x: Tensor, like: Tensor) -> Tensor:
    """x with the root mean square of `like`."""
    wanted = like.pow(2).mean(-1, keepdim=True) ** 0.5
    return x * wanted / x.pow(2).mean(-1, keepdim=True).clamp(min=_LEAST).sqrt()
