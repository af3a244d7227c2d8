"""GPT-2: layer norms, learned positions, a plain MLP, biases everywhere; its matrices are stored
[in, out] by Hugging Face."""

from __future__ import annotations

from headrace.models import hf
from headrace.models.gguf import known_ids, need_of
from headrace.models.llama import build, matrix
from headrace.models.need import Need, head_width, refuse
from headrace.models.slots import Slot
from headrace.models.spec import LayerSpec, ModelSpec, Rope
from headrace.sources.gguf import Header

__all__ = ["build", "from_gguf", "from_hf", "slots"]


def from_hf(config: hf.Config) -> ModelSpec:
    """See `registry.ModelModule`."""
    need = Need(config, "config.json")
    refuse(
        hf.architecture(config),
        {
            "cross attention": bool(config.get("add_cross_attention")),
            "quantization_config": bool(config.get("quantization_config")),
        },
    )
    layers, heads, hidden = (need.count(key) for key in ("n_layer", "n_head", "n_embd"))
    scale = head_width(hidden, heads) ** -0.5 if config.get("scale_attn_weights", True) else 1.0
    by_layer = bool(config.get("scale_attn_by_inverse_layer_idx"))
    return _spec(
        architecture=hf.architecture(config),
        kinds=tuple(_kind(scale / (i + 1) if by_layer else scale) for i in range(layers)),
        hidden=hidden,
        heads=heads,
        ffn=config.get("n_inner") or 4 * hidden,
        vocab_rows=need.count("vocab_size"),
        vocab_size=need.count("vocab_size"),
        norm_eps=need.number("layer_norm_epsilon"),
        positions=need.count("n_positions"),
        tied=bool(config.get("tie_word_embeddings", True)),
        act=hf.act_of(config, "activation_function", "gelu_new"),
        dtype=hf.dtype_of(config),
    )


def from_gguf(header: Header) -> ModelSpec:
    """See `registry.ModelModule`."""
    need, rows = need_of(header), header.tensors["token_embd.weight"].shape[0]
    hidden, heads = need.count("embedding_length"), need.count("attention.head_count")
    return _spec(
        architecture=header.architecture,
        kinds=(_kind(head_width(hidden, heads) ** -0.5),) * need.count("block_count"),
        hidden=hidden,
        heads=heads,
        ffn=need.count("feed_forward_length"),
        vocab_rows=rows,
        vocab_size=min(known_ids(header) or rows, rows),
        norm_eps=need.number("attention.layer_norm_epsilon"),
        positions=need.count("context_length"),
        tied="output.weight" not in header.tensors,
        act="gelu_tanh",
        dtype="",
    )


def _kind(scale: float) -> LayerSpec:
    return LayerSpec(rope="none", scale=scale)


def _spec(
    *, kinds: tuple[LayerSpec, ...], hidden: int, heads: int, positions: int, **fields: object
) -> ModelSpec:
    fixed: dict[str, object] = {
        "rope": Rope(), "norm": "layer", "norm_bias": True, "qkv_bias": True, "out_bias": True,
        "mlp_bias": True, "gated": False,
    }  # fmt: skip
    sizes: dict[str, object] = {
        "layers": len(kinds), "kinds": kinds, "hidden": hidden, "heads": heads, "kv_heads": heads,
        "head_dim": head_width(hidden, heads), "max_positions": positions,
        "learned_positions": positions,
    }  # fmt: skip
    return ModelSpec(**fixed | sizes | fields)  # type: ignore[arg-type]


def slots(spec: ModelSpec) -> list[Slot]:
    """Every tensor of the checkpoint."""
    hidden = spec.hidden
    shape = spec.learned_positions, hidden
    found = [
        Slot("embed.weight", "wte.weight", "token_embd.weight", (spec.vocab_rows, hidden)),
        Slot("positions.weight", "wpe.weight", "position_embd.weight", shape),
        *_norm("norm", "ln_f", "output_norm", hidden),
    ]
    if not spec.tied:
        shape = spec.vocab_rows, hidden
        found.append(Slot("head.weight", "lm_head.weight", "output.weight", shape))
    for i in range(spec.layers):
        ours, hf_, gguf = f"blocks.{i}.", f"h.{i}.", f"blk.{i}."
        found += _norm(f"{ours}attn_norm", f"{hf_}ln_1", f"{gguf}attn_norm", hidden)
        found += _norm(f"{ours}ffn_norm", f"{hf_}ln_2", f"{gguf}ffn_norm", hidden)
        for our, theirs, short, rows, columns in (
            ("qkv", "attn.c_attn", "attn_qkv", 3 * hidden, hidden),
            ("out", "attn.c_proj", "attn_output", hidden, hidden),
            ("ffn.up", "mlp.c_fc", "ffn_up", spec.ffn, hidden),
            ("ffn.down", "mlp.c_proj", "ffn_down", hidden, spec.ffn),
        ):
            names = ours + our, hf_ + theirs, gguf + short
            found += matrix(*names, (rows, columns), bias=True, transposed=True)
    return found


def _norm(ours: str, hf: str, gguf: str, width: int) -> list[Slot]:
    weight = Slot(f"{ours}.weight", f"{hf}.weight", f"{gguf}.weight", (width,), dummy="ones")
    return [weight, Slot(f"{ours}.bias", f"{hf}.bias", f"{gguf}.bias", (width,))]
