"""GLM-4 of both generations: half of each head turns, in pairs of neighbours; biases on q, k and v;
gate and up stored as one matrix; the newer one norms what attention and MLP give."""

from __future__ import annotations

from typing import Any

from headrace.errors import ModelError
from headrace.models import hf
from headrace.models.llama import build, matrix, norm_slot, out_slots, qkv_slots
from headrace.models.slots import Slot, head_order
from headrace.models.spec import ModelSpec
from headrace.sources.gguf import Header

__all__ = ["build", "from_gguf", "from_hf", "slots"]

# What configs leave out, for it is their classes' default.
_DEFAULTS: dict[str, Any] = {
    "partial_rotary_factor": 0.5, "head_dim": 128, "num_key_value_heads": 2,
}  # fmt: skip


def from_hf(config: hf.Config) -> ModelSpec:
    """See `registry.ModelModule`."""
    config = _DEFAULTS | dict(config)
    fields = hf.decoder_fields(config, turns_part=True)
    bias = bool(config.get("attention_bias", True))
    newer = hf.architecture(config).startswith("Glm4")
    return ModelSpec(**fields | {"qkv_bias": bias, "post_norms": newer})


def from_gguf(header: Header) -> ModelSpec:
    """See `registry.ModelModule`. Raises ModelError: no such file names this module."""
    raise ModelError(f"{header.architecture} is not read from GGUF files; Hugging Face folders are")


def slots(spec: ModelSpec) -> list[Slot]:
    """Every tensor of a Hugging Face checkpoint."""
    vocabulary, hidden = (spec.vocab_rows, spec.hidden), spec.hidden
    found = [
        Slot("embed.weight", "model.embed_tokens.weight", "", vocabulary),
        norm_slot("norm", "model.norm", "", hidden),
    ]
    if not spec.tied:
        found.append(Slot("head.weight", "lm_head.weight", "", vocabulary))
    orders = (head_order(spec.head_dim, spec.rope.dims, paired=True), ())
    names = [("attn_norm", "input_layernorm"), ("ffn_norm", "post_attention_layernorm")]
    if spec.post_norms:
        names += [("post_attn_norm", "post_self_attn_layernorm")]
        names += [("post_ffn_norm", "post_mlp_layernorm")]
    for layer in range(spec.layers):
        ours, theirs = f"blocks.{layer}.", f"model.layers.{layer}."
        found += out_slots(spec, layer) + qkv_slots(spec, layer, orders)
        both, down = f"{theirs}mlp.gate_up_proj", f"{theirs}mlp.down_proj"
        found += matrix(f"{ours}ffn.gate_up", both, "", (2 * spec.ffn, hidden))
        found += matrix(f"{ours}ffn.down", down, "", (hidden, spec.ffn))
        found += [norm_slot(ours + our, theirs + their, "", hidden) for our, their in names]
    return found
