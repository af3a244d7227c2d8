"""How the tokens of a mixture spread over its experts: counts since the start, kept where the model
is, read when somebody asks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from headrace.models.spec import ModelSpec


class ExpertLoads:
    """tally [layers, 2, experts] int64: tokens that an expert got, and steps in which it got any;
    None where the model has no experts. Shared experts are not told apart from others."""

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        self._routed = 0 if spec.experts is None else spec.experts.count
        self.tally: Tensor | None = None
        if spec.experts is not None:
            shape = (spec.layers, 2, spec.experts.total)
            self.tally = torch.zeros(shape, dtype=torch.int64, device=device)

    def of(self, tally: Tensor) -> ExpertLoads:
        """Of the same model, with a tally of its own."""
        other = ExpertLoads.__new__(ExpertLoads)
        other._routed, other.tally = self._routed, tally
        return other

    def counters(self) -> Mapping[str, int]:
        """`expert_<n>_tokens`, of all layers; `experts_hit`: routed experts that were read, one for
        each step and layer. Waits for the device where the counts are there."""
        if self.tally is None:
            return {}
        tokens, hits = self.tally[:, :, : self._routed].sum(0).tolist()
        width = len(str(self._routed - 1))
        named = {f"expert_{i:0{width}}_tokens": count for i, count in enumerate(tokens)}
        return named | {"experts_hit": sum(hits)}
