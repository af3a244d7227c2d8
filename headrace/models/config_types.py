"""What the values in a config.json may be: looked at once, so that families need not doubt them.

Of keys that must be there and be numbers, `Need` says so as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from headrace.errors import ModelError

_INNER = ("text_config", "rope_scaling", "rope_parameters", "attn_config")
_NEVER_NULL = (
    "tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window", "max_window_layers",
    "scale_attn_weights", "scale_attn_by_inverse_layer_idx", "add_cross_attention", "no_bias",
    "alibi", "qk_ln", "prefix_lm", "altup_correct_scale", "altup_active_idx",
    "num_kv_shared_layers", "expansion_ratio", "decoder_sparse_step", "moe_layer_freq",
    "first_k_dense_replace", "sliding_window_pattern", "rope_theta",
    "query_pre_attn_scalar", "routed_scaling_factor", "rope_type", "type",
)  # fmt: skip


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _real(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value)


def _one_or_each(value: Any, fits: Callable[[Any], bool]) -> bool:
    return all(map(fits, value)) if isinstance(value, list) else fits(value)


# What is needed, whether a value is that, and the keys that need it.
_KINDS: tuple[tuple[str, Callable[[Any], bool], tuple[str, ...]], ...] = (
    ("a count", lambda value: _whole(value, 1), (
        "head_dim", "num_key_value_heads", "n_inner", "q_lora_rank",
        "n_group", "topk_group", "expansion_ratio", "decoder_sparse_step",
        "moe_layer_freq", "sliding_window_pattern", "_sliding_window_pattern", "num_labels",
    )),
    ("a whole number of 0 or more", lambda value: _whole(value, 0), (
        "sliding_window", "max_window_layers", "first_k_dense_replace", "n_shared_experts",
        "num_kv_shared_layers", "altup_active_idx", "num_local_experts", "num_experts",
    )),
    ("a count, or a list of counts", lambda value: _one_or_each(value, lambda one: _whole(one, 1)),
     ("intermediate_size",)),
    ("a share below 1, or a list of them",
     lambda value: _one_or_each(value, lambda one: _real(one) and 0 <= one < 1),
     ("activation_sparsity_pattern",)),
    ("a number", _real, ("rope_theta", "rope_local_base_freq", "partial_rotary_factor",
                         "swiglu_limit", "swiglu_alpha")),
    ("a number of 0 or more", lambda value: _real(value) and value >= 0, (
        "rms_norm_eps", "layer_norm_epsilon", "clip_qkv", "attn_logit_softcapping",
        "final_logit_softcapping", "routed_scaling_factor",
    )),
    ("a number above 0", lambda value: _real(value) and value > 0, (
        "query_pre_attn_scalar", "softmax_scale", "alibi_bias_max",
    )),
    ("true or false", lambda value: isinstance(value, bool), (
        "tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window",
        "norm_topk_prob", "rope_interleave", "scale_attn_weights", "truncate",
        "scale_attn_by_inverse_layer_idx", "add_cross_attention", "no_bias", "alibi", "qk_ln",
        "prefix_lm", "use_bidirectional_attention", "altup_correct_scale",
    )),
    ("a text", lambda value: isinstance(value, str), (
        "hidden_act", "hidden_activation", "activation_function", "dtype", "torch_dtype",
        "topk_method", "attn_type", "norm_type", "problem_type", "rope_type", "type",
    )),
    ("a list of texts", lambda value: isinstance(value, list)
     and all(isinstance(one, str) for one in value), ("architectures", "layer_types")),
    ("a list of layers", lambda value: isinstance(value, list)
     and all(_whole(one, 0) for one in value), ("mlp_only_layers",)),
    ("a mapping", lambda value: isinstance(value, Mapping), (
        *_INNER, "quantization_config", "id2label", "full_attention", "sliding_attention",
    )),
)  # fmt: skip
_BY_KEY = {key: (words, fits) for words, fits, keys in _KINDS for key in keys}


def check(config: Mapping[str, Any], inside: str = "") -> None:
    """Raises ModelError naming the key, its value and what it should be. inside: names of the keys
    that the mapping is under, each with a dot."""
    for key, value in config.items():
        words, fits = _BY_KEY.get(key, ("", None))
        if fits is None:
            continue
        fine = key not in _NEVER_NULL if value is None else fits(value)
        if not fine:
            raise ModelError(f"config.json: {inside}{key} = {value!r}, {words} is needed")
    for key in _INNER:
        if config.get(key):
            check(config[key], f"{inside}{key}.")
    for key, value in config.items():
        if inside.startswith("rope_") and isinstance(value, Mapping):
            check(value, f"{inside}{key}.")
