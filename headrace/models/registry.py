"""Which module computes which architecture. Imported on use; add a line, or call `register`.

A module offers `from_hf` and `from_gguf` (what a config says), `slots(spec)` (where each checkpoint
tensor goes) and `build(spec, dtype)`. It imports torch in `build` alone: specs are read without.
"""

from __future__ import annotations

import fnmatch
import importlib
import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, cast

import msgspec

from headrace.errors import ModelError
from headrace.extras import install
from headrace.models.slots import Derived, Slot
from headrace.sources.labels import CLASSIFIER

if TYPE_CHECKING:
    import torch

    from headrace.models.layers import Decoder
    from headrace.models.spec import ModelSpec
    from headrace.sources.gguf import Header


class Family(msgspec.Struct, frozen=True):
    """`module` is imported when a model of the family is read.

    Checkpoints of one family do not all name their tensors alike: names in a Hugging Face folder
    that begin with the first of a pair in `renamed` are taken to begin with the second, for the
    first pair that fits. Those that then match a pattern in `unused` are not read.
    """

    module: str
    renamed: tuple[tuple[str, str], ...] = ()
    unused: tuple[str, ...] = ()

    def name_of(self, stored: str) -> str:
        """The name that slots have for a tensor of a Hugging Face folder."""
        for old, new in self.renamed:
            if stored.startswith(old):
                return new + stored.removeprefix(old)
        return stored

    def reads(self, name: str) -> bool:
        """Whether a tensor of that name is part of what is computed."""
        return not any(fnmatch.fnmatchcase(name, pattern) for pattern in self.unused)


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


# Checkpoints saved from a model without its head, as those of many embedding models are.
_BARE = tuple((f"{part}.", f"model.{part}.") for part in ("embed_tokens", "layers", "norm"))

_GLM = Family("headrace.models.glm", renamed=_BARE)
_GEMMA = Family("headrace.models.gemma", renamed=_BARE)
_GPT2 = Family(
    "headrace.models.gpt2",
    renamed=(("transformer.", ""),),
    unused=("h.*.attn.bias", "h.*.attn.masked_bias"),  # causal masks of older exporters
)
_LLAMA = Family("headrace.models.llama", renamed=_BARE)
_MPT = Family("headrace.models.mpt", renamed=(("transformer.", ""),))
_QWEN2 = Family("headrace.models.qwen2", renamed=_BARE)
_QWEN3 = Family("headrace.models.qwen3", renamed=_BARE)
_TEXT_OF_GEMMA3 = Family(
    "headrace.models.gemma",
    renamed=(
        ("model.language_model.", "model."),
        ("language_model.model.", "model."),
        ("language_model.lm_head.", "lm_head."),
        ("model.vision_tower.", "vision_tower."),
        ("model.multi_modal_projector.", "multi_modal_projector."),
    ),
    unused=("vision_tower.*", "multi_modal_projector.*"),
)
_FOREIGN = Family(
    "headrace.models.foreign",
    renamed=(("embed_out.", "lm_head."),),
    unused=tuple(  # causal masks of older exporters
        f"*.{module}.{buffer}"
        for module in ("attention", "attn")
        for buffer in ("bias", "masked_bias", "causal_mask")
    ),
)
_DEEPSEEK = Family("headrace.models.deepseek")
_GEMMA3N = msgspec.structs.replace(
    _TEXT_OF_GEMMA3,
    module="headrace.models.gemma3n",
    unused=(
        *(f"model.{part}.*" for part in ("audio_tower", "embed_audio", "embed_vision")),
        *_TEXT_OF_GEMMA3.unused,
    ),
)
_FAMILIES = {
    "DeepseekV2ForCausalLM": _DEEPSEEK,
    "DeepseekV3ForCausalLM": _DEEPSEEK,
    "GPT2LMHeadModel": _GPT2,
    "Gemma2ForCausalLM": _GEMMA,
    "Gemma3ForCausalLM": _GEMMA,
    "Gemma3ForConditionalGeneration": _TEXT_OF_GEMMA3,
    "Gemma3nForCausalLM": _GEMMA3N,
    "Gemma3nForConditionalGeneration": _GEMMA3N,
    "GemmaForCausalLM": _GEMMA,
    "Glm4ForCausalLM": _GLM,
    "GlmForCausalLM": _GLM,
    "GptOssForCausalLM": Family("headrace.models.gpt_oss"),
    "LlamaForCausalLM": _LLAMA,
    "MPTForCausalLM": _MPT,  # as MosaicML's own checkpoints spell it
    "MistralForCausalLM": _LLAMA,
    "MixtralForCausalLM": Family("headrace.models.mixtral", renamed=_BARE),
    "MptForCausalLM": _MPT,
    "Qwen2ForCausalLM": _QWEN2,
    "Qwen3ForCausalLM": _QWEN3,
    "Qwen3MoeForCausalLM": Family("headrace.models.qwen3_moe", renamed=_BARE),
    # GGUF
    "gemma": _GEMMA,
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "gemma3n": _GEMMA3N,
    "gpt2": _GPT2,
    "llama": _LLAMA,
    "mpt": _MPT,
    "qwen2": _QWEN2,
    "qwen3": _QWEN3,
}


def register(architecture: str, family: Family) -> None:
    """Serve `architecture` (as config.json or the GGUF file spells it) with `family.module`."""
    _FAMILIES[architecture] = family


def family_of(architecture: str) -> Family:
    """Also of a model of a family that has a classification head instead of an output layer.

    Raises ModelError listing what is known.
    """
    family = _FAMILIES.get(architecture.replace(CLASSIFIER, "ForCausalLM"))
    if family is None and _in_transformers(architecture):
        return _FOREIGN
    if family is None:
        known = ", ".join(sorted(_FAMILIES))
        more = "" if _installed() else f"; others need transformers: {install('transformers')}"
        raise ModelError(f"architecture {architecture!r} is not supported; known: {known}{more}")
    return family


def foreign(architecture: str) -> bool:
    """Its layers are transformers'. Raises ModelError for an unknown architecture."""
    return family_of(architecture) is _FOREIGN


def _installed() -> bool:
    return importlib.util.find_spec("transformers") is not None


def _in_transformers(architecture: str) -> bool:
    """transformers is here and has it as a decoder of text."""
    if not architecture.endswith("ForCausalLM") or not _installed():
        return False
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    return architecture in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def module_of(architecture: str) -> ModelModule:
    """The module, imported. Raises ModelError for an unknown architecture."""
    return cast(ModelModule, importlib.import_module(family_of(architecture).module))


def own_layers(spec: ModelSpec) -> bool:
    """The family builds other layers than `layers.Block`: its spec does not say all of them."""
    plain = importlib.import_module("headrace.models.llama").build
    return module_of(spec.architecture).build is not plain


def derived_of(spec: ModelSpec) -> list[Derived]:
    """What the family's `derived(spec)` says, if it has one: tensors that its slots name and that
    Hugging Face checkpoints have in another shape."""
    find = getattr(module_of(spec.architecture), "derived", None)
    found: list[Derived] = [] if find is None else find(spec)
    return found


def slots_of(spec: ModelSpec) -> list[Slot]:
    """Every checkpoint tensor of a model and where it goes, its classification head's too."""
    slots = module_of(spec.architecture).slots(spec)
    if spec.labels:
        shape = (spec.labels, spec.hidden)
        slots.append(Slot("classifier.weight", "score.weight", "", shape))
    return slots
