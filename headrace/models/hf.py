"""What the families' configs share in Hugging Face folders. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.errors import ModelError
from headrace.models.hf_rope import rope_of
from headrace.models.need import Need, refuse
from headrace.models.spec import Act, LayerSpec

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


def decoder_fields(config: Config, *, turns_part: bool = False) -> dict[str, Any]:
    """Fields of ModelSpec under the names that most families use. turns_part: the family turns the
    part of a head that `partial_rotary_factor` says; others turn all of it.

    Raises ModelError for keys that are missing, and for what no family here computes.
    """
    name = architecture(config)
    refuse(name, {"quantization_config": bool(config.get("quantization_config"))})
    need = Need(config, "config.json")
    heads, hidden = need.count("num_attention_heads"), need.count("hidden_size")
    head_dim = config.get("head_dim") or hidden // heads
    rows = need.count("vocab_size")
    rope, positions = rope_of(config, head_dim)
    refuse(name, {"a partial_rotary_factor": rope.dims > 0 and not turns_part})
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
