"""Tiny random checkpoints of every family, made and saved by transformers itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from headrace.sources.files import ModelFiles

VOCAB = 131
WINDOW, ORIGINAL = 16, 32

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5, "initializer_range": 0.12, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None, "attn_implementation": "eager",
}  # fmt: skip
_SCALED = {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
_PAIRS = 4  # of a head of 8
_KINDS: dict[str, dict[str, Any]] = {
    "yarn": {"rope_type": "yarn", **_SCALED, "beta_fast": 4.0},
    "longrope": {
        "rope_type": "longrope",
        **_SCALED,
        "short_factor": [1.0 + i / 8 for i in range(_PAIRS)],
        "long_factor": [1.5 + i for i in range(_PAIRS)],
    },
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
}
_GEMMA: dict[str, Any] = {
    "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2,
    "query_pre_attn_scalar": 24, "tie_word_embeddings": True, "sliding_window": WINDOW,
}  # fmt: skip
_MIXTURE: dict[str, Any] = {
    "intermediate_size": 40,
    "initializer_range": 0.3,  # so that experts are chosen clearly
}
_LATENT: dict[str, Any] = _MIXTURE | {
    "num_key_value_heads": 6, "kv_lora_rank": 24, "q_lora_rank": None, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 8, "moe_intermediate_size": 16, "n_routed_experts": 8,
    "num_experts_per_tok": 3, "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
_LATENT_YARN = _KINDS["yarn"] | {
    "beta_fast": 32, "beta_slow": 1, "mscale": 0.7, "mscale_all_dim": 1.0,
}  # fmt: skip


class Tiny(NamedTuple):
    """A config class and model class of transformers, and what differs from the usual shape.

    window, original: of the lengths that a family is tried at; 0 = it has none.
    """

    kind: str
    changes: dict[str, Any]
    window: int = 0
    original: int = 0


def _scaled(kind: str) -> Tiny:
    changes: dict[str, Any] = {"rope_parameters": _KINDS[kind]}
    if kind == "dynamic":
        changes["max_position_embeddings"] = ORIGINAL
    return Tiny("Llama", changes, original=ORIGINAL)


FAMILIES: dict[str, Tiny] = {
    "llama-biases": Tiny("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-yarn": _scaled("yarn"),
    "llama-longrope": _scaled("longrope"),
    "llama-dynamic": _scaled("dynamic"),
    "mistral": Tiny("Mistral", {"sliding_window": WINDOW}, WINDOW),
    "qwen2": Tiny(
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
        WINDOW,
    ),
    "qwen3": Tiny("Qwen3", {"head_dim": 16, "attention_bias": True}),
    "gemma": Tiny("Gemma", {"head_dim": 16, "hidden_act": "gelu_pytorch_tanh"}),
    "gemma2": Tiny(
        "Gemma2",
        {**_GEMMA, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
        WINDOW,
    ),
    "gemma3": Tiny(
        "Gemma3Text",
        {
            **_GEMMA,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "final_logit_softcapping": 8.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        WINDOW,
        ORIGINAL,
    ),
    "gemma3n": Tiny(
        "Gemma3nText",
        {
            "head_dim": 16,
            "num_attention_heads": 4,
            "num_hidden_layers": 5,
            "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
            "num_kv_shared_layers": 2,
            "sliding_window": WINDOW,
            "vocab_size_per_layer_input": VOCAB - 9,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 4,
            "activation_sparsity_pattern": [0.9, 0.0, 0.5, 0.0, 0.0],
            "intermediate_size": [80, 80, 64, 80, 80],
        },
        WINDOW,
    ),
    "glm": Tiny("Glm", {"head_dim": 16, "attention_bias": True}),
    "glm4": Tiny("Glm4", {"head_dim": 16, "num_hidden_layers": 2}),
    "gpt-neox": Tiny("GPTNeoX", {"num_key_value_heads": 6, "layer_norm_eps": 1e-5}),
    "olmo2": Tiny("Olmo2", {}),
    "stablelm": Tiny("StableLm", {"use_qkv_bias": True, "partial_rotary_factor": 0.5}),
    "starcoder2": Tiny("Starcoder2", {"sliding_window": WINDOW}, WINDOW),
    "granite": Tiny("Granite", {"logits_scaling": 3.0, "embedding_multiplier": 2.0}),
    "gpt2": Tiny(
        "GPT2",
        {"n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 128, "n_inner": 80}
        | {"scale_attn_by_inverse_layer_idx": True},
    ),
    "mpt": Tiny(
        "Mpt",
        {"d_model": 48, "n_heads": 6, "n_layers": 3, "max_seq_len": 128}
        | {"attn_config": {"clip_qkv": 1.5}},
    ),
    "qwen3-moe": Tiny(
        "Qwen3Moe",
        _MIXTURE
        | {"head_dim": 16, "moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2}
        | {"norm_topk_prob": True, "mlp_only_layers": [1], "rope_parameters": _KINDS["yarn"]},
        original=ORIGINAL,
    ),
    "mixtral": Tiny(
        "Mixtral",
        _MIXTURE | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW},
        WINDOW,
    ),
    "gpt-oss": Tiny(
        "GptOss",
        _MIXTURE
        | {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}
        | {"sliding_window": WINDOW, "rope_parameters": _KINDS["yarn"] | {"truncate": False}},
        WINDOW,
        ORIGINAL,
    ),
    "deepseek-v2": Tiny(
        "DeepseekV2",
        _LATENT
        | {"n_shared_experts": 2, "topk_method": "group_limited_greedy", "n_group": 4}
        | {"topk_group": 2, "routed_scaling_factor": 1.5, "rope_parameters": _LATENT_YARN},
        original=ORIGINAL,
    ),
    "deepseek-v2-lite": Tiny(
        "DeepseekV2", _LATENT | {"topk_method": "greedy", "n_group": 1, "topk_group": 1}
    ),
    "deepseek-v3": Tiny(
        "DeepseekV3",
        _LATENT
        | {"q_lora_rank": 20, "n_group": 4, "topk_group": 2, "rope_parameters": _LATENT_YARN},
        original=ORIGINAL,
    ),
}
MIXTURES = [name for name, tiny in FAMILIES.items() if "num_experts_per_tok" in tiny.changes]
_OWN_NAMES = ("GPT2", "Mpt")  # their configs have no Llama-like names
_MODELS = {
    "GPT2": "GPT2LMHeadModel",
    "Gemma3Text": "Gemma3ForCausalLM",
    "Gemma3nText": "Gemma3nForCausalLM",
}


def save(name: str, folder: Path, **changes: Any) -> tuple[Any, ModelFiles]:
    """A random model of FAMILIES, in eval mode, and its files under `folder`.

    changes: to its config, under transformers' names.
    """
    torch.manual_seed(sum(name.encode()))
    tiny = FAMILIES[name]
    shape = _SHAPE
    if tiny.kind in _OWN_NAMES:
        kept = ("vocab_size", "initializer_range", "bos_token_id", "eos_token_id")
        shape = {key: _SHAPE[key] for key in (*kept, "attn_implementation")}
        if tiny.kind == "Mpt":
            shape = {key: value for key, value in shape.items() if "attn" not in key}
    config = getattr(transformers, f"{tiny.kind}Config")(**(shape | tiny.changes | changes))
    make: Callable[[Any], Any] = getattr(
        transformers, _MODELS.get(tiny.kind, f"{tiny.kind}ForCausalLM")
    )
    model = make(config).eval()
    for parameter in model.parameters():  # norms start at 1 and biases at 0: nothing to see
        if parameter.ndim == 1:
            parameter.data += 0.3 * torch.randn(parameter.shape)
    for name_of, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name_of.endswith("bias") and not tensor.any():  # of experts, and of the choice of them
            torch.nn.init.normal_(tensor.detach(), std=0.3)
    model.save_pretrained(folder)
    if tiny.kind == "Gemma3nText":
        model.model.embed_tokens_per_layer.register_forward_pre_hook(_known)
    return model, ModelFiles(name, "hf", folder)


def _known(table: Any, args: tuple[torch.Tensor]) -> torch.Tensor:
    """Ids that the table has no row for take the first, as in all but some of transformers 5."""
    return args[0].where(args[0] < table.num_embeddings, 0)


def lengths(tiny: Tiny) -> list[int]:
    """Prompt lengths at which a family may go wrong."""
    found = {5, 33, 64}
    if tiny.window:
        found |= {tiny.window - 1, tiny.window, tiny.window + 1, 3 * tiny.window}
    if tiny.original:
        found |= {tiny.original // 2, tiny.original, 2 * tiny.original}
    return sorted(found)
