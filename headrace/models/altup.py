"""Gemma 3n's decoder: several streams, of which each layer computes one and corrects the others.

AltUp: https://arxiv.org/abs/2301.13310; LAuReL: https://arxiv.org/abs/2411.07501.
Shapes: T tokens, S streams; the streams of a step are [T, S, hidden].
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
_ROOT_HALF = 0.5**0.5


class SparseMlp(GatedMlp):
    """A gated MLP whose gate keeps what lies above a share `sparsity` of a normal distribution
    with its mean and deviation, less that bound."""

    def __init__(self, spec: ModelSpec, index: int, sparsity: float, dtype: torch.dtype) -> None:
        super().__init__(spec.hidden, spec.layer(index).ffn or spec.ffn, dtype, spec.act)
        self.deviations = NormalDist().inv_cdf(sparsity)  # of the bound, above the mean

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        deviation = gate.std(-1, keepdim=True, unbiased=False)
        bound = gate.mean(-1, keepdim=True) + deviation * self.deviations
        y: Tensor = self.down(gated(self.act, F.relu(gate - bound), up))
        return y


class AltUpBlock(Block):
    """A layer over the streams. It computes the active one; what comes of it corrects them all."""

    foldable = False  # the learned residual reads what the norm gives

    def __init__(self, spec: ModelSpec, index: int, dtype: torch.dtype) -> None:
        super().__init__(spec, index, dtype)
        assert spec.altup is not None, "a spec of this family"
        self.altup: AltUp = spec.altup
        altup, hidden = spec.altup, spec.hidden
        if sparsity := spec.layer(index).sparsity:
            self.ffn = SparseMlp(spec, index, sparsity, dtype)
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
        streams, x = ops.predict(self, streams)
        learned = ops.residual(self, x)
        q = self.project(x, ops)
        if last:
            tokens, shape = streams.shape[0], streams.shape[1:]
            packed = torch.cat((streams.view(tokens, -1), x, learned, inputs), -1)
            packed, q = ops.narrow(packed, q)
            hidden = x.shape[1]
            sizes = [shape.numel(), hidden, hidden, inputs.shape[1]]
            flat, x, learned, inputs = torch.split(packed, sizes, -1)
            streams, x = flat.contiguous().view(-1, *shape), x.contiguous()
            if not x.shape[0]:  # K and V are written, and nobody waits for more
                return streams
        x = torch.add(learned, self.attend(x, q, ops), alpha=_ROOT_HALF)
        return ops.correct(self, streams, self.feed(x, ops), inputs)

    def predicted(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        """See `Ops.predict`."""
        count = self.altup.streams
        weights: Tensor = self.predictions(self._modalities(streams[:, self.altup.active]))
        streams = streams + weights.view(streams.shape[0], count, count) @ streams
        return streams, streams[:, self.altup.active]

    def residual(self, x: Tensor) -> Tensor:
        """See `Ops.residual`."""
        normed: Tensor = self.attn_norm(x)
        low: Tensor = self.laurel_norm(self.laurel_right(self.laurel_left(normed)))
        return (normed + low) * _ROOT_HALF

    def corrected(self, streams: Tensor, x: Tensor, inputs: Tensor) -> Tensor:
        """See `Ops.correct`."""
        weights = self.corrections(self._modalities(x)) + 1.0
        news = x - streams[:, self.altup.active]
        streams = streams + weights[..., None] * news[:, None]
        first: Tensor = streams[:, self.altup.active]
        if self.altup.scaled:
            first = first * self.scale
        first = plain(self.ffn.act, self.layer_gate(first)) * inputs
        first = self.layer_norm(self.layer_out(first))
        return torch.cat((streams[:, :1], streams[:, 1:] + first[:, None]), 1)

    def _modalities(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, S]."""
        routed = self.router(self.router_norm(x) * x.shape[-1] ** -1.0)
        return torch.tanh(routed.float()).to(x.dtype)


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

    def through(self, blocks: Iterable[AltUpBlock], ops: Ops) -> Tensor:
        """See `DecoderOrder`."""
        x = ops.embed(self.embed, None)
        inputs = self._inputs(x, ops.rows(self.layer_table))
        streams = ops.spread(list(self.spread.parameters()), x)
        *others, last = blocks
        for block in others:
            streams = block.step(streams, inputs[:, block.index], ops, last=False)
        streams = last.step(streams, inputs[:, last.index], ops, last=True)
        return ops.gather(list(self.gather.parameters()), streams)

    def _inputs(self, x: Tensor, rows: Tensor) -> Tensor:
        """x [T, hidden], rows [T, layers * layer_width] -> [T, layers, layer_width]."""
        shape = (x.shape[0], self.spec.layers, self.altup.layer_width)
        projected = self.layer_projection(x) * torch.tensor(x.shape[-1] ** -0.5, dtype=x.dtype)
        normed: Tensor = self.layer_norm(projected.view(shape))
        return (normed + rows.view(shape)) * torch.tensor(_ROOT_HALF, dtype=x.dtype)


def spread(weights: Sequence[Tensor], x: Tensor) -> Tensor:
    """See `Ops.spread`."""
    return torch.stack((x, *(_as_large(F.linear(x, weight), x) for weight in weights)), 1)


def gather(weights: Sequence[Tensor], streams: Tensor) -> Tensor:
    """See `Ops.gather`."""
    first, *rest = streams.unbind(1)
    made = [_as_large(F.linear(x, weight), first) for x, weight in zip(rest, weights, strict=True)]
    return torch.stack((first, *made)).mean(0)


def _as_large(x: Tensor, like: Tensor) -> Tensor:
    """x with the root mean square of `like`."""
    wanted = like.pow(2).mean(-1, keepdim=True) ** 0.5
    return x * wanted / x.pow(2).mean(-1, keepdim=True).clamp(min=_LEAST).sqrt()
