"""Configs that are refused, each by the key or the feature that is at fault."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.errors import ModelError
from headrace.models.spec import from_hf
from tests.unit.configs import DEEPSEEK3, GEMMA3, GEMMA3N, GPT2, HF, LISTS, LLAMA3, MPT, QWEN2


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope_scaling": {"rope_type": "mrope", "factor": 4.0}}, "rope scaling 'mrope'"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "long_factor = None"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"hidden_act": "tanh"}, "hidden_act = 'tanh'"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor = 1.5"),
        ({"partial_rotary_factor": 0.5}, "with a partial_rotary_factor is not supported"),
        ({"rope_parameters": {"full_attention": LLAMA3}}, "rope_parameters for full_attention"),
        ({"rope_theta": "1e6"}, "rope_theta = '1e6'"),
        ({"rope_theta": 0}, "rope_theta = 0: a number above 1"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor = 0, above 0"),
        ({"rope_scaling": {"type": "yarn", "factor": [2]}}, r"factor = \[2\], a number"),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "beta_fast": "x"}}, "beta_fast = 'x'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}, "head_dim": 2}, "dynamic' of 2"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "high_freq_factor = 1"),
        ({"rope_scaling": {"type": "longrope"} | LISTS}, "short_factor has 3 numbers, 64 above 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps = nan"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_local_experts": 8}, "experts"),
        ({"layer_types": ["linear_attention"]}, "linear_attention"),
        ({"architectures": ["StrangeForCausalLM"]}, "StrangeForCausalLM.*known: .*LlamaFor"),
        ({"architectures": []}, r"\(none\)"),
        ({"hidden_size": None}, "hidden_size = None"),
        ({"hidden_size": "big"}, "hidden_size = 'big'"),
        ({"num_hidden_layers": 1.5}, "num_hidden_layers = 1.5"),
        ({"num_key_value_heads": 5}, "32 heads do not divide into 5"),
        ({"head_dim": 63}, "head_dim = 63"),
    ],
)
def test_what_is_refused_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        from_hf(HF | changes)


@pytest.mark.parametrize(
    ("config", "changes", "named"),
    [
        (
            HF | {"architectures": ["GemmaForCausalLM"]},
            {"hidden_act": "silu", "hidden_activation": "gelu"},
            "hidden_act = silu and hidden_activation = gelu",
        ),
        (GPT2, {"add_cross_attention": True}, "cross attention"),
        (MPT, {"norm_type": "rmsnorm"}, "norm_type = rmsnorm"),
        (DEEPSEEK3, {"num_experts_per_tok": 257}, "num_experts_per_tok = 257 of 256 experts"),
        (DEEPSEEK3, {"n_group": 7}, "n_group = 7, topk_group = 4"),
        (DEEPSEEK3, {"topk_group": 9}, "n_group = 8, topk_group = 9"),
        (DEEPSEEK3, {"n_group": 256}, "n_group = 256, topk_group = 4: 8 of 256"),
        (DEEPSEEK3, {"num_experts_per_tok": 129}, "129 of 256 experts cannot be chosen so"),
        (DEEPSEEK3, {"kv_lora_rank": 511}, "kv_lora_rank = 511: an even number"),
        (GEMMA3N, {"intermediate_size": [8192] * 34}, "of 34 layers and num_hidden_layers = 35"),
        (GEMMA3N, {"activation_sparsity_pattern": [0.0]}, "pattern of 1 layers and num_hidden"),
        (GEMMA3N, {"altup_active_idx": 4}, "altup_active_idx = 4 of altup_num_inputs = 4"),
        (GPT2, {"n_layer": None}, "n_layer = None"),
        (GPT2, {"n_head": 3}, "3 heads do not divide a hidden size of 64"),
        (MPT, {"n_heads": 128}, "128 heads do not divide a hidden size of 64"),
        (GPT2, {"activation_function": "mish"}, "activation_function = 'mish'"),
        (MPT, {"attn_config": {"alibi": False}}, "no ALiBi"),
        (MPT, {"attn_config": {"qk_ln": True}}, "qk_ln"),
        (MPT, {"no_bias": False}, "biases"),
        (MPT, {"logit_scale": 0.5}, "logit_scale"),
        (MPT, {"logit_scale": "inv_sqrt_d_model"}, "with logit_scale is not supported"),
        (GEMMA3, {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (GEMMA3, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        (GEMMA3, {"layer_types": ["chunked_attention"] * 32}, "chunked_attention"),
        (GEMMA3, {"layer_types": ["full_attention"] * 31}, "31 layers and num_hidden_layers = 32"),
        (GEMMA3, {"layer_types": []}, "0 layers and num_hidden_layers = 32"),
        (GEMMA3, {"sliding_window": None}, "sliding layers and no sliding_window"),
        (
            HF,
            {"layer_types": ["sliding_attention"] * 32, "sliding_window": 64},
            "of type sliding_attention",
        ),
        (
            HF
            | {"architectures": ["MixtralForCausalLM"]}
            | {"num_local_experts": 2, "num_experts_per_tok": 1},
            {"layer_types": ["full_attention"] * 32, "sliding_window": 64},
            "layer_types",
        ),
    ],
)
def test_what_families_refuse(config: dict[str, Any], changes: dict[str, Any], named: str) -> None:
    from_hf(config)
    with pytest.raises(ModelError, match=named):
        from_hf(config | changes)


@pytest.mark.parametrize(
    ("config", "changes", "named"),
    [
        (HF, {"architectures": "LlamaForCausalLM"}, "architectures = 'Llama.*a list of texts"),
        (HF, {"architectures": [3]}, r"architectures = \[3\]"),
        (HF, {"rope_scaling": -1}, "rope_scaling = -1, a mapping"),
        (
            HF,
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": "no"}},
            "g.truncate = 'no'",
        ),
        (HF, {"num_key_value_heads": 0}, "num_key_value_heads = 0, a count"),
        (HF, {"num_key_value_heads": [8]}, r"num_key_value_heads = \[8\], a count"),
        (HF, {"head_dim": "128"}, "head_dim = '128', a count"),
        (HF, {"head_dim": -2}, "head_dim = -2, a count"),
        (HF, {"intermediate_size": "big"}, "intermediate_size = 'big'"),
        (HF, {"intermediate_size": [8] * 32}, "intermediate_size = .8.*a number"),
        (HF, {"tie_word_embeddings": "false"}, "tie_word_embeddings = 'false', true or false"),
        (HF, {"tie_word_embeddings": None}, "tie_word_embeddings = None, true or false"),
        (HF, {"attention_bias": 1}, "attention_bias = 1, true or false"),
        (HF, {"hidden_act": {"a": 1}}, "hidden_act = .*a text"),
        (HF, {"layer_types": [1] * 32}, "layer_types = .*a list of texts"),
        (HF, {"num_attention_heads": float("nan")}, "num_attention_heads = nan"),
        (HF, {"rms_norm_eps": -1}, "rms_norm_eps = -1, a number of 0 or more"),
        (QWEN2, {"sliding_window": 0.5}, "sliding_window = 0.5"),
        (QWEN2, {"sliding_window": "3"}, "sliding_window = '3'"),
        (QWEN2, {"max_window_layers": None}, "max_window_layers = None, a whole number"),
        (GPT2, {"scale_attn_weights": None}, "scale_attn_weights = None"),
        (MPT, {"expansion_ratio": None}, "expansion_ratio = None, a count"),
        (
            GEMMA3N,
            {"rope_parameters": {"full_attention": "x"}},
            "s.full_attention = 'x', a mapping",
        ),
        (MPT, {"attn_config": {"softmax_scale": -1}}, "attn_config.softmax_scale = -1"),
        (DEEPSEEK3, {"first_k_dense_replace": [1]}, r"first_k_dense_replace = \[1\]"),
        (
            GEMMA3N,
            {"activation_sparsity_pattern": 1.0},
            "activation_sparsity_pattern = 1.0, a share",
        ),
        (
            {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": HF},
            {"text_config": HF | {"head_dim": 0.5}},
            "text_config.head_dim = 0.5",
        ),
    ],
)
def test_a_value_of_a_wrong_type_is_named(
    config: dict[str, Any], changes: dict[str, Any], named: str
) -> None:
    from_hf(config)
    with pytest.raises(ModelError, match=named):
        from_hf(config | changes)
