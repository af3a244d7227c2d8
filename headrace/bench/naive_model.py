"""The same weights in transformers: the yardstick that `--engine naive` serves, and the oracle of
the tests. Needs the extra `transformers`.

GGUF files are dequantised here, not by transformers' own GGUF loader.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
)

from headrace.errors import ModelError
from headrace.models.features import features
from headrace.models.registry import module_of
from headrace.models.spec import ModelSpec, Rope, read_spec
from headrace.runner.checkpoint import open_checkpoint
from headrace.runner.pieces import ordered
from headrace.sources.files import ModelFiles

_CONFIGS = {
    "gemma3": Gemma3TextConfig,
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}  # by GGUF architecture
_ITS_OWN = {  # what those configs say beside the plain decoder
    "gemma3": {
        "scaled embedding", "wide norms", "post norms", "q and k norms", "two rotary embeddings",
        "sliding window", "scaled scores", "MLP of gelu_tanh", "soft-capped logits",
    },
    "qwen3": {"q and k norms"},
}  # fmt: skip


def hf_model(files: ModelFiles, dtype: torch.dtype) -> Any:
    """A transformers model in eval mode with the weights of `files`.

    Raises ModelError for a GGUF architecture whose transformers config is not known here.
    """
    if files.kind == "hf":
        return AutoModelForCausalLM.from_pretrained(
            files.path, dtype=dtype, local_files_only=True
        ).eval()
    spec = read_spec(files)
    model = AutoModelForCausalLM.from_config(hf_config(spec), dtype=dtype)
    checkpoint = open_checkpoint(files)
    state = {}
    for slot in module_of(spec.architecture).slots(spec):
        tensor = checkpoint.read(slot.gguf, 0, slot.shape[0])
        if not slot.hf:  # rope_freqs.weight: transformers has no tensor for it
            model.model.rotary_emb.inv_freq /= tensor
            continue
        ours = ordered(tensor, slot.gguf_order) - slot.hf_shift
        theirs = ordered(ours, tuple(int(i) for i in np.argsort(slot.hf_order)))
        state[slot.hf] = (theirs.t() if slot.hf_transposed else theirs).to(dtype)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected, f"names that transformers does not know: {unexpected}"
    assert set(missing) <= ({"lm_head.weight"} if spec.tied else set()), f"not set: {missing}"
    return model.eval()


def hf_config(spec: ModelSpec) -> Any:
    """The transformers config of a GGUF model. It names no stop token: callers of generate() do."""
    more = sorted(set(features(spec)) - _ITS_OWN.get(spec.architecture, set()))
    if spec.rope.kind not in ("default", "linear", "factors"):
        more.append(f"{spec.rope.kind} rotary embedding")
    if spec.architecture not in _CONFIGS or more:
        what = f" with {', '.join(more)}" * bool(more)
        raise ModelError(f"{spec.architecture}{what}: no transformers config is known for it here")
    rope = _rope(spec.rope)
    own: dict[str, Any] = {}
    if spec.architecture == "gemma3":
        rope, own = _gemma3(spec)
    return _CONFIGS[spec.architecture](
        vocab_size=spec.vocab_rows,
        hidden_size=spec.hidden,
        intermediate_size=spec.ffn,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.max_positions,
        rms_norm_eps=spec.norm_eps,
        rope_parameters=rope,
        tie_word_embeddings=spec.tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **own,
    )


def _rope(rope: Rope) -> dict[str, Any]:
    if rope.kind == "linear":
        return {"rope_type": "linear", "rope_theta": rope.theta, "factor": rope.factor}
    return {"rope_type": "default", "rope_theta": rope.theta}


def _gemma3(spec: ModelSpec) -> tuple[dict[str, Any], dict[str, Any]]:
    """Its two rotary embeddings, and what other configs do not have."""
    assert spec.local_rope is not None, "Gemma 3 has two"
    layers = spec.every_layer()
    rope = {"full_attention": _rope(spec.rope), "sliding_attention": _rope(spec.local_rope)}
    return rope, {
        "layer_types": [
            "sliding_attention" if layer.rope == "local" else "full_attention" for layer in layers
        ],
        "sliding_window": max(layer.window for layer in layers) or spec.max_positions,
        "query_pre_attn_scalar": layers[0].scale ** -2 if layers[0].scale else spec.head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": spec.logit_softcap or None,
        "attn_logit_softcapping": None,
    }
