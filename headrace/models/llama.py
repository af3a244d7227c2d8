"""Llama and models of its shape (Mistral, with its window): config and names of the tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.models import gguf, hf
from headrace.models.need import refuse
from headrace.models.slots import Slot, head_order
from headrace.models.spec import LayerSpec, ModelSpec
from headrace.sources.gguf import Header

if TYPE_CHECKING:
    import torch

    from headrace.models.layers import Decoder

# What configs of Mistral leave out, for it is their class's default.
_MISTRAL: dict[str, Any] = {"sliding_window": 4096, "num_key_value_heads": 8}


def from_hf(config: hf.Config) -> ModelSpec:
    """See `registry.ModelModule`. Llama has biases by two flags, Mistral a window in all layers."""
    experts = config.get("num_local_experts") or config.get("num_experts")
    mistral = hf.architecture(config).startswith("Mistral")
    slides = not mistral and "sliding_attention" in (config.get("layer_types") or ())
    reasons = {"experts": bool(experts), "layers of type sliding_attention": slides}
    refuse(hf.architecture(config), reasons)
    config = _MISTRAL | dict(config) if mistral else config
    fields = hf.decoder_fields(config)
    window = config["sliding_window"] if mistral else None
    sliding = [window is not None] * fields["layers"]
    return ModelSpec(
        **fields
        | {
            "kinds": hf.windows(config, sliding, window, fields["max_positions"]),
            "qkv_bias": bool(config.get("attention_bias")),
            "out_bias": bool(config.get("attention_bias")),
            "mlp_bias": bool(config.get("mlp_bias")),
        }
    )


def from_gguf(header: Header) -> ModelSpec:
    """See `registry.ModelModule`."""
    refuse(header.architecture, {"experts": bool(header.get("expert_count"))})
    fields, window = gguf.decoder_fields(header), header.get("attention.sliding_window") or 0
    hides = 0 < window < fields["max_positions"]
    kinds = (LayerSpec(window=window),) * fields["layers"] if hides else ()
    return ModelSpec(**fields | {"kinds": kinds})


def slots(spec: ModelSpec) -> list[Slot]:
    """Every tensor of the checkpoint. GGUF stores q and k as interleaved rotary pairs."""
    return decoder_slots(spec, gguf_paired=True)


def build(spec: ModelSpec, dtype: torch.dtype) -> Decoder:
    """The model with unset parameters."""
    from headrace.models.layers import Decoder

    return Decoder(spec, dtype)


def decoder_slots(spec: ModelSpec, *, gguf_paired: bool = False, shift: float = 0.0) -> list[Slot]:
    """The name-folding table of a decoder with fused qkv and gate_up, under Llama's names.

    gguf_paired: rotary pairs of GGUF files are neighbours. shift: what is added to the
    norms of a Hugging Face checkpoint.
    """
    vocabulary = (spec.vocab_rows, spec.hidden)
    found = [
        Slot("embed.weight", "model.embed_tokens.weight", "token_embd.weight", vocabulary),
        norm_slot("norm", "model.norm", "output_norm", spec.hidden, shift),
    ]
    if not spec.tied:
        found.append(Slot("head.weight", "lm_head.weight", "output.weight", vocabulary))
    if spec.rope.kind == "factors":
        shape = ((spec.rope.dims or spec.head_dim) // 2,)
        name = "rotaries.global.factors"
        found.append(Slot(name, "", "rope_freqs.weight", shape, dummy="ones"))
    orders = (
        head_order(spec.head_dim, spec.rope.dims),
        head_order(spec.head_dim, spec.rope.dims, paired=gguf_paired),
    )
    for layer in range(spec.layers):
        found += out_slots(spec, layer) + mlp_slots(spec, layer)
        found += norm_slots(spec, layer, shift) + qkv_slots(spec, layer, orders)
    return found


def norm_slot(ours: str, hf: str, gguf: str, width: int, shift: float = 0.0) -> Slot:
    """A norm's weight."""
    names = f"{ours}.weight", f"{hf}.weight", f"{gguf}.weight"
    return Slot(*names, (width,), hf_shift=shift, dummy="ones")


