"""Configs as makers of models published them: keys that say something, and beside them keys that
must not be taken for anything (nulls, notes, what other servers read)."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.models.spec import ModelSpec, from_hf

_MISTRAL: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_act": "silu",
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "vocab_size": 32000,
    "max_position_embeddings": 32768, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "use_cache": True,
}  # fmt: skip
_QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "attention_bias": False,
    "decoder_sparse_step": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
    "intermediate_size": 6144, "max_position_embeddings": 262144, "max_window_layers": 48,
    "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True,
    "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 48, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 10000000, "sliding_window": None,
    "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
_DEEPSEEK: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "aux_loss_alpha": 0.001,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"}, "hidden_size": 2048,
    "hidden_act": "silu", "first_k_dense_replace": 1, "kv_lora_rank": 512,
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2,
    "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27,
    "num_key_value_heads": 16, "pretraining_tp": 1, "q_lora_rank": None, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "seq_aux": True, "tie_word_embeddings": False, "topk_group": 1,
    "torch_dtype": "bfloat16", "v_head_dim": 128,
}  # fmt: skip
_GEMMA3_TEXT: dict[str, Any] = {
    "_sliding_window_pattern": 6, "attention_bias": False, "attn_logit_softcapping": None,
    "final_logit_softcapping": None, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 640, "intermediate_size": 2048, "max_position_embeddings": 32768,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3,
    "model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 18,
    "num_key_value_heads": 1, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000.0, "rope_scaling": None, "rope_theta": 1000000.0,
    "sliding_window": 512, "torch_dtype": "bfloat16", "use_bidirectional_attention": False,
    "vocab_size": 262144,
}  # fmt: skip
_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True,
    "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
    "initial_context_length": 4096, "intermediate_size": 2880, "max_position_embeddings": 131072,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "num_attention_heads": 64,
    "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8,
    "num_local_experts": 32, "rms_norm_eps": 1e-05, "rope_theta": 150000, "sliding_window": 128,
    "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn",
                     "original_max_position_embeddings": 4096, "truncate": False},
    "quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"},
    "swiglu_limit": 7.0, "tie_word_embeddings": False, "vocab_size": 201088,
}  # fmt: skip

PUBLISHED: dict[str, dict[str, Any]] = {
    "mistralai/Mistral-7B-v0.1": _MISTRAL | {"sliding_window": 4096},
    "mistralai/Mistral-7B-Instruct-v0.2": _MISTRAL
    | {"sliding_window": None, "rope_theta": 1000000.0, "attention_dropout": 0.0},
    "NousResearch/Yarn-Mistral-7b-128k": _MISTRAL
    | {"sliding_window": 131072, "max_sequence_length": 131072}
    | {"rope_scaling": {"factor": 16.0, "finetuned": True, "type": "yarn",
                        "original_max_position_embeddings": 8192}},
    "Qwen/Qwen2.5-7B-Instruct-1M": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu",
        "dual_chunk_attention_config": {"chunk_size": 262144, "local_size": 8192,
                                        "original_max_position_embeddings": 262144},
        "hidden_size": 3584, "intermediate_size": 18944, "max_position_embeddings": 1010000,
        "max_window_layers": 28, "num_attention_heads": 28, "num_hidden_layers": 28,
        "num_key_value_heads": 4, "rms_norm_eps": 1e-05, "rope_theta": 10000000.0,
        "sliding_window": 32768, "tie_word_embeddings": False, "use_sliding_window": False,
        "vocab_size": 152064,
    },
    "Qwen/Qwen3-30B-A3B-Instruct-2507": _QWEN3_MOE,
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": _QWEN3_MOE
    | {"qkv_bias": False, "use_qk_norm": True, "shared_expert_intermediate_size": 0},
    "deepseek-ai/DeepSeek-V2-Lite": _DEEPSEEK
    | {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2",
       "intermediate_size": 10944, "max_position_embeddings": 163840, "norm_topk_prob": False,
       "rms_norm_eps": 1e-06, "rope_theta": 10000, "routed_scaling_factor": 1.0,
       "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707,
                        "mscale_all_dim": 0.707, "type": "yarn",
                        "original_max_position_embeddings": 4096},
       "scoring_func": "softmax", "topk_method": "greedy", "vocab_size": 102400},
    "moonshotai/Moonlight-16B-A3B": _DEEPSEEK
    | {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "ep_size": 1,
       "intermediate_size": 11264, "max_position_embeddings": 8192, "norm_topk_prob": True,
       "num_nextn_predict_layers": 0, "rms_norm_eps": 1e-05, "rope_theta": 50000.0,
       "routed_scaling_factor": 2.446, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
       "vocab_size": 163840},
    "google/gemma-3-270m": _GEMMA3_TEXT | {"architectures": ["Gemma3ForCausalLM"]},
    "google/gemma-3-4b-it": {
        "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999,
        "model_type": "gemma3", "torch_dtype": "bfloat16", "mm_tokens_per_image": 256,
        "vision_config": {"model_type": "siglip_vision_model", "num_hidden_layers": 27},
        "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
                        "model_type": "gemma3_text", "sliding_window": 1024,
                        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
    },
    "openai/gpt-oss-20b": _OSS,
    "zai-org/glm-4-9b-chat-hf": {
        "architectures": ["GlmForCausalLM"], "model_type": "glm", "attention_bias": True,
        "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 13696,
        "max_position_embeddings": 131072, "num_attention_heads": 32, "num_hidden_layers": 40,
        "num_key_value_heads": 2, "pad_token_id": 151329, "rms_norm_eps": 1.5625e-07,
        "rope_theta": 10000.0, "tie_word_embeddings": False, "vocab_size": 151552,
    },
    "openai-community/gpt2": {
        "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"],
        "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768,
        "n_head": 12, "n_layer": 12, "n_positions": 1024, "summary_activation": None,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        "vocab_size": 50257,
    },
}  # fmt: skip


def _facts(spec: ModelSpec) -> tuple[Any, ...]:
    """Heads, windows, rope, factor, positions and experts."""
    heads, rope = (spec.heads, spec.kv_heads, spec.head_dim), spec.rope
    windows = [layer.window for layer in spec.every_layer()]
    slides = {window: windows.count(window) for window in sorted({*windows})}
    experts = (spec.experts.count, spec.experts.chosen) if spec.experts else None
    turned = (rope.kind, rope.theta, rope.factor, rope.dims)
    return heads, slides, turned, spec.max_positions, experts


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("mistralai/Mistral-7B-v0.1",
         ((32, 8, 128), {4096: 32}, ("default", 1e4, 1.0, 0), 32768, None)),
        ("mistralai/Mistral-7B-Instruct-v0.2",
         ((32, 8, 128), {0: 32}, ("default", 1e6, 1.0, 0), 32768, None)),
        ("NousResearch/Yarn-Mistral-7b-128k",
         ((32, 8, 128), {0: 32}, ("yarn", 1e4, 16.0, 0), 131072, None)),
        ("Qwen/Qwen2.5-7B-Instruct-1M",
         ((28, 4, 128), {0: 28}, ("default", 1e7, 1.0, 0), 1010000, None)),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507",
         ((32, 4, 128), {0: 48}, ("default", 1e7, 1.0, 0), 262144, (128, 8))),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct",
         ((32, 4, 128), {0: 48}, ("default", 1e7, 1.0, 0), 262144, (128, 8))),
        ("deepseek-ai/DeepSeek-V2-Lite",
         ((16, 1, 576), {0: 27}, ("yarn", 1e4, 40.0, 64), 163840, (64, 6))),
        ("moonshotai/Moonlight-16B-A3B",
         ((16, 1, 576), {0: 27}, ("default", 5e4, 1.0, 64), 8192, (64, 6))),
        ("google/gemma-3-270m",
         ((4, 1, 256), {0: 3, 512: 15}, ("default", 1e6, 1.0, 0), 32768, None)),
        ("google/gemma-3-4b-it",
         ((8, 4, 256), {0: 5, 1024: 29}, ("linear", 1e6, 8.0, 0), 131072, None)),
        ("openai/gpt-oss-20b",
         ((64, 8, 64), {0: 12, 128: 12}, ("yarn", 1.5e5, 32.0, 0), 131072, (32, 4))),
        ("zai-org/glm-4-9b-chat-hf",
         ((32, 2, 128), {0: 40}, ("default", 1e4, 1.0, 64), 131072, None)),
        ("openai-community/gpt2",
         ((12, 12, 64), {0: 12}, ("default", 1e4, 1.0, 0), 1024, None)),
    ],
)  # fmt: skip
def test_published_configs(name: str, facts: tuple[Any, ...]) -> None:
    """The facts are those of transformers' classes."""
    assert _facts(from_hf(PUBLISHED[name])) == facts


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_exporters_write_of_every_model_changes_nothing(name: str) -> None:
    """Nulls, and defaults of all models that transformers 4 wrote into configs."""
    more = {
        "_name_or_path": "", "add_cross_attention": False, "is_decoder": False, "num_labels": 2,
        "id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "problem_type": None, "pruned_heads": {},
        "transformers_version": "4.38.0", "finetuning_task": None, "torchscript": False,
    }  # fmt: skip
    config = PUBLISHED[name]
    empty = dict.fromkeys(("quantization_config", "rope_scaling", "rope_parameters", "layer_types"))
    assert from_hf(empty | more | config) == from_hf(config)
