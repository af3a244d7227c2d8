"""Whether a checkpoint has the tensors that its config asks for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from headrace.errors import ModelError
from headrace.models.registry import family_of
from headrace.models.slots import Slot
from headrace.models.spec import ModelSpec
from headrace.runner.checkpoint import PLAIN_DTYPES, RawCheckpoint
from headrace.runner.named import fold

# Buffers that older exporters saved; they follow from the config.
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
_LOOKED_AT = 64  # rows of a tied output layer
_OUTPUT_LAYER = ("lm_head.weight", "output.weight")  # a copy of the embedding when tied


def checked(
    spec: ModelSpec, slots: list[Slot], checkpoint: RawCheckpoint, *, tied: bool
) -> dict[str, Slot]:
    """The slots by the names that the checkpoint has for their tensors. `tied`: there is no output
    layer of its own.

    Raises ModelError naming tensors that are missing, unexpected, or of the wrong shape or type,
    and an output layer that is not the embedding that it should be.
    """
    gguf, family = checkpoint.gguf, family_of(spec.architecture)
    stored = {name if gguf else family.name_of(name): name for name in checkpoint.tensors}
    wanted = {slot.gguf if gguf else slot.hf: slot for slot in slots}
    wanted.pop("", None)  # what this kind of checkpoint does not have
    spare = {name for name, slot in wanted.items() if not slot.parameter}
    for name in spare:
        del wanted[name]
    ignored = _OUTPUT_LAYER if tied else ()
    unexpected = {
        stored[name]
        for name in stored.keys() - wanted.keys() - spare
        if family.reads(name) and not name.endswith(_IGNORED_SUFFIXES) and name not in ignored
    }
    missing = wanted.keys() - stored.keys()
    twice = {
        name
        for name in ([] if gguf else checkpoint.tensors)
        if stored[family.name_of(name)] != name and family.name_of(name) in wanted
    }
    problems = [
        f"{len(names)} {what}: {fold(names)}"
        for what, names in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("there under another name too", twice),
        )
        if names
    ]
    misfits: dict[str, list[str]] = defaultdict(list)
    for name in wanted.keys() - missing:
        found, shape = checkpoint.tensors[stored[name]], wanted[name].stored_shape(gguf=gguf)
        if found.shape != shape:
            misfit = f"has shape {list(found.shape)}, the config asks {list(shape)}"
            misfits[misfit].append(stored[name])
        if not gguf and found.dtype not in PLAIN_DTYPES:
            misfits[f"is of type {found.dtype}, which is not supported"].append(stored[name])
    problems += sorted(f"{fold(names)} {misfit}" for misfit, names in misfits.items())
    if tied and not spec.labels and not problems:
        problems += _other_heads(slots, stored, checkpoint)
    if problems:
        raise ModelError("the checkpoint does not fit its config: " + "; ".join(problems))
    return {stored[name]: slot for name, slot in wanted.items()}


def _other_heads(
    slots: list[Slot], stored: Mapping[str, str], checkpoint: RawCheckpoint
) -> list[str]:
    """Output layers that are stored and differ from the embedding that the config says they are, in
    some rows spread over it: transformers would take them, others the embedding."""
    of = next((slot.hf for slot in slots if slot.parameter == "embed.weight"), "")
    found = []
    for head in (name for name in _OUTPUT_LAYER if name in stored and of in stored):
        pair = [checkpoint.tensors[stored[name]] for name in (of, head)]
        rows = range(0, pair[0].shape[0], -(-pair[0].shape[0] // _LOOKED_AT))
        if pair[0] != pair[1] or any(
            _differ(checkpoint, stored[of], stored[head], i) for i in rows
        ):
            found.append(f"{stored[head]} is not the embedding, and tie_word_embeddings = true")
    return found


def _differ(checkpoint: RawCheckpoint, one: str, other: str, row: int) -> bool:
    first, second = (checkpoint.raw(name, row, row + 1) for name in (one, other))
    return bool((first != second).any())
