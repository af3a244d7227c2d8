"""Mixtral: Mistral's attention, a mixture of experts in every layer."""

from __future__ import annotations

from typing import Any

from headrace.models import hf
from headrace.models.llama import decoder_slots
from headrace.models.need import Need, refuse
from headrace.models.qwen3_moe import build, from_gguf, routed_slots
from headrace.models.slots import Slot
from headrace.models.spec import Experts, LayerSpec, ModelSpec

__all__ = ["build", "from_gguf", "from_hf", "slots"]


# What configs leave out, for it is their class's default.
_DEFAULTS: dict[str, Any] = {"rope_theta": 1e6, "num_key_value_heads": 8}


def from_hf(config: hf.Config) -> ModelSpec:
    """See `registry.ModelModule`."""
    fields = hf.decoder_fields(_DEFAULTS | dict(config))
    need = Need(config, "config.json")
    window = config.get("sliding_window")
    refuse(hf.architecture(config), {"layer_types": config.get("layer_types") is not None})
    sliding = [window is not None] * fields["layers"]
    windows = hf.windows(config, sliding, window, fields["max_positions"])
    kinds = windows or (LayerSpec(),) * fields["layers"]
    experts = Experts(
        count=need.count("num_local_experts"),
        chosen=need.count("num_experts_per_tok"),
        ffn=fields["ffn"],
    )
    routed = tuple(LayerSpec(mlp="experts", window=kind.window) for kind in kinds)
    return ModelSpec(**fields | {"experts": experts, "kinds": routed})


def slots(spec: ModelSpec) -> list[Slot]:
    """Every tensor of the checkpoint."""
    return routed_slots(spec, decoder_slots(spec), "block_sparse_moe.", ("w1", "w3", "w2"))
