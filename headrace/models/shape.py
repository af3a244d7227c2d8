"""What a step of a model cannot do without: bytes it reads and floating-point operations. No torch.

    bytes of a step = weights that every step reads + KV of the tokens that it looks back on
    FLOPs of a step = 2 * weights * tokens + 2 * multiplications of a pair * pairs

A pair is a token and one that it looks back on, itself among them. The embedding is looked up, not
read, so it counts only where it is the output layer too. Of a mixture a step reads the experts that
its tokens hit, at least those of one. KV writes, activations and logits are left out: they are
small, and a limit may be too low but not too high.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import msgspec

from headrace.models.registry import slots_of
from headrace.models.sizes import VOCABULARY, kv_groups
from headrace.models.spec import ModelSpec

_LOOKED_UP = ("positions.", "layer_table.")  # one row a token, as of the embedding


class Mixture(msgspec.Struct, frozen=True):
    """Experts of `layers` layers; each token goes through `chosen` of them."""

    experts: int
    chosen: int
    layers: int
    expert_weights: int  # of one

    def hit(self, tokens: int) -> float:
        """Experts of a layer that `tokens` tokens hit on average, if routing is even."""
        return self.experts * (1 - (1 - self.chosen / self.experts) ** tokens)


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of one model's elements, and how wide they are.

    `pair_mults`: multiplications, in one layer, for a token and one that it looks back on.
    `windows`: (newest tokens that queries read, 0 = all; layers of that kind).
    """

    name: str
    vocab: int
    layers: int
    layer_weights: int  # matrices of all layers that one token goes through
    head_weights: int
    kv_elements: int  # of one token in all layers
    pair_mults: int
    windows: tuple[tuple[int, int], ...] = ()
    mixture: Mixture | None = None
    item_bytes: float = 2.0  # of a weight of the layers
    head_item_bytes: float = 2.0
    kv_item_bytes: float = 2.0

    @property
    def weight_bytes(self) -> float:
        """What every step reads: of a mixture the experts of one token."""
        return self.layer_weights * self.item_bytes + self.head_weights * self.head_item_bytes

    @property
    def kv_token_bytes(self) -> float:
        """K and V of one token in all layers."""
        return self.kv_elements * self.kv_item_bytes

    def step_bytes(self, context_tokens: float, experts_hit: float = 0.0) -> float:
        """Of a step whose rows together look back on `context_tokens` tokens of the KV cache.

        `experts_hit`: routed experts that a layer read, on average; 0 = those of one token.
        """
        found = self.weight_bytes + context_tokens * self.kv_token_bytes
        if self.mixture is None or not experts_hit:
            return found
        more = (experts_hit - self.mixture.chosen) * self.mixture.expert_weights
        return found + more * self.mixture.layers * self.item_bytes

    def step_flops(self, tokens: int, rows: int, pairs: float) -> float:
        """Of a step of `tokens` tokens that draws for `rows` rows; pairs: see the module."""
        linear = 2 * (tokens * self.layer_weights + rows * self.head_weights)
        return linear + 2 * pairs * self.pair_mults * self.layers

    def seen(self, context: int) -> float:
        """Tokens that a query with `context` tokens before it and itself reads, a layer's mean."""
        return self._mean(lambda window: min(context, window) if window else context)

    def pairs(self, tokens: int) -> float:
        """Of a prompt of so many tokens, a layer's mean."""

        def of(window: int) -> int:
            near = min(tokens, window) if window else tokens
            return near * (near + 1) // 2 + (tokens - near) * near

        return self._mean(of)

    def _mean(self, of: Callable[[int], float]) -> float:
        if not self.windows:
            return of(0)
        return sum(of(window) * layers for window, layers in self.windows) / self.layers


def shape_of(spec: ModelSpec, name: str = "") -> Shape:
    """Of a model in bfloat16."""
    matrices = 0
    for slot in slots_of(spec):
        read = slot.parameter and slot.hf and not slot.parameter.startswith(_LOOKED_UP)
        if read and len(slot.shape) > 1 and not slot.parameter.startswith(VOCABULARY):
            matrices += math.prod(slot.shape)
    mixture = None
    if spec.experts is not None:
        layers = sum(kind.mlp == "experts" for kind in spec.every_layer())
        matrix = spec.hidden * spec.experts.ffn
        mixture = Mixture(
            spec.experts.count, spec.experts.chosen, layers, (2 + spec.gated) * matrix
        )
        matrices -= layers * (mixture.experts - mixture.chosen) * mixture.expert_weights
    width = 2 * spec.head_dim
    if spec.latent is not None:
        width = spec.latent.plain_dim + spec.latent.rope_dim + spec.latent.value_dim
    groups = kv_groups(spec, 1)
    return Shape(
        name=name or spec.architecture,
        vocab=spec.vocab_rows,
        layers=spec.layers,
        layer_weights=matrices,
        head_weights=spec.vocab_rows * spec.hidden if spec.generates else 0,
        kv_elements=sum(group.bytes_per_token for group in groups),
        pair_mults=spec.heads * width,
        windows=tuple(Counter(kind.window for kind in spec.every_layer()).items()),
        mixture=mixture,
    )
