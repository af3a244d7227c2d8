"""Model shapes as data: folders that servers load with random weights. What a step of such a model
cannot do without, `headrace.models.shape` says.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headrace.models.shape import Shape
from headrace.models.shape import shape_of as shape_of_spec
from headrace.models.spec import from_hf

_COMMON: dict[str, Any] = {
    "hidden_act": "silu",
    "use_sliding_window": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "use_cache": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
}
_QWEN2 = _COMMON | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2.5-14b": _QWEN2
    | {
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "vocab_size": 152064,
        "rope_theta": 1e6,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": _COMMON
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "rope_theta": 1e6,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
        "attention_bias": False,
    },
    "deepseek-v2-lite": _COMMON
    | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": 102400,
        "rope_theta": 1e4,
        "max_position_embeddings": 163840,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
        },
        "tie_word_embeddings": False,
        "attention_bias": False,
    },
    "tiny": _QWEN2  # to try the benchmark itself where there is no GPU
    | {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1024,
        "rope_theta": 1e4,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    },
}


def shape_of(name: str) -> Shape:
    """Raises KeyError for an unknown name."""
    return shape_of_spec(from_hf(CONFIGS[name]), name)


def write_folder(name: str, root: Path, *, tokenizer: bool = False) -> Path:
    """A model folder for `--load-format dummy`: config.json, and a tokenizer if asked for.

    The tokenizer gives every id a text of its own, so that a server streams one chunk a token.
    Raises KeyError for an unknown name.
    """
    config = CONFIGS[name]
    folder = root / (name + ("-text" if tokenizer else ""))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    if tokenizer and not (folder / "tokenizer.json").exists():
        _write_tokenizer(folder, config["vocab_size"])
    return folder


def _write_tokenizer(folder: Path, size: int) -> None:
    """A byte-level BPE without merges: 256 bytes, then one made-up word an id."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = characters + [f"Ġw{i:x}" for i in range(len(characters), size)]
    vocab = {word: i for i, word in enumerate(words)}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"), pretty=False)
    facts = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONFIGS["qwen2.5-14b"]["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(facts) + "\n")
