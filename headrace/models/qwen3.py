"""Qwen3: Llama's shape with a norm on each head of q and k; a window in the upper layers."""

from __future__ import annotations

from typing import Any

from headrace.models import gguf, hf
from headrace.models.llama import build, decoder_slots
from headrace.models.need import refuse
from headrace.models.qwen2 import kinds_of
from headrace.models.slots import Slot
from headrace.models.spec import ModelSpec
from headrace.sources.gguf import Header

__all__ = ["build", "from_gguf", "from_hf", "slots"]

# What configs leave out, for it is their class's default.
_DEFAULTS: dict[str, Any] = {"head_dim": 128, "num_key_value_heads": 32}


def from_hf(config: hf.Config) -> ModelSpec:
    """See `registry.ModelModule`."""
    fields = hf.decoder_fields(_DEFAULTS | dict(config))
    bias = bool(config.get("attention_bias"))
    more = {"qk_norm": True, "qkv_bias": bias, "out_bias": bias}
    return ModelSpec(**fields | more | {"kinds": kinds_of(config, fields)})


def from_gguf(header: Header) -> ModelSpec:
    """See `registry.ModelModule`."""
    window = bool(header.get("attention.sliding_window"))
    refuse(header.architecture, {"a sliding window": window})
    return ModelSpec(**gguf.decoder_fields(header) | {"qk_norm": True})


def slots(spec: ModelSpec) -> list[Slot]:
    """Every tensor of the checkpoint. GGUF keeps q and k as they are for this architecture."""
    return decoder_slots(spec)