def norm_slots(spec: ModelSpec, layer: int, shift: float) -> list[Slot]:
    """All norms of a layer, those of q and k among them."""
    ours, hf, gguf = f"blocks.{layer}.", f"model.layers.{layer}.", f"blk.{layer}."
    names = [("attn_norm", "input_layernorm", "attn_norm")]
    if spec.post_norms:
        names += [
            ("post_attn_norm", "post_attention_layernorm", "post_attention_norm"),
            ("ffn_norm", "pre_feedforward_layernorm", "ffn_norm"),
            ("post_ffn_norm", "post_feedforward_layernorm", "post_ffw_norm"),
        ]
    else:
        names.append(("ffn_norm", "post_attention_layernorm", "ffn_norm"))
    found = [norm_slot(ours + a, hf + b, gguf + c, spec.hidden, shift) for a, b, c in names]
    shared = spec.layer(layer).kv_from >= 0
    for letter in ("q" if shared else "qk") if spec.qk_norm else "":
        name = f"{ours}attention.{letter}_norm"
        theirs = f"{hf}self_attn.{letter}_norm"
        found.append(norm_slot(name, theirs, f"{gguf}attn_{letter}_norm", spec.head_dim, shift))
    return found


def out_slots(spec: ModelSpec, layer: int) -> list[Slot]:
    """The matrix behind attention."""
    names = f"model.layers.{layer}.self_attn.o_proj", f"blk.{layer}.attn_output"
    shape = (spec.hidden, spec.heads * spec.head_dim)
    return matrix(f"blocks.{layer}.out", *names, shape, bias=spec.out_bias)


def qkv_slots(
    spec: ModelSpec, layer: int, orders: tuple[tuple[int, ...], tuple[int, ...]]
) -> list[Slot]:
    """q, k and v; orders: of the rows of a head of q and k, see `Slot`."""
    ours, hf, gguf = f"blocks.{layer}.", f"model.layers.{layer}.self_attn.", f"blk.{layer}.attn_"
    q_rows, kv_rows = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    found: list[Slot] = []
    for letter, rows, start, heads in (
        ("q", q_rows, 0, spec.heads),
        ("k", kv_rows, q_rows, spec.kv_heads),
        ("v", kv_rows, q_rows + kv_rows, 0),
    )[: 1 if spec.layer(layer).kv_from >= 0 else 3]:
        found += matrix(
            f"{ours}qkv",
            f"{hf}{letter}_proj",
            f"{gguf}{letter}",
            (rows, spec.hidden),
            start,
            bias=spec.qkv_bias,
            heads=heads,
            orders=orders if heads else ((), ()),
        )
    return found


def mlp_slots(spec: ModelSpec, layer: int) -> list[Slot]:
    """gate, up and down."""
    ours, hf, gguf = f"blocks.{layer}.ffn.", f"model.layers.{layer}.mlp.", f"blk.{layer}.ffn_"
    ffn, hidden, bias = spec.layer(layer).ffn or spec.ffn, spec.hidden, spec.mlp_bias
    both = f"{ours}gate_up"
    return [
        *matrix(both, f"{hf}gate_proj", f"{gguf}gate", (ffn, hidden), bias=bias),
        *matrix(both, f"{hf}up_proj", f"{gguf}up", (ffn, hidden), ffn, bias=bias),
        *matrix(f"{ours}down", f"{hf}down_proj", f"{gguf}down", (hidden, ffn), bias=bias),
    ]


def matrix(
    ours: str,
    hf: str,
    gguf: str,
    shape: tuple[int, int],
    start: int = 0,
    *,
    bias: bool = False,
    heads: int = 0,
    orders: tuple[tuple[int, ...], tuple[int, ...]] = ((), ()),
    transposed: bool = False,
) -> list[Slot]:
    """A weight, and its bias if it has one. transposed: Hugging Face stores it [in, out]."""
    names = f"{ours}.weight", f"{hf}.weight", f"{gguf}.weight"
    found = [Slot(*names, shape, start, heads, *orders, hf_transposed=transposed)]
    if bias:
        names = f"{ours}.bias", f"{hf}.bias", f"{gguf}.bias"
        found.append(Slot(*names, shape[:1], start, heads, *orders))
    return found
