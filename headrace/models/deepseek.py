"""DeepSeek-V2 and V3: latent attention, a mixture with shared experts after the first layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.errors import ModelError
from headrace.models import hf, hf_rope
from headrace.models.llama import matrix, mlp_slots, norm_slot
from headrace.models.need import Need, refuse
from headrace.models.qwen3_moe import expert_slots, from_gguf
from headrace.models.slots import Derived, Slot, head_order
from headrace.models.spec import Experts, Latent, LayerSpec, ModelSpec

if TYPE_CHECKING:
    import torch

    from headrace.models.layers import Decoder

__all__ = ["build", "derived", "from_gguf", "from_hf", "slots"]


def from_hf(config: hf.Config) -> ModelSpec:
    """See `registry.ModelModule`."""
    name, need = hf.architecture(config), Need(config, "config.json")
    v3 = name.startswith("DeepseekV3")
    refuse(
        name,
        {
            "attention_bias": bool(config.get("attention_bias")),
            "mlp_bias": bool(config.get("mlp_bias")),
            f"moe_layer_freq = {config.get('moe_layer_freq')}": config.get("moe_layer_freq", 1)
            != 1,
            "rotary pairs of halves": not config.get("rope_interleave", True),
        },
    )
    head_dim = need.count("qk_rope_head_dim")  # of what turns
    fields = hf.decoder_fields({**config, "head_dim": head_dim})
    if need.count("kv_lora_rank") % 2:
        raise ModelError(f"kv_lora_rank = {config['kv_lora_rank']}: an even number is needed")
    latent = Latent(
        kv_rank=need.count("kv_lora_rank"),
        q_rank=config.get("q_lora_rank") or 0,
        plain_dim=need.count("qk_nope_head_dim"),
        rope_dim=head_dim,
        value_dim=need.count("v_head_dim"),
    )
    scale = _scale(config, latent.plain_dim + latent.rope_dim)
    first = int(config.get("first_k_dense_replace") or 0)
    kinds = tuple(
        LayerSpec(attention="latent", mlp="experts" if i >= first else "dense", scale=scale)
        for i in range(fields["layers"])
    )
    more = {
        "kv_heads": 1,
        "head_dim": latent.kv_rank + latent.rope_dim,  # of what the cache keeps
        "rope": msgspec.structs.replace(fields["rope"], dims=latent.rope_dim),
        "latent": latent,
        "experts": _experts(config, need, v3=v3),
        "kinds": kinds,
    }
    return ModelSpec(**fields | more)


def _scale(config: Mapping[str, Any], query_dim: int) -> float:
    """Of the scores: YaRN's magnitude counts here, squared, by `mscale_all_dim`."""
    scaling = hf_rope.scaling_of(config)
    need, grown = Need(scaling, "rope_scaling"), 1.0
    if hf_rope.kind_of(scaling) != "default" and "mscale_all_dim" in scaling:
        grown = hf_rope.magnitude_of(need.number("factor", 1.0), need.number("mscale_all_dim"))
    return float(query_dim**-0.5 * grown * grown)


def _experts(config: Mapping[str, Any], need: Need, *, v3: bool) -> Experts:
    ffn = need.count("moe_intermediate_size")
    method = config.get("topk_method") or ("noaux_tc" if v3 else "greedy")
    grouped = v3 or method == "group_limited_greedy"
    said = "routed_scaling_factor" in config
    refuse(
        hf.architecture(config),
        {
            f"topk_method = {method}": method
            not in (("noaux_tc",) if v3 else ("greedy", "group_limited_greedy")),
        },
    )
    return Experts(
        count=need.count("n_routed_experts"),
        chosen=need.count("num_experts_per_tok"),
        ffn=ffn,
        shared_ffn=ffn * int(config.get("n_shared_experts") or 0),
        scores="sigmoid" if v3 else "softmax",
        # transformers and the model's own code do not divide V2's weights, whatever its config says
        normed=v3 and bool(config.get("norm_topk_prob", True)),
        scaling=need.number("routed_scaling_factor") if v3 or said else 1.0,
        corrected=v3,
        groups=need.count("n_group") if grouped else 1,
        chosen_groups=need.count("topk_group") if grouped else 1,
        group_score="two" if v3 else "best",
    )


def build(spec: ModelSpec, dtype: torch.dtype) -> Decoder:
    """The model with unset parameters."""
    from headrace.models.latent import LatentBlock
    from headrace.models.layers import Decoder

    return Decoder(spec, dtype, LatentBlock)


