"""What the families' configs share in Hugging Face folders. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.errors import ModelError
from headrace.models.need import Need, refuse
from headrace.models.spec import Act, LayerSpec, Rope

Config = Mapping[str, Any]

_ACTS: dict[str, Act] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


def decoder_fields(config: Config) -> dict[str, Any]:
    """Fields of ModelSpec under the names that most families use. Raises ModelError for keys that
    are missing, and for what no family here computes."""
    name = architecture(config)
    refuse(name, {"quantization_config": bool(config.get("quantization_config"))})
    need = Need(config, "config.json")
    heads, hidden = need.count("num_attention_heads"), need.count("hidden_size")
    head_dim = config.get("head_dim") or hidden // heads
    rows = need.count("vocab_size")
    rope, positions = rope_of(config, head_dim)
    return {
        "architecture": name,
        "layers": need.count("num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": head_dim,
        "ffn": need.count("intermediate_size"),
        "vocab_rows": rows,
        "vocab_size": rows,
        "rope": rope,
        "norm_eps": need.number("rms_norm_eps"),
        "tied": bool(config.get("tie_word_embeddings", False)),
        "qkv_bias": False,
        "max_positions": positions,
        "dtype": dtype_of(config),
        "act": act_of(config, "hidden_act"),
    }


def architecture(config: Config) -> str:
    """As the config spells it, for messages."""
    return str((config.get("architectures") or ["(none)"])[0])


def dtype_of(config: Config) -> str:
    """What the config claims the weights to be."""
    return str(config.get("dtype") or config.get("torch_dtype") or "")


def act_of(config: Config, key: str, default: str = "silu") -> Act:
    """The activation under `key`. Raises ModelError for one that no layer computes."""
    name = config.get(key) or default
    if name not in _ACTS:
        raise ModelError(f"{architecture(config)} with {key} = {name!r} is not supported")
    return _ACTS[name]


def windows(
    config: Config, sliding: Sequence[bool], window: int | None, positions: int
) -> tuple[LayerSpec, ...]:
    """A LayerSpec for each layer; those in `sliding` see `window` tokens, unless that hides
    nothing of the `positions` that are served. Layer types in the config come first.

    Raises ModelError for other types, and where layers slide and there is no window.
    """
    sliding = sliding_layers(config, sliding)
    refuse(
        architecture(config), {"sliding layers and no sliding_window": any(sliding) and not window}
    )
    if not any(sliding) or not window or window >= positions:
        return ()
    return tuple(LayerSpec(window=window if slides else 0) for slides in sliding)


def sliding_layers(config: Config, usual: Sequence[bool]) -> Sequence[bool]:
    """Which layers have a window: as `layer_types` says, if it is there, else `usual`. Raises
    ModelError for types that are neither that nor full, and if it is not of all layers."""
    names = config.get("layer_types")
    if names is None:
        return usual
    unknown = sorted(set(names) - {"full_attention", "sliding_attention"})
    refuse(
        architecture(config),
        {
            f"layers of type {', '.join(unknown)}": bool(unknown),
            f"layer_types of {len(names)} layers and num_hidden_layers = {len(usual)}": len(names)
            != len(usual),
        },
    )
    return [name == "sliding_attention" for name in names]


def rope_of(config: Config, head_dim: int) -> tuple[Rope, int]:
    """The rotary embedding, and the positions that it makes of `max_position_embeddings`.

    Reads both spellings: `rope_theta` + `rope_scaling`, and the newer `rope_parameters`. Raises
    ModelError for what `Rope` has no kind for.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    scaling = {key: value for key, value in rope.items() if value is not None}
    positions = Need(config, "config.json").count("max_position_embeddings")
    theta = float(scaling.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    part = scaling.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    dims = int(head_dim * part)
    if not 0 < dims <= head_dim or dims % 2:
        raise ModelError(f"partial_rotary_factor = {part} of head_dim = {head_dim}")
    need, part_dims = Need(scaling, "rope_scaling"), dims if dims < head_dim else 0
    if kind == "default":
        return Rope(theta, dims=part_dims), positions
    if kind == "linear":
        factor = need.number("factor")
        return Rope(theta, "linear", factor, dims=part_dims), positions
    if kind == "dynamic":
        factor = need.number("factor")
        rope_ = Rope(theta, "dynamic", factor, original_positions=positions, dims=part_dims)
        return rope_, int(positions * factor)
    if kind == "llama3":
        bounds = need.number("low_freq_factor"), need.number("high_freq_factor")
        original = need.count("original_max_position_embeddings")
        return Rope(
            theta, "llama3", need.number("factor"), *bounds, original, dims=part_dims
        ), positions
    original = _original(config, scaling, positions)
    if kind == "yarn":
        return _yarn(scaling, theta, original, positions, part_dims)
    if kind == "longrope":
        return _longrope(scaling, theta, original, positions, part_dims), positions
    raise ModelError(
        f"rope scaling {kind!r} is not supported "
        "(default, linear, dynamic, llama3, yarn and longrope are)"
    )


def _original(config: Config, scaling: Config, positions: int) -> int:
    """Positions of the training before the context was extended; Phi-3 says it outside."""
    inside = scaling.get("original_max_position_embeddings") or positions
    return int(config.get("original_max_position_embeddings") or inside)


def _yarn(
    scaling: Config, theta: float, original: int, positions: int, part_dims: int
) -> tuple[Rope, int]:
    """https://arxiv.org/abs/2309.00071; the magnitude is its equation 22, or DeepSeek's quotient
    of two."""
    factor = scaling.get("factor") or positions / original
    magnitude = scaling.get("attention_factor")
    if magnitude is None:
        mscale, mscale_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
        if mscale and mscale_all:
            magnitude = _mscale(factor, mscale) / _mscale(factor, mscale_all)
        else:
            magnitude = _mscale(factor, 1.0)
    rope = Rope(
        theta,
        "yarn",
        float(factor),
        original_positions=original,
        magnitude=float(magnitude),
        fast=float(scaling.get("beta_fast") or 32.0),
        slow=float(scaling.get("beta_slow") or 1.0),
        truncate=bool(scaling.get("truncate", True)),
        dims=part_dims,
    )
    return rope, max(positions, int(original * factor))


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope(scaling: Config, theta: float, original: int, positions: int, part_dims: int) -> Rope:
    """https://arxiv.org/abs/2402.13753; the magnitude as Phi-3's code has it."""
    need = Need(scaling, "rope_scaling")
    factor = scaling.get("factor") or positions / original
    magnitude = scaling.get("attention_factor")
    if magnitude is None:
        grown = factor > 1 and original > 1
        magnitude = math.sqrt(1 + math.log(factor) / math.log(original)) if grown else 1.0
    return Rope(
        theta,
        "longrope",
        float(factor),
        original_positions=original,
        magnitude=float(magnitude),
        short=need.numbers("short_factor"),
        long=need.numbers("long_factor"),
        dims=part_dims,
    )
