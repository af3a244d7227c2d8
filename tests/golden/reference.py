"""The oracle: transformers in fp32 with the same weights; near-ties are named."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from headrace.sources.files import ModelFiles

NEAR_TIE = 1e-4  # two best logits closer than this may swap with the order of float sums

SHAPE: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.3,  # far from uniform logits: few near-ties
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
TINY: dict[str, dict[str, Any]] = {
    "llama-gqa": {"num_key_value_heads": 2},
    "llama-mha": {"num_key_value_heads": 6},
    "llama-mqa-tied": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "llama-wide-heads": {"num_key_value_heads": 3, "head_dim": 16},
    "llama-llama3-rope": {"num_key_value_heads": 2, "rope_parameters": _LLAMA3},
    "llama-linear-rope": {"num_key_value_heads": 2, "rope_parameters": _LINEAR},
    "qwen2": {"num_key_value_heads": 2},
    "qwen2-tied": {"num_key_value_heads": 2, "tie_word_embeddings": True},
}


def tiny_model(name: str, folder: Path, **sizes: int) -> tuple[Any, ModelFiles]:
    """A random model of `TINY`, in eval mode, and its files under `folder`.

    sizes: what differs from it, under transformers' names.
    """
    torch.manual_seed(sum(name.encode()))
    changes = TINY[name] | sizes
    model: Any
    if name.startswith("qwen2"):
        model = Qwen2ForCausalLM(Qwen2Config(**(SHAPE | changes)))
        for layer in model.model.layers:  # transformers starts biases at zero
            for part in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
                torch.nn.init.normal_(part.bias, std=0.5)
    else:
        model = LlamaForCausalLM(LlamaConfig(**(SHAPE | changes)))
    model.eval().save_pretrained(folder)
    return model, ModelFiles(name, "hf", folder)


@dataclasses.dataclass
class Greedy:
    """Greedy tokens and, for each, whether the two best logits were a near-tie."""

    tokens: list[int]
    near_tie: list[bool]


def greedy(model: Any, prompt: list[int], n_tokens: int) -> Greedy:
    """`n_tokens` greedy tokens after `prompt`, end-of-sequence ignored."""
    model.generation_config.eos_token_id = None
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=n_tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = torch.cat(out.logits).float().topk(2).values
    near = best[:, 0] - best[:, 1] < NEAR_TIE
    return Greedy(out.sequences[0, len(prompt) :].tolist(), near.tolist())


def agree(tokens: list[int], expected: Greedy) -> int:
    """How many of the leading tokens were compared: all, or those before the first near-tie that
    went the other way. Raises AssertionError at any other difference."""
    for i, (token, wanted) in enumerate(zip(tokens, expected.tokens, strict=True)):
        if token != wanted:
            assert expected.near_tie[i], f"token {i}: {token}, the reference has {wanted}"
            return i
    return len(tokens)
