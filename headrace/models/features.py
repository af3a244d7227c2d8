"""What a model asks of its backend beyond the plain decoder, by name; a backend refuses the rest.

The plain decoder: RMS norm, q, k and v with or without bias, one rotary embedding whose frequencies
are fixed, attention over the whole sequence, SwiGLU.
"""

from __future__ import annotations

from collections.abc import Collection

from headrace.errors import ModelError
from headrace.models.spec import ModelSpec


def features(spec: ModelSpec) -> list[str]:
    """All of them, in the order of a layer."""
    if spec.foreign:
        return ["layers of transformers"]
    kinds = spec.every_layer()
    names = {layer.rope for layer in kinds}
    asked = {
        "AltUp": spec.altup is not None,
        "scaled embedding": spec.embed_scale != 1.0,
        "learned positions": spec.learned_positions > 0,
        "layer norm": spec.norm == "layer",
        "wide norms": spec.norm == "rms_wide",
        "post norms": spec.post_norms,
        "latent attention": any(layer.attention == "latent" for layer in kinds),
        "clipped q, k and v": spec.qkv_clip != 0.0,
        "q and k norms": spec.qk_norm,
        "v norms": spec.v_norm,
        "layers without rotary embedding": "none" in names,
        "two rotary embeddings": "local" in names,
        "rotary frequencies by length": spec.by_length is not None,
        "shared K and V": any(layer.kv_from >= 0 for layer in kinds),
        "sliding window": any(layer.window for layer in kinds),
        "scaled scores": any(layer.scale and layer.attention == "heads" for layer in kinds),
        "soft-capped scores": spec.softcap != 0.0,
        "attention sinks": spec.sinks,
        "ALiBi": spec.alibi != 0.0,
        "output bias": spec.out_bias,
        "experts": any(layer.mlp == "experts" for layer in kinds),
        "MLP without a gate": not spec.gated,
        "sparse activations": any(layer.sparsity for layer in kinds),
        f"MLP of {spec.act}": spec.act != "silu",
        "MLP bias": spec.mlp_bias,
        "layers of several widths": any(layer.ffn for layer in kinds),
        "soft-capped logits": spec.logit_softcap != 0.0,
    }
    return [name for name, wanted in asked.items() if wanted]


def missing(spec: ModelSpec, computes: Collection[str]) -> list[str]:
    """What `spec` asks of a backend that computes only that."""
    return [name for name in features(spec) if name not in computes]


def refuse_missing(spec: ModelSpec, computes: Collection[str], backend: str) -> None:
    """Raises ModelError naming what is asked and not computed."""
    lacks = missing(spec, computes)
    if lacks:
        raise ModelError(
            f"{spec.architecture} needs what backend = {backend} does not compute: "
            + ", ".join(lacks)
        )
