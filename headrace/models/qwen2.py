"""Qwen2 and Qwen2.5: Llama's shape with a bias on q, k and v; a window in the upper layers."""

from __future__ import annotations

from typing import Any

from headrace.models import gguf, hf
from headrace.models.llama import build, decoder_slots
from headrace.models.need import refuse
from headrace.models.slots import Slot
from headrace.models.spec import LayerSpec, ModelSpec
from headrace.sources.gguf import Header

__all__ = ["build", "from_gguf", "from_hf", "slots"]


def from_hf(config: hf.Config) -> ModelSpec:
    """See `registry.ModelModule`. There are 32 KV heads where the config does not say."""
    refuse(hf.architecture(config), {"experts": bool(config.get("num_experts"))})
    fields = hf.decoder_fields({"num_key_value_heads": 32} | dict(config))
    return ModelSpec(**fields | {"qkv_bias": True, "kinds": kinds_of(config, fields)})


def kinds_of(config: hf.Config, fields: dict[str, Any]) -> tuple[LayerSpec, ...]:
    """`sliding_window`, if `use_sliding_window`, in layers from `max_window_layers` on. fields:
    what `hf.decoder_fields` made of the config."""
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    first = config.get("max_window_layers", 28)
    sliding = [window is not None and i >= first for i in range(fields["layers"])]
    return hf.windows(config, sliding, window, fields["max_positions"])


def from_gguf(header: Header) -> ModelSpec:
    """See `registry.ModelModule`."""
    refuse(
        header.architecture,
        {
            "experts": bool(header.get("expert_count")),
            "a sliding window": bool(header.get("attention.sliding_window")),
        },
    )
    return ModelSpec(**gguf.decoder_fields(header) | {"qkv_bias": True})


def slots(spec: ModelSpec) -> list[Slot]:
    """Every tensor of the checkpoint. GGUF keeps q and k as they are for this architecture."""
    return decoder_slots(spec)
