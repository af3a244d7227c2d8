"""Tiny models written as GGUF the way llama.cpp's converter does: the same tokens as from
safetensors and from transformers (bugs B099)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from headrace.bench.naive_model import hf_model
from headrace.models.registry import module_of
from headrace.models.spec import read_spec
from headrace.sources.files import ModelFiles
from tests.devices import PROCESSORS, load
from tests.golden.families import save
from tests.golden.reference import agree, greedy, tiny_model
from tests.golden.stepping import Job, generate

SETTINGS = {"dtype": "float32", "kv_blocks": 120, "block_size": 8, "threads": 1}


def interleave(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Halves to pairs, as in the converter."""
    shape = rows.shape
    return rows.reshape(heads, 2, shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(shape)


def llama3_factors(config: Any) -> np.ndarray[Any, Any]:
    """What the converter stores as rope_freqs.weight, frequency by frequency."""
    rope = config.rope_parameters
    out = []
    for i in range(0, config.head_dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (i / config.head_dim)
        low = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
        high = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
        if wavelength < high:
            out.append(1.0)
        elif wavelength > low:
            out.append(rope["factor"])
        else:
            smooth = rope["original_max_position_embeddings"] / wavelength
            smooth = (smooth - rope["low_freq_factor"]) / (
                rope["high_freq_factor"] - rope["low_freq_factor"]
            )
            out.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(out, np.float32)


def write_gguf(path: Path, architecture: str, model: Any, hf_files: ModelFiles) -> None:
    """`model` in F32, with llama.cpp's names and order of rows."""
    config, spec = model.config, read_spec(hf_files)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(spec.layers)
    writer.add_context_length(spec.max_positions)
    writer.add_embedding_length(spec.hidden)
    writer.add_feed_forward_length(spec.ffn)
    writer.add_head_count(spec.heads)
    writer.add_head_count_kv(spec.kv_heads)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    writer.add_rope_freq_base(spec.rope.theta)
    writer.add_rope_dimension_count(spec.head_dim)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    if spec.every_layer()[0].window:
        writer.add_sliding_window(spec.every_layer()[0].window)
    if spec.softcap:
        writer.add_attn_logit_softcapping(spec.softcap)
    if spec.logit_softcap:
        writer.add_final_logit_softcapping(spec.logit_softcap)
    if spec.rope.kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(spec.rope.factor)
        writer.add_rope_scaling_orig_ctx_len(spec.rope.original_positions)
        writer.add_float32(f"{architecture}.rope.scaling.yarn_beta_fast", spec.rope.fast)
    if spec.rope.kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(spec.rope.factor)
    if spec.rope.kind == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(config))
    state = model.state_dict()
    for slot in module_of(spec.architecture).slots(spec):
        rows = state[slot.hf].numpy() + np.float32(slot.hf_shift)
        if architecture == "llama" and ".attn_q." in slot.gguf:
            rows = interleave(rows, spec.heads)
        if architecture == "llama" and ".attn_k." in slot.gguf:
            rows = interleave(rows, spec.kv_heads)
        writer.add_tensor(slot.gguf, np.ascontiguousarray(rows))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("llama-gqa", "llama"),
        ("llama-mqa-tied", "llama"),
        ("llama-wide-heads", "llama"),
        ("llama-llama3-rope", "llama"),
        ("llama-linear-rope", "llama"),
        ("qwen2", "qwen2"),
        ("qwen2-tied", "qwen2"),
    ],
)
def test_gguf_equals_transformers(
    tmp_path: Path, name: str, architecture: str, backend: str
) -> None:
    model, files = tiny_model(name, tmp_path)
    path = tmp_path / "model.gguf"
    write_gguf(path, architecture, model, files)
    gguf_files = ModelFiles(name, "gguf", path)
    spec = read_spec(gguf_files)
    assert spec.rope.kind == ("factors" if "llama3" in name else read_spec(files).rope.kind)
    runner = load(backend, gguf_files, **SETTINGS)
    draw = torch.Generator().manual_seed(1)
    for length in (5, 64, 150):  # llama3: half, all and twice the original 64 positions
        prompt = torch.randint(0, 131, (length,), generator=draw).tolist()
        (tokens,) = generate(runner, [Job(prompt, 10, chunk=40)])
        assert agree(tokens, greedy(model, prompt, 10)) == 10
    runner.close()
    with torch.inference_mode():
        ids = torch.tensor([prompt])
        naive = hf_model(gguf_files, torch.float32)(ids).logits
        torch.testing.assert_close(naive, model(ids).logits, rtol=1e-4, atol=1e-4)


OTHERS: dict[str, dict[str, Any]] = {  # architecture, name in FAMILIES -> what the file cannot say
    "llama mistral": {},
    "llama llama-yarn": {},
    "qwen3 qwen3": {"attention_bias": False},
    "gemma2 gemma2": {"query_pre_attn_scalar": 16},
    "gemma3 gemma3": {
        "query_pre_attn_scalar": 16, "num_hidden_layers": 7, "layer_types": None,
    },
}  # fmt: skip


@pytest.mark.parametrize("backend", PROCESSORS, indirect=True, scope="session")
@pytest.mark.parametrize("which", list(OTHERS))
def test_gguf_of_other_families(tmp_path: Path, which: str, backend: str) -> None:
    """bugs B099, B100: windows, yarn and the pattern of layers come from the file's metadata."""
    architecture, name = which.split()
    model, files = save(name, tmp_path, **OTHERS[which])
    path = tmp_path / "model.gguf"
    write_gguf(path, architecture, model, files)
    gguf_files = ModelFiles(name, "gguf", path)
    assert read_spec(gguf_files).kinds == read_spec(files).kinds
    runner = load(backend, gguf_files, **SETTINGS)
    draw = torch.Generator().manual_seed(1)
    prompt = torch.randint(0, 131, (70,), generator=draw).tolist()
    (tokens,) = generate(runner, [Job(prompt, 10, chunk=40)])
    assert agree(tokens, greedy(model, prompt, 10)) == 10
    runner.close()
