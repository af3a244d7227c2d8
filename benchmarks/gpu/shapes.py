"""Model shapes as data: folders that servers load with random weights, and the bytes and FLOPs that
a step of such a model cannot do without.

    bytes of a step = weights that every step reads + KV of the tokens that it looks back on
    FLOPs of a step = 2 * weights * tokens + 4 * heads * head_dim * layers * (tokens looked back on)

The embedding is looked up, not read, so it counts only where it is the output layer too. A prompt
token looks back on itself and all before it. KV writes, activations and logits are left out: they
are small, and a limit may be too low but not too high.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

_QWEN2: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
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

    @property
    def layer_weights(self) -> int:
        """Matrix elements of all layers."""
        qkv = self.hidden * (self.heads + 2 * self.kv_heads) * self.head_dim
        out = self.heads * self.head_dim * self.hidden
        return self.layers * (qkv + out + 3 * self.hidden * self.ffn)

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
        return 2 * self.layers * self.kv_heads * self.head_dim * self.item_bytes

    def step_bytes(self, context_tokens: int) -> int:
        """Of a step whose rows together look back on `context_tokens` tokens of the KV cache."""
        return self.weight_bytes + context_tokens * self.kv_token_bytes

    def step_flops(self, tokens: int, rows: int, pairs: int) -> int:
        """Of a step of `tokens` tokens that draws for `rows` rows; `pairs`: (token, token it
        looks back on)."""
        linear = 2 * (tokens * self.layer_weights + rows * self.head_weights)
        return linear + 4 * pairs * self.heads * self.head_dim * self.layers


def shape_of(name: str) -> Shape:
    """Raises KeyError for an unknown name."""
    config = CONFIGS[name]
    return Shape(
        name=name,
        hidden=config["hidden_size"],
        ffn=config["intermediate_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["hidden_size"] // config["num_attention_heads"],
        vocab=config["vocab_size"],
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
