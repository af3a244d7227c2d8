"""Mixtures of experts: the routed feed-forward layer, and where its tensors lie."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace.models.layers import Block, Linear, gated, unset
from headrace.models.ops import Ops
from headrace.models.spec import Act, Experts, ModelSpec

_TINY = 1e-20  # of DeepSeek-V3's code, where weights are divided by their sum


class RoutedMlp(nn.Module):
    """Each token's `chosen` experts, weighted, and those that are every token's.

    Expert e has rows [e * 2 ffn, (e + 1) * 2 ffn) of gate_up (gate's first) and rows
    [e * hidden, (e + 1) * hidden) of down. The shared expert is the last ones: `Experts.shared`
    more of the same width, whose sum it is, each with weight 1.
    """

    def __init__(self, spec: ModelSpec, dtype: torch.dtype) -> None:
        super().__init__()
        assert spec.experts is not None, "a layer of experts, and none in the spec"
        self.spec: Experts = spec.experts
        self.act: Act = spec.act
        total, hidden, ffn = self.spec.total, spec.hidden, self.spec.ffn
        self.router = Linear(hidden, self.spec.count, dtype, bias=self.spec.biases)
        corrected = unset(self.spec.count, dtype=torch.float32)
        self.correction = corrected if self.spec.corrected else None
        self.gate_up = unset(total * 2 * ffn, hidden, dtype=dtype)
        self.down = unset(total * hidden, ffn, dtype=dtype)
        self.gate_up_bias = self.down_bias = None
        if self.spec.biases:
            self.gate_up_bias = unset(total * 2 * ffn, dtype=dtype)
            self.down_bias = unset(total * hidden, dtype=dtype)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, hidden] -> experts [T, chosen] and their weights, float32."""
        spec = self.spec
        bias = None if self.router.bias is None else self.router.bias.float()
        logits = F.linear(x.float(), self.router.weight.float(), bias)
        scores = logits.sigmoid() if spec.scores == "sigmoid" else logits.softmax(-1)
        wanted = scores if self.correction is None else scores + self.correction
        if spec.groups > 1:
            wanted = self._in_groups(wanted)
        ids = wanted.topk(spec.chosen, dim=-1).indices
        weights = scores.gather(1, ids)
        if spec.normed:
            weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
        return ids, weights * spec.scaling

    def _in_groups(self, wanted: Tensor) -> Tensor:
        """[T, experts], -inf outside the best groups."""
        spec = self.spec
        grouped = wanted.view(wanted.shape[0], spec.groups, -1)
        best = grouped.topk(2 if spec.group_score == "two" else 1, dim=-1).values.sum(-1)
        outside = torch.ones_like(best, dtype=torch.bool)
        outside.scatter_(1, best.topk(spec.chosen_groups, dim=-1).indices, False)
        return grouped.masked_fill(outside[:, :, None], -torch.inf).view(wanted.shape)

    def expert(self, index: int, x: Tensor) -> Tensor:
        """One expert's answer to x [n, hidden]."""
        ffn, hidden = self.spec.ffn, x.shape[1]
        up = slice(index * 2 * ffn, (index + 1) * 2 * ffn)
        down = slice(index * hidden, (index + 1) * hidden)
        up_bias = None if self.gate_up_bias is None else self.gate_up_bias[up]
        down_bias = None if self.down_bias is None else self.down_bias[down]
        gate, values = F.linear(x, self.gate_up[up], up_bias).chunk(2, dim=-1)
        return F.linear(gated(self.act, gate, values), self.down[down], down_bias)

    def forward(self, x: Tensor, tally: Tensor | None = None) -> Tensor:
        """x [T, hidden] -> [T, hidden]. tally [2, experts]: see `loads.ExpertLoads`."""
        ids, weights = self.route(x)
        out = torch.zeros_like(x)
        for index in range(self.spec.count, self.spec.total):
            out = out + self.expert(index, x)
        counts = torch.bincount(ids.reshape(-1), minlength=self.spec.count)
        if tally is not None:
            tally[0, : self.spec.count] += counts
            tally[1, : self.spec.count] += counts > 0
        for index in counts.nonzero()[:, 0].tolist():
            token, place = torch.where(ids == index)
            y = self.expert(index, x[token]) * weights[token, place, None].to(x.dtype)
            out.index_add_(0, token, y)
        return out


class RoutedBlock(Block):
    """A layer whose feed-forward is routed where the spec says so."""

    def __init__(self, spec: ModelSpec, index: int, dtype: torch.dtype) -> None:
        super().__init__(spec, index, dtype)
        self.routed = RoutedMlp(spec, dtype) if spec.layer(index).mlp == "experts" else None
        if self.routed is not None:
            del self.ffn

    def feed(self, x: Tensor, ops: Ops) -> Tensor:
        """See `Block`."""
        if self.routed is None:
            return super().feed(x, ops)
        return ops.add_experts(self.index, x, self.ffn_norm, self.routed)
