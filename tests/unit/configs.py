"""What config.json of some families says, for tests that read it."""

from __future__ import annotations

from typing import Any

HF: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LISTS = {"short_factor": [1.0, 2.0, 3.0], "long_factor": [1.0] * 64}
GPT2: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"], "n_embd": 64, "n_layer": 3, "n_head": 4,
    "n_positions": 64, "layer_norm_epsilon": 1e-5, "vocab_size": 40,
}  # fmt: skip
MPT: dict[str, Any] = {
    "architectures": ["MptForCausalLM"], "d_model": 64, "n_layers": 2, "n_heads": 4,
    "max_seq_len": 64, "vocab_size": 40,
}  # fmt: skip
GEMMA3 = HF | {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 512}
QWEN2 = HF | {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True}
GEMMA3N: dict[str, Any] = {"architectures": ["Gemma3nForCausalLM"]}
DEEPSEEK3 = HF | {
    "architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 512, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256,
    "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1, "n_group": 8,
    "topk_group": 4, "routed_scaling_factor": 2.5, "first_k_dense_replace": 3,
}  # fmt: skip
