"""Qwen3-MoE: Qwen3's attention (norms of q and k), a mixture of experts in most layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.errors import ModelError
from headrace.models import hf
from headrace.models.llama import decoder_slots, matrix, mlp_slots
from headrace.models.need import Need, refuse
from headrace.models.slots import Slot
from headrace.models.spec import Experts, LayerSpec, ModelSpec
from headrace.sources.gguf import Header

if TYPE_CHECKING:
    import torch

    from headrace.models.layers import Decoder

__all__ = ["build", "expert_slots", "from_gguf", "from_hf", "slots"]


def from_hf(config: hf.Config) -> ModelSpec:
    """See `registry.ModelModule`. There are 4 KV heads where the config does not say."""
    name, need = hf.architecture(config), Need(config, "config.json")
    refuse(
        name,
        {
            "attention_bias": bool(config.get("attention_bias")),
            "a sliding window": bool(config.get("use_sliding_window")),
        },
    )
    fields = hf.decoder_fields({"num_key_value_heads": 4} | dict(config))
    step = int(config.get("decoder_sparse_step") or 1)
    dense = set(config.get("mlp_only_layers") or ())
    routed = [(i + 1) % step == 0 and i not in dense for i in range(fields["layers"])]
    experts = Experts(
        # transformers 5 writes num_local_experts for it
        count=need.count("num_experts" if "num_experts" in config else "num_local_experts"),
        chosen=need.count("num_experts_per_tok"),
        ffn=need.count("moe_intermediate_size"),
        normed=bool(config.get("norm_topk_prob")),
    )
    return ModelSpec(**fields | {"qk_norm": True, "experts": experts, "kinds": kinds_of(routed)})


def kinds_of(routed: list[bool]) -> tuple[LayerSpec, ...]:
    """Layers whose feed-forward is a mixture where `routed` says so."""
    return tuple(LayerSpec(mlp="experts" if experts else "dense") for experts in routed)


def from_gguf(header: Header) -> ModelSpec:
    """See `registry.ModelModule`."""
    raise ModelError(f"{header.architecture} in GGUF files is not supported: use safetensors")


def build(spec: ModelSpec, dtype: torch.dtype) -> Decoder:
    """The model with unset parameters."""
    from headrace.models.layers import Decoder
    from headrace.models.routed import RoutedBlock

    return Decoder(spec, dtype, RoutedBlock)


def slots(spec: ModelSpec) -> list[Slot]:
    """Every tensor of the checkpoint."""
    return routed_slots(spec, decoder_slots(spec), "mlp.", ("gate_proj", "up_proj", "down_proj"))


def routed_slots(
    spec: ModelSpec, plain: list[Slot], module: str, names: tuple[str, str, str]
) -> list[Slot]:
    """`plain` with the dense feed-forward of routed layers replaced by its experts."""
    found: list[Slot] = []
    routed = [i for i in range(spec.layers) if spec.layer(i).mlp == "experts"]
    dense = {slot.parameter for i in routed for slot in mlp_slots(spec, i)}
    found += [slot for slot in plain if slot.parameter not in dense]
    for layer in routed:
        found += expert_slots(spec, layer, f"model.layers.{layer}.{module}", names)
    return found


def expert_slots(
    spec: ModelSpec, layer: int, hf_prefix: str, names: tuple[str, str, str]
) -> list[Slot]:
    """The router, and each expert's three matrices under `names` (gate, up, down)."""
    experts = spec.experts
    assert experts is not None, "a layer of experts, and none in the spec"
    ours, hidden, ffn = f"blocks.{layer}.routed.", spec.hidden, experts.ffn
    gate, up, down = names
    found = matrix(
        f"{ours}router", f"{hf_prefix}gate", "", (experts.count, hidden), bias=experts.biases
    )
    for index in range(experts.total):
        theirs = f"{hf_prefix}experts.{index}."
        if index >= experts.count:
            theirs = f"{hf_prefix}shared_experts.{index - experts.count}."
        first = index * 2 * ffn
        found += [
            Slot(f"{ours}gate_up", f"{theirs}{gate}.weight", "", (ffn, hidden), first),
            Slot(f"{ours}gate_up", f"{theirs}{up}.weight", "", (ffn, hidden), first + ffn),
            Slot(f"{ours}down", f"{theirs}{down}.weight", "", (hidden, ffn), index * hidden),
        ]
    return found
