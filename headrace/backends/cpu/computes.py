"""What of `models.features` is computed on a processor."""

from __future__ import annotations

TORCH = frozenset({
    "scaled embedding", "learned positions", "layer norm", "wide norms", "post norms",
    "clipped q, k and v", "q and k norms", "v norms", "AltUp", "sparse activations",
    "layers without rotary embedding", "two rotary embeddings", "rotary frequencies by length",
    "shared K and V", "sliding window",
    "scaled scores", "soft-capped scores", "attention sinks", "ALiBi", "output bias",
    "MLP without a gate", "MLP of gelu", "MLP of gelu_tanh", "MLP of relu", "MLP of clamped",
    "MLP bias", "layers of several widths", "soft-capped logits", "experts", "latent attention",
    "layers of transformers",
})  # fmt: skip

NATIVE = frozenset({
    "scaled embedding", "wide norms", "post norms", "q and k norms", "two rotary embeddings",
    "sliding window", "scaled scores", "soft-capped scores", "output bias", "MLP bias",
    "MLP of gelu_tanh", "soft-capped logits",
})  # fmt: skip
