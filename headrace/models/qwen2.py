"""Qwen2 and Qwen2.5: Llama's shape with a bias on q, k and v."""

from __future__ import annotations

import torch

from headrace.models.layers import Decoder
from headrace.models.llama import decoder_slots
from headrace.models.slots import Slot
from headrace.models.spec import ModelSpec


def slots(spec: ModelSpec) -> list[Slot]:
    """Every tensor of the checkpoint. GGUF keeps q and k as they are for this architecture."""
    return decoder_slots(spec, interleaved=False)


def build(spec: ModelSpec, dtype: torch.dtype) -> Decoder:
    """The model with unset parameters."""
    return Decoder(spec, dtype)