def slots(spec: ModelSpec) -> list[Slot]:
    """Every tensor of the checkpoint; those of `derived` are made of others."""
    vocabulary = (spec.vocab_rows, spec.hidden)
    found = [
        Slot("embed.weight", "model.embed_tokens.weight", "", vocabulary),
        norm_slot("norm", "model.norm", "", spec.hidden),
    ]
    if not spec.tied:
        found.append(Slot("head.weight", "lm_head.weight", "", vocabulary))
    for layer in range(spec.layers):
        ours, theirs = f"blocks.{layer}.", f"model.layers.{layer}."
        found += _attention_slots(spec, layer)
        found += [
            norm_slot(f"{ours}attn_norm", f"{theirs}input_layernorm", "", spec.hidden),
            norm_slot(f"{ours}ffn_norm", f"{theirs}post_attention_layernorm", "", spec.hidden),
        ]
        if spec.layer(layer).mlp == "dense":
            found += mlp_slots(spec, layer)
            continue
        names = ("gate_proj", "up_proj", "down_proj")
        found += expert_slots(spec, layer, f"{theirs}mlp.", names)
        assert spec.experts is not None, "read by from_hf"
        if spec.experts.corrected:
            name = f"{theirs}mlp.gate.e_score_correction_bias"
            found.append(Slot(f"{ours}routed.correction", name, "", (spec.experts.count,)))
    return found


def _attention_slots(spec: ModelSpec, layer: int) -> list[Slot]:
    """Pairs of the turned parts are neighbours in the checkpoint."""
    latent = spec.latent
    assert latent is not None, "read by from_hf"
    ours, theirs = f"blocks.{layer}.", f"model.layers.{layer}.self_attn."
    inner = f"{ours}latent."
    turned = head_order(latent.rope_dim, paired=True) or tuple(range(latent.rope_dim))

    def order(before: int) -> tuple[int, ...]:
        return (*range(before), *(before + row for row in turned))

    q_rows = spec.heads * (latent.plain_dim + latent.rope_dim)
    of_q, hidden = order(latent.plain_dim), spec.hidden
    q_width = latent.q_rank or q_rows
    line = (latent.kv_rank + latent.rope_dim, hidden)
    up = (spec.heads * (latent.plain_dim + latent.value_dim), latent.kv_rank)
    found = matrix(f"{ours}out", f"{theirs}o_proj", "", (hidden, spec.heads * latent.value_dim))
    found += matrix(f"{inner}kv_up", f"{theirs}kv_b_proj", "", up)
    found.append(norm_slot(f"{inner}kv_norm", f"{theirs}kv_a_layernorm", "", latent.kv_rank))
    found += matrix(
        f"{ours}qkv", f"{theirs}kv_a_proj_with_mqa", "", line, q_width,
        heads=1, orders=(order(latent.kv_rank), ()),
    )  # fmt: skip
    if not latent.q_rank:
        return found + matrix(
            f"{ours}qkv", f"{theirs}q_proj", "", (q_rows, hidden),
            heads=spec.heads, orders=(of_q, ()),
        )  # fmt: skip
    found += matrix(f"{ours}qkv", f"{theirs}q_a_proj", "", (latent.q_rank, hidden))
    found.append(norm_slot(f"{inner}q_norm", f"{theirs}q_a_layernorm", "", latent.q_rank))
    return found + matrix(
        f"{inner}q_up", f"{theirs}q_b_proj", "", (q_rows, latent.q_rank),
        heads=spec.heads, orders=(of_q, ()),
    )  # fmt: skip


def derived(spec: ModelSpec) -> list[Derived]:
    """The shared expert as experts of the routed ones' width."""
    experts = spec.experts
    assert experts is not None, "read by from_hf"
    found = []
    for layer in range(spec.layers):
        if spec.layer(layer).mlp != "experts":
            continue
        shared = f"model.layers.{layer}.mlp.shared_experts."
        for i in range(experts.shared):
            for part in ("gate_proj", "up_proj"):
                name, source = f"{shared}{i}.{part}.weight", f"{shared}{part}.weight"
                shape = (experts.ffn, spec.hidden)
                found.append(Derived(name, source, shape, "rows", i * experts.ffn))
            name, source = f"{shared}{i}.down_proj.weight", f"{shared}down_proj.weight"
            shape = (spec.hidden, experts.ffn)
            found.append(Derived(name, source, shape, "columns", i * experts.ffn))
    return found
