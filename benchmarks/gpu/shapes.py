"""Model shapes as data: folders that servers load with random weights, and the bytes and FLOPs that
a step of such a model cannot do without.

    bytes of a step = weights that every step reads + KV of the tokens that it looks back on
    FLOPs of a step = 2 * weights * tokens + 4 * heads * head_dim * layers * (tokens looked back on)

The embedding is looked up, not read, so it counts only where it is the output layer too. A prompt
token looks back on itself and all before it. Of a mixture a step reads at least the experts of one
token: how many it hits depends on the tokens, and is reported beside. KV writes, activations and
logits are left out: they are small, and a limit may be too low but not too high.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

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


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Experts of a layer; `chosen` and the shared one are a token's; the first layers are dense."""

    experts: int
    chosen: int
    ffn: int
    shared_ffn: int = 0
    dense_layers: int = 0

    def weights(self, hidden: int) -> int:
        """Of a layer, those that one token goes through; a step cannot read less."""
        return hidden * (self.experts + 3 * (self.chosen * self.ffn + self.shared_ffn))


@dataclasses.dataclass(frozen=True)
class Latent:
    """Latent attention without a latent of q; see `headrace.models.spec.Latent`."""

    rank: int
    plain: int
    rope: int
    value: int

    def weights(self, hidden: int, heads: int) -> int:
        """Of a layer."""
        down = hidden * (heads * (self.plain + self.rope) + self.rank + self.rope)
        return down + heads * ((self.plain + self.value) * self.rank + self.value * hidden)

    @property
    def pair(self) -> int:
        """Multiplications of one head for a token and one that it looks back on."""
        return self.plain + self.rope + self.value


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of one model; `item_bytes`: of a weight and of a KV element."""

    name: str
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    item_bytes: int = 2
    mixture: Mixture | None = None
    latent: Latent | None = None

    @property
    def layer_weights(self) -> int:
        """Matrix elements of all layers that one token goes through."""
        if self.latent is not None:
            attention = self.latent.weights(self.hidden, self.heads)
        else:
            attention = self.hidden * (2 * self.heads + 2 * self.kv_heads) * self.head_dim
        dense = self.layers if self.mixture is None else self.mixture.dense_layers
        found = self.layers * attention + dense * 3 * self.hidden * self.ffn
        if self.mixture is not None:
            found += (self.layers - dense) * self.mixture.weights(self.hidden)
        return found

    @property
    def head_weights(self) -> int:
        """Elements of the output layer."""
        return self.vocab * self.hidden

    @property
    def weight_bytes(self) -> int:
        """What every step reads."""
        return (self.layer_weights + self.head_weights) * self.item_bytes

    @property
    def kv_token_bytes(self) -> int:
        """K and V of one token in all layers."""
        lines = 1 if self.latent is not None else 2
        return lines * self.layers * self.kv_heads * self.head_dim * self.item_bytes

    def step_bytes(self, context_tokens: int, experts_hit: float = 0.0) -> float:
        """Of a step whose rows together look back on `context_tokens` tokens of the KV cache.

        `experts_hit`: routed experts that a layer read, on average; 0 = those of one token.
        """
        found = self.weight_bytes + context_tokens * self.kv_token_bytes
        if self.mixture is None or not experts_hit:
            return found
        more = (experts_hit - self.mixture.chosen) * 3 * self.mixture.ffn * self.hidden
        return found + more * (self.layers - self.mixture.dense_layers) * self.item_bytes

    def step_flops(self, tokens: int, rows: int, pairs: int) -> int:
        """Of a step of `tokens` tokens that draws for `rows` rows; `pairs`: (token, token it
        looks back on)."""
        linear = 2 * (tokens * self.layer_weights + rows * self.head_weights)
        width = 2 * self.head_dim if self.latent is None else self.latent.pair
        return linear + 2 * pairs * self.heads * width * self.layers


def shape_of(name: str) -> Shape:
    """Raises KeyError for an unknown name."""
    config, mixture, latent = CONFIGS[name], None, None
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    kv_heads = config["num_key_value_heads"]
    if "kv_lora_rank" in config:
        keys = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        latent = Latent(*(config[key] for key in keys))
        kv_heads, head_dim = 1, latent.rank + latent.rope  # of what the cache keeps
    if "moe_intermediate_size" in config:
        ffn = config["moe_intermediate_size"]
        mixture = Mixture(
            config.get("num_experts") or config["n_routed_experts"],
            config["num_experts_per_tok"],
            ffn,
            shared_ffn=ffn * config.get("n_shared_experts", 0),
            dense_layers=config.get("first_k_dense_replace", 0),
        )
    return Shape(
        name=name,
        hidden=config["hidden_size"],
        ffn=config["intermediate_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=config["vocab_size"],
        mixture=mixture,
        latent=latent,
    )


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
