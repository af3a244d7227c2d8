"""The model in the forms that each peer is fastest or most exact with, made from the one GGUF file.

Q4_0, BF16, F32   by llama-quantize; made once
hf                a folder for vLLM: the dequantised weights in bfloat16, config, tokenizer
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.cpu.peers import run, tool
from headrace.errors import SetupError
from headrace.models.registry import module_of
from headrace.models.spec import ModelSpec, read_spec
from headrace.runner.checkpoint import open_checkpoint
from headrace.runner.weights import load
from headrace.sources.card import ModelCard, read_card
from headrace.sources.files import ModelFiles
from headrace.sources.gguf import read_header
from headrace.text import gguf_tokenizer


def shipped_type(files: ModelFiles) -> str:
    """The type that most matrices of the file have: Q4_1."""
    kinds = [t.dtype for t in open_checkpoint(files).tensors.values() if len(t.shape) > 1]
    return max(set(kinds), key=kinds.count)


def requantised(files: ModelFiles, kind: str, into: Path) -> Path:
    """A GGUF of `kind` from the same weights. Raises SetupError if llama-quantize fails."""
    path = into / "models" / f"{files.path.name.split('.')[0]}.{kind}.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        run([tool(into, "llama-quantize"), "--allow-requantize", files.path, part, kind])
        part.rename(path)
    return path


def hf_folder(files: ModelFiles, into: Path) -> Path:
    """The model as a folder of Hugging Face's kind, in bfloat16."""
    folder = into / "models" / f"{files.path.name.split('.')[0]}.bf16"
    if not (folder / "config.json").exists():
        spec, card = read_spec(files), read_card(files)
        if spec.architecture != "llama":
            raise SetupError(f"no folder for vLLM is made of a {spec.architecture} model")
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors(files, spec), folder / "model.safetensors", {"format": "pt"})
        tokenizer = gguf_tokenizer.build(read_header(files.path).metadata)
        tokenizer.save(str(folder / "tokenizer.json"))
        known = {"tokenizer_class": "PreTrainedTokenizerFast", **card.special_tokens}
        (folder / "tokenizer_config.json").write_text(json.dumps(known))
        (folder / "config.json").write_text(json.dumps(config(spec, card), indent=1))
    return folder


def tensors(files: ModelFiles, spec: ModelSpec) -> dict[str, torch.Tensor]:
    """Every tensor under Hugging Face's name, dequantised, then rounded to bfloat16."""
    module = module_of(spec.architecture)
    model = module.build(spec, torch.bfloat16)
    load(model, module.slots(spec), open_checkpoint(files))
    parameters = dict(model.named_parameters())
    return {
        slot.hf: parameters[slot.parameter][slot.start : slot.start + slot.shape[0]]
        .detach()
        .clone()
        for slot in module.slots(spec)
        if slot.hf
    }


def config(spec: ModelSpec, card: ModelCard) -> dict[str, Any]:
    """config.json of a Llama with plain rotary embedding, the kind of the default model."""
    assert spec.rope.kind == "default", "config.json says plain rotary embedding"
    assert not spec.qkv_bias, "config.json says Llama"
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "num_hidden_layers": spec.layers,
        "hidden_size": spec.hidden,
        "intermediate_size": spec.ffn,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab_rows,
        "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope.theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope.theta},
        "tie_word_embeddings": spec.tied,
        "bos_token_id": card.bos_id,
        "eos_token_id": list(card.eos_ids),
        "torch_dtype": "bfloat16",
    }
