"""Gemma 1, 2 and 3 (text): norms of 1 + weight, GeGLU, embeddings times sqrt(hidden).

Gemma 2 norms what attention and MLP give, caps scores and logits, and has a window in every other
layer. Gemma 3 norms the heads of q and k instead of capping; five of six layers have a window and
a rotary embedding of their own. Of models that see pictures too the text part is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.models import gguf, hf
from headrace.models.llama import build, decoder_slots
from headrace.models.need import refuse
from headrace.models.slots import Slot
from headrace.models.spec import LayerSpec, ModelSpec, Rope
from headrace.sources.gguf import Header

__all__ = ["build", "from_gguf", "from_hf", "slots"]

_TANH = "gelu_pytorch_tanh"
_COMMON: dict[str, Any] = {"norm": "rms_wide", "act": "gelu_tanh"}
# What configs leave out, for it is their class's default.
_GEMMA1: dict[str, Any] = {
    "tie_word_embeddings": True, "head_dim": 256, "num_key_value_heads": 16,
}  # fmt: skip
_GEMMA2: dict[str, Any] = {
    "tie_word_embeddings": True, "head_dim": 256, "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256, "sliding_window": 4096,
    "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
}  # fmt: skip
# What configs of Gemma 3 that see pictures leave out, for it is their classes' default.
_GEMMA3: dict[str, Any] = {
    "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "query_pre_attn_scalar": 256,
    "sliding_window": 4096, "rope_theta": 1e6, "tie_word_embeddings": True,
}  # fmt: skip
_LOCAL_THETA = 1e4  # of Gemma 3's layers with a window
_LARGE = {"gemma2": 46, "gemma3": 62}  # layers of the 27B models: they scale scores otherwise


def from_hf(config: hf.Config) -> ModelSpec:
    """See `registry.ModelModule`."""
    name = hf.architecture(config)
    if name.startswith("Gemma3"):
        return _gemma3(text_of(config, _GEMMA3))
    text = text_of(config, _GEMMA2 if "Gemma2" in name else _GEMMA1)
    fields = _fields(text)
    if name.startswith("GemmaFor"):
        return ModelSpec(**fields)
    layers, window = fields["layers"], text["sliding_window"]
    sliding = [i % 2 == 0 for i in range(layers)]
    kinds = hf.windows(text, sliding, window, fields["max_positions"])
    more = {
        "post_norms": True,
        "kinds": _scaled(kinds or [LayerSpec()] * layers, _scale(text, fields["head_dim"])),
        "softcap": float(text.get("attn_logit_softcapping") or 0.0),
        "logit_softcap": float(text.get("final_logit_softcapping") or 0.0),
    }
    return ModelSpec(**fields | more)


def _fields(text: hf.Config) -> dict[str, Any]:
    """What all three share."""
    bias = bool(text.get("attention_bias"))
    reasons = {"use_bidirectional_attention": bool(text.get("use_bidirectional_attention"))}
    refuse(hf.architecture(text), reasons)
    fields = hf.decoder_fields(dict(text) | {"hidden_act": _act(text)})
    more = {"embed_scale": fields["hidden"] ** 0.5, "qkv_bias": bias, "out_bias": bias}
    return fields | {"norm": "rms_wide"} | more


def _act(text: hf.Config) -> str:
    """Gemma 1 says it as hidden_act, where gelu means the approximation; later ones otherwise.

    Raises ModelError where Gemma 1 says both, and not the same.
    """
    name, later = hf.architecture(text), text.get("hidden_activation")
    first = text.get("hidden_act") if name.startswith("GemmaFor") else None
    first = _TANH if first == "gelu" else first
    differ = bool(first and later and first != later)
    refuse(name, {f"hidden_act = {first} and hidden_activation = {later}": differ})
    return str(first or later or _TANH)


def _scale(text: hf.Config, head_dim: int) -> float:
    """0.0 where it is the usual one."""
    scalar = float(text.get("query_pre_attn_scalar") or head_dim)
    return 0.0 if scalar == head_dim else scalar**-0.5


def _scaled(kinds: Sequence[LayerSpec], scale: float) -> tuple[LayerSpec, ...]:
    return tuple(msgspec.structs.replace(kind, scale=scale) for kind in kinds)


def text_of(config: hf.Config, defaults: dict[str, Any]) -> dict[str, Any]:
    """The part of a config that says what the text model is, with its class's defaults. Whether the
    output layer is the embedding, the outer part says if it says anything."""
    text = dict(config.get("text_config") or config)
    outer = {k: config[k] for k in ("architectures", "tie_word_embeddings") if k in config}
    return defaults | text | outer


def ropes_of(text: hf.Config) -> tuple[dict[str, Any], Rope]:
    """What the config says of the global rotary embedding, and the local one."""
    ropes = text.get("rope_parameters") or {}
    if "full_attention" in ropes or "sliding_attention" in ropes:
        rope, local = ropes.get("full_attention") or {}, ropes.get("sliding_attention") or {}
    else:
        rope, local = ropes, {}
    rope = rope | (text.get("rope_scaling") or {})
    theta = local.get("rope_theta") or text.get("rope_local_base_freq") or _LOCAL_THETA
    scaled = local.get("rope_type", "default") != "default"
    refuse(hf.architecture(text), {"scaled local rotary embedding": scaled})
    return {"rope_theta": text["rope_theta"]} | rope, Rope(float(theta))


def _gemma3(text: dict[str, Any]) -> ModelSpec:
    rope, local = ropes_of(text)
    capped = bool(text.get("attn_logit_softcapping"))
    refuse(hf.architecture(text), {"attn_logit_softcapping": capped})
    fields = _fields(text | {"rope_scaling": rope})
    pattern = text.get("sliding_window_pattern") or text.get("_sliding_window_pattern") or 6
    sliding: Sequence[bool] = [bool((i + 1) % pattern) for i in range(fields["layers"])]
    sliding = hf.sliding_layers(text, sliding)
    windows = hf.windows(text, sliding, text["sliding_window"], fields["max_positions"])
    more = {
        "kinds": local_kinds(sliding, windows, _scale(text, fields["head_dim"])),
        "logit_softcap": float(text.get("final_logit_softcapping") or 0.0),
    }
    return ModelSpec(**fields | _gemma3_fields(local) | more)


def _gemma3_fields(local: Rope) -> dict[str, Any]:
    return {"post_norms": True, "qk_norm": True, "local_rope": local}


def local_kinds(
    sliding: Sequence[bool], windows: Sequence[LayerSpec], scale: float
) -> tuple[LayerSpec, ...]:
    """A layer of the local kind turns by its own rotary embedding, even if its window hides
    nothing."""
    return tuple(
        LayerSpec(
            window=windows[i].window if windows else 0,
            rope="local" if local else "global",
            scale=scale,
        )
        for i, local in enumerate(sliding)
    )


def from_gguf(header: Header) -> ModelSpec:
    """See `registry.ModelModule`. Patterns of layers are llama.cpp's: the file does not say."""
    fields, name = gguf.decoder_fields(header), header.architecture
    layers = fields["layers"]
    fields |= _COMMON | {"embed_scale": fields["hidden"] ** 0.5}
    if name == "gemma":
        return ModelSpec(**fields)
    pattern = 2 if name == "gemma2" else 6
    sliding = [bool((i + 1) % pattern) for i in range(layers)]
    window = int(header.get("attention.sliding_window") or 0)
    hides = 0 < window < fields["max_positions"]
    windows = [LayerSpec(window=window if local and hides else 0) for local in sliding]
    large = layers == _LARGE[name]
    scale = (fields["hidden"] / fields["heads"]) ** -0.5 if large else 0.0
    fields["logit_softcap"] = float(header.get("final_logit_softcapping") or 0.0)
    if name == "gemma2":
        softcap = float(header.get("attn_logit_softcapping") or 0.0)
        more = {"post_norms": True, "softcap": softcap, "kinds": _scaled(windows, scale)}
        return ModelSpec(**fields | more)
    theta = float(header.get("rope.freq_base_swa") or _LOCAL_THETA)
    kinds = local_kinds(sliding, windows, scale)
    return ModelSpec(**fields | _gemma3_fields(Rope(theta)) | {"kinds": kinds})


def slots(spec: ModelSpec) -> list[Slot]:
    """Every tensor of the checkpoint. GGUF has the 1 added to norms already, and q and k as they
    are."""
    return decoder_slots(spec, shift=1.0)
