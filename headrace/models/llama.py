"""Llama and models of its shape (Mistral without a window): names of the tensors."""

from __future__ import annotations

import torch

from headrace.models.layers import Decoder
from headrace.models.slots import Slot
from headrace.models.spec import ModelSpec


def slots(spec: ModelSpec) -> list[Slot]:
    """Every tensor of the checkpoint. GGUF stores q and k as interleaved rotary pairs."""
    return decoder_slots(spec, interleaved=True)


def build(spec: ModelSpec, dtype: torch.dtype) -> Decoder:
    """The model with unset parameters."""
    return Decoder(spec, dtype)


def decoder_slots(spec: ModelSpec, *, interleaved: bool) -> list[Slot]:
    """The name-folding table of a decoder with fused qkv and gate_up."""
    hidden, vocabulary = spec.hidden, (spec.vocab_rows, spec.hidden)
    found = [
        Slot("embed.weight", "model.embed_tokens.weight", "token_embd.weight", vocabulary),
        Slot("norm.weight", "model.norm.weight", "output_norm.weight", (hidden,), dummy="ones"),
    ]
    if not spec.tied:
        found.append(Slot("head.weight", "lm_head.weight", "output.weight", vocabulary))
    if spec.rope.kind == "factors":
        shape = (spec.head_dim // 2,)
        found.append(Slot("rotary.factors", "", "rope_freqs.weight", shape, dummy="ones"))
    for layer in range(spec.layers):
        found += _block_slots(spec, layer, interleaved)
    return found


def _block_slots(spec: ModelSpec, layer: int, interleaved: bool) -> list[Slot]:
    ours, hf, gguf = f"blocks.{layer}.", f"model.layers.{layer}.", f"blk.{layer}."
    q_rows, kv_rows = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    hidden, ffn = spec.hidden, spec.ffn
    found = [
        Slot(ours + our + ".weight", hf + theirs + ".weight", gguf + short + ".weight", shape, at)
        for our, theirs, short, shape, at in (
            ("out", "self_attn.o_proj", "attn_output", (hidden, q_rows), 0),
            ("ffn.gate_up", "mlp.gate_proj", "ffn_gate", (ffn, hidden), 0),
            ("ffn.gate_up", "mlp.up_proj", "ffn_up", (ffn, hidden), ffn),
            ("ffn.down", "mlp.down_proj", "ffn_down", (hidden, ffn), 0),
        )
    ]
    for our, theirs, short in (
        ("attn_norm", "input_layernorm", "attn_norm"),
        ("ffn_norm", "post_attention_layernorm", "ffn_norm"),
    ):
        names = (f"{ours}{our}.weight", f"{hf}{theirs}.weight", f"{gguf}{short}.weight")
        found.append(Slot(*names, (hidden,), dummy="ones"))
    for letter, rows, start, heads in (
        ("q", q_rows, 0, spec.heads),
        ("k", kv_rows, q_rows, spec.kv_heads),
        ("v", kv_rows, q_rows + kv_rows, 0),
    ):
        pairs = heads if interleaved else 0
        for kind, shape in (("weight", (rows, hidden)), ("bias", (rows,))):
            if kind == "weight" or spec.qkv_bias:
                theirs = f"{hf}self_attn.{letter}_proj.{kind}"
                short = f"{gguf}attn_{letter}.{kind}"
                found.append(Slot(f"{ours}qkv.{kind}", theirs, short, shape, start, pairs))
    return found
