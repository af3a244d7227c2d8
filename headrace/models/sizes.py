"""How large a model is, from its spec alone: parameters, weights, and what a token leaves in the KV
cache. No torch."""

from __future__ import annotations

import math

import msgspec

from headrace.models.registry import slots_of
from headrace.models.spec import ModelSpec

# Bytes of a weight of the layers' matrices, and of embedding and output layer. Blocks of 32 have
# their scales with them; see runner/pack.py's RECIPES.
WEIGHT_BYTES: dict[str, tuple[float, float]] = {
    "float32": (4.0, 4.0),
    "bfloat16": (2.0, 2.0),
    "int8": (34 / 32, 34 / 32),
    "int4": (20 / 32, 34 / 32),
}
VOCABULARY = ("embed.", "head.")


class KvGroup(msgspec.Struct, frozen=True):
    """Layers that keep K and V alike. `window`: newest tokens that their queries read; 0 = all.

    Layers that read another's K and V are none of them.
    """

    kind: str  # full, window or latent
    window: int
    layers: int
    bytes_per_token: int  # in all of these layers


def kv_layer_bytes(spec: ModelSpec, element_bytes: int, scale_bytes: int = 0) -> int:
    """K and V of one token in one layer."""
    lines = 1 if spec.keys_are_values else 2
    return lines * spec.kv_heads * (spec.head_dim * element_bytes + scale_bytes)


def kv_groups(spec: ModelSpec, element_bytes: int, scale_bytes: int = 0) -> list[KvGroup]:
    """By window, full attention first. `scale_bytes`: of one head's line, beside its elements."""
    layer_bytes = kv_layer_bytes(spec, element_bytes, scale_bytes)
    windows = [kind.window for kind in spec.every_layer() if kind.kv_from < 0]
    full = "latent" if spec.latent is not None else "full"
    return [
        KvGroup(
            "window" if window else full,
            window,
            windows.count(window),
            windows.count(window) * layer_bytes,
        )
        for window in sorted(set(windows))
    ]


class Parameters(msgspec.Struct, frozen=True):
    """Counts. `active`: those that one token passes, where there are experts to choose from."""

    total: int
    active: int
    vocabulary: int  # of embedding and output layer
    apart: int = 0  # of tables in slower memory, of which a step reads rows: see `Slot.mapped`

    def weight_bytes(self, kind: str) -> int:
        """In one of WEIGHT_BYTES."""
        layers, vocabulary = WEIGHT_BYTES[kind]
        return int((self.total - self.vocabulary) * layers + self.vocabulary * vocabulary)


def parameters(spec: ModelSpec) -> Parameters:
    """Of the tensors that a checkpoint of the model has and that are read."""
    total = vocabulary = apart = 0
    for slot in slots_of(spec):
        if not slot.parameter or not slot.hf:
            continue
        size = math.prod(slot.shape)
        total += size
        vocabulary += size if slot.parameter.startswith(VOCABULARY) else 0
        apart += size * slot.mapped
    spared = 0
    if spec.experts is not None:
        layers = sum(kind.mlp == "experts" for kind in spec.every_layer())
        matrices = 3 * spec.hidden * spec.experts.ffn
        spared = layers * (spec.experts.count - spec.experts.chosen) * matrices
    return Parameters(total, total - spared, vocabulary, apart)
