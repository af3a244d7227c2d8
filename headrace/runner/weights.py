"""Fills a model's parameters from a checkpoint, or at random, in the target dtype.

Weights pass in pieces of a few megabytes; the whole model exists once. Pieces for a processor are
read one after another, those for a device by several threads (`upload`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from headrace.backends.cpu.device import cores
from headrace.errors import ModelError
from headrace.models.layers import Decoder
from headrace.models.registry import family_of
from headrace.models.slots import Slot
from headrace.runner.checkpoint import Checkpoint, SafetensorsFolder
from headrace.runner.pieces import pieces
from headrace.runner.upload import upload

Progress = Callable[[int, int], None]  # (bytes loaded, bytes in all)

_UPLOAD_THREADS = 8  # more than one card's link can take from memory
_SHOWN = 8  # names in an error message
_DUMMY_SEED = 0
_DUMMY_STD = 0.02

# Buffers that older exporters saved; they follow from the config.
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
_OUTPUT_LAYER = ("lm_head.weight", "output.weight")  # a copy of the embedding when tied


def load(
    model: Decoder, slots: list[Slot], checkpoint: Checkpoint, progress: Progress | None = None
) -> None:
    """Set every parameter of `model`, wherever they are; `progress` hears of every piece.

    Raises ModelError naming tensors that are missing, unexpected or of the wrong shape.
    """
    by_name = checked(model, slots, checkpoint)
    _map(model, by_name, checkpoint)
    parameters = dict(model.named_parameters())
    todo = [
        piece
        for name, slot in by_name.items()
        for piece in pieces(slot, name, gguf=checkpoint.gguf)
    ]
    done_bytes, total_bytes = 0, sum(p.numel() * p.element_size() for p in parameters.values())

    def advance(size_bytes: int) -> None:
        nonlocal done_bytes
        done_bytes += size_bytes
        if progress is not None:
            progress(done_bytes, total_bytes)

    if parameters[todo[0].parameter].device.type != "cpu":
        upload(parameters, todo, checkpoint, min(_UPLOAD_THREADS, cores()), advance)
        return
    for piece in todo:
        target = piece.target(parameters)
        target.copy_(piece.read(checkpoint))
        advance(target.numel() * target.element_size())


def _map(model: Decoder, by_name: dict[str, Slot], checkpoint: Checkpoint) -> None:
    """Leave what may stay in the checkpoint there, and drop it from `by_name`: a view of the file,
    whose pages the system reads as rows are used, and may forget."""
    mapped = [name for name, slot in by_name.items() if slot.mapped]
    if not mapped or not isinstance(checkpoint, SafetensorsFolder):
        return
    for name in mapped:
        owner, _, leaf = by_name[name].parameter.rpartition(".")
        module = model.get_submodule(owner)
        if module.get_parameter(leaf).device.type != "cpu":
            continue
        del by_name[name]
        whole = checkpoint.mapped(name)
        setattr(module, leaf, torch.nn.Parameter(whole, requires_grad=False))


def checked(model: Decoder, slots: list[Slot], checkpoint: Checkpoint) -> dict[str, Slot]:
    """The slots by the names that the checkpoint has for their tensors.

    Raises ModelError naming tensors that are missing, unexpected or of the wrong shape.
    """
    gguf, family = checkpoint.gguf, family_of(model.spec.architecture)
    stored = {name if gguf else family.name_of(name): name for name in checkpoint.tensors}
    wanted = {slot.gguf if gguf else slot.hf: slot for slot in slots}
    wanted.pop("", None)  # what this kind of checkpoint does not have
    spare = {name for name, slot in wanted.items() if not slot.parameter}
    for name in spare:
        del wanted[name]
    ignored = _OUTPUT_LAYER if model.head is None else ()
    unexpected = {
        stored[name]
        for name in stored.keys() - wanted.keys() - spare
        if family.reads(name) and not name.endswith(_IGNORED_SUFFIXES) and name not in ignored
    }
    missing = wanted.keys() - stored.keys()
    problems = [
        f"{len(names)} {what}: {', '.join(sorted(names)[:_SHOWN])}"
        + (", ..." if len(names) > _SHOWN else "")
        for what, names in (("missing", missing), ("unexpected", unexpected))
        if names
    ]
    for name in sorted(wanted.keys() - missing):
        found, shape = checkpoint.tensors[stored[name]].shape, wanted[name].stored_shape(gguf=gguf)
        if found != shape:
            problems.append(f"{name} has shape {list(found)}, the config asks {list(shape)}")
    if problems:
        raise ModelError("the checkpoint does not fit its config: " + "; ".join(problems[:_SHOWN]))
    return {stored[name]: slot for name, slot in wanted.items()}


def fill_dummy(model: Decoder, slots: list[Slot]) -> None:
    """Random weights (normal, std 0.02; norms are 1), drawn where the parameters are.

    The same on every run on one kind of device.
    """
    parameters = dict(model.named_parameters())
    device = parameters[slots[0].parameter].device
    generator = torch.Generator(device).manual_seed(_DUMMY_SEED)
    for slot in slots:
        target = parameters[slot.parameter][slot.start : slot.start + slot.shape[0]]
        if slot.dummy == "ones":
            target.fill_(1.0)
        else:
            target.normal_(0.0, _DUMMY_STD, generator=generator)
