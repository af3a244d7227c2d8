"""Which module computes which architecture. Imported on use; add a line, or call `register`.

A module offers `from_hf` and `from_gguf` (what a config says), `slots(spec)` (where each checkpoint
tensor goes) and `build(spec, dtype)`. It imports torch in `build` alone: specs are read without.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, cast

import msgspec

from headrace.errors import ModelError
from headrace.models.slots import Slot
from headrace.sources.labels import CLASSIFIER

if TYPE_CHECKING:
    import torch

    from headrace.models.layers import Decoder
    from headrace.models.spec import ModelSpec
    from headrace.sources.gguf import Header


class Family(msgspec.Struct, frozen=True):
    """`module` is imported when a model of the family is read.

    Names of its Hugging Face tensors that begin with the first of a pair in `renamed` begin with
    the second instead, the first pair that fits; those that then begin with one of `unused` are
    not read.
    """

    module: str
    renamed: tuple[tuple[str, str], ...] = ()
    unused: tuple[str, ...] = ()


class ModelModule(Protocol):
    """What a module in `headrace/models/` offers."""

    def from_hf(self, config: Mapping[str, Any]) -> ModelSpec:
        """The spec in a config.json; raises ModelError for what the family does not compute."""

    def from_gguf(self, header: Header) -> ModelSpec:
        """The spec in a GGUF header; raises ModelError likewise."""

    def slots(self, spec: ModelSpec) -> list[Slot]:
        """Every checkpoint tensor of the model and where it goes."""

    def build(self, spec: ModelSpec, dtype: torch.dtype) -> Decoder:
        """The model with unset parameters."""


_LLAMA = Family("headrace.models.llama")
_QWEN2 = Family("headrace.models.qwen2")
_FAMILIES = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "llama": _LLAMA,  # GGUF
    "Qwen2ForCausalLM": _QWEN2,
    "qwen2": _QWEN2,  # GGUF
}


def register(architecture: str, family: Family) -> None:
    """Serve `architecture` (as config.json or the GGUF file spells it) with `family.module`."""
    _FAMILIES[architecture] = family


def family_of(architecture: str) -> Family:
    """Also of a model of a family that has a classification head instead of an output layer.

    Raises ModelError listing what is known.
    """
    family = _FAMILIES.get(architecture.replace(CLASSIFIER, "ForCausalLM"))
    if family is None:
        known = ", ".join(sorted(_FAMILIES))
        raise ModelError(f"architecture {architecture!r} is not supported; known: {known}")
    return family


def module_of(architecture: str) -> ModelModule:
    """The module, imported. Raises ModelError for an unknown architecture."""
    return cast(ModelModule, importlib.import_module(family_of(architecture).module))


def slots_of(spec: ModelSpec) -> list[Slot]:
    """Every checkpoint tensor of a model and where it goes, its classification head's too."""
    slots = module_of(spec.architecture).slots(spec)
    if spec.labels:
        shape = (spec.labels, spec.hidden)
        slots.append(Slot("classifier.weight", "score.weight", "", shape))
    return slots
