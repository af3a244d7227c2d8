"""MPT: ALiBi instead of positions, layer norms and matrices without bias, a plain MLP."""

from __future__ import annotations

from headrace.models import hf
from headrace.models.gguf import known_ids, need_of
from headrace.models.llama import build, norm_slot
from headrace.models.need import Need, head_width, refuse
from headrace.models.slots import Slot
from headrace.models.spec import LayerSpec, ModelSpec, Rope
from headrace.sources.gguf import Header

__all__ = ["build", "from_gguf", "from_hf", "slots"]


def from_hf(config: hf.Config) -> ModelSpec:
    """See `registry.ModelModule`."""
    need, attention = Need(config, "config.json"), config.get("attn_config") or {}
    kind = attention.get("attn_type", "multihead_attention")
    norm = config.get("norm_type") or "layernorm"
    refuse(
        hf.architecture(config),
        {
            f"attn_type = {kind}": kind != "multihead_attention",
            "no ALiBi": not attention.get("alibi", True),
            "qk_ln": bool(attention.get("qk_ln")),
            "prefix_lm": bool(attention.get("prefix_lm")),
            "biases (no_bias = false)": not config.get("no_bias", True),
            f"norm_type = {norm}": not norm.endswith("layernorm"),
            "logit_scale": config.get("logit_scale") is not None,
            "quantization_config": bool(config.get("quantization_config")),
        },
    )
    hidden, heads = need.count("d_model"), need.count("n_heads")
    return _spec(
        architecture=hf.architecture(config),
        layers=need.count("n_layers"),
        hidden=hidden,
        heads=heads,
        ffn=int(config.get("expansion_ratio", 4)) * hidden,
        vocab_rows=need.count("vocab_size"),
        vocab_size=need.count("vocab_size"),
        norm_eps=need.number("layer_norm_epsilon", 1e-5),
        max_positions=need.count("max_seq_len"),
        tied=bool(config.get("tie_word_embeddings", True)),
        dtype=hf.dtype_of(config),
        qkv_clip=float(attention.get("clip_qkv") or 0.0),
        alibi=float(attention.get("alibi_bias_max") or 8.0),
        scale=float(attention.get("softmax_scale") or 0.0),
    )


def from_gguf(header: Header) -> ModelSpec:
    """See `registry.ModelModule`."""
    need, rows = need_of(header), header.tensors["token_embd.weight"].shape[0]
    steepest = float(header.get("attention.max_alibi_bias") or 0.0)
    biases = any(name.endswith(".bias") for name in header.tensors)
    learned = "position_embd.weight" in header.tensors
    refuse(
        header.architecture,
        {"no ALiBi": not steepest, "biases": biases, "learned positions": learned},
    )
    return _spec(
        architecture=header.architecture,
        layers=need.count("block_count"),
        hidden=need.count("embedding_length"),
        heads=need.count("attention.head_count"),
        ffn=need.count("feed_forward_length"),
        vocab_rows=rows,
        vocab_size=min(known_ids(header) or rows, rows),
        norm_eps=need.number("attention.layer_norm_epsilon"),
        max_positions=need.count("context_length"),
        tied="output.weight" not in header.tensors,
        dtype="",
        qkv_clip=float(header.get("attention.clamp_kqv") or 0.0),
        alibi=steepest,
        scale=0.0,
    )


def _spec(*, layers: int, hidden: int, heads: int, scale: float, **fields: object) -> ModelSpec:
    fixed: dict[str, object] = {
        "rope": Rope(), "norm": "layer", "qkv_bias": False, "gated": False, "act": "gelu",
    }  # fmt: skip
    sizes: dict[str, object] = {
        "layers": layers, "kinds": (LayerSpec(rope="none", scale=scale),) * layers,
        "hidden": hidden, "heads": heads, "kv_heads": heads, "head_dim": head_width(hidden, heads),
    }  # fmt: skip
    return ModelSpec(**fixed | sizes | fields)  # type: ignore[arg-type]


def slots(spec: ModelSpec) -> list[Slot]:
    """Every tensor of the checkpoint."""
    hidden, vocabulary = spec.hidden, (spec.vocab_rows, spec.hidden)
    found = [
        Slot("embed.weight", "wte.weight", "token_embd.weight", vocabulary),
        norm_slot("norm", "norm_f", "output_norm", hidden),
    ]
    if not spec.tied:
        found.append(Slot("head.weight", "lm_head.weight", "output.weight", vocabulary))
    for i in range(spec.layers):
        ours, hf_, gguf = f"blocks.{i}.", f"blocks.{i}.", f"blk.{i}."
        found.append(norm_slot(f"{ours}attn_norm", f"{hf_}norm_1", f"{gguf}attn_norm", hidden))
        found.append(norm_slot(f"{ours}ffn_norm", f"{hf_}norm_2", f"{gguf}ffn_norm", hidden))
        for our, theirs, short, shape in (
            ("qkv", "attn.Wqkv", "attn_qkv", (3 * hidden, hidden)),
            ("out", "attn.out_proj", "attn_output", (hidden, hidden)),
            ("ffn.up", "ffn.up_proj", "ffn_up", (spec.ffn, hidden)),
            ("ffn.down", "ffn.down_proj", "ffn_down", (hidden, spec.ffn)),
        ):
            names = f"{ours}{our}.weight", f"{hf_}{theirs}.weight", f"{gguf}{short}.weight"
            found.append(Slot(*names, shape))
    return found
