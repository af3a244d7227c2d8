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
from headrace.models.slots import Slot
from headrace.runner.checkpoint import Checkpoint
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
    by_name = names_of(slots, checkpoint)
    check(by_name, checkpoint, tied=model.head is None)
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


def names_of(slots: list[Slot], checkpoint: Checkpoint) -> dict[str, Slot]:
    """The slots by the names that this kind of checkpoint has for them."""
    named = ((slot.gguf if checkpoint.gguf else slot.hf, slot) for slot in slots)
    return {name: slot for name, slot in named if name}


def check(by_name: dict[str, Slot], checkpoint: Checkpoint, *, tied: bool) -> None:
    """Raises ModelError naming tensors that are missing, unexpected or of the wrong shape."""
    ignored = _OUTPUT_LAYER if tied else ()
    missing = by_name.keys() - checkpoint.tensors.keys()
    unexpected = {
        name
        for name in checkpoint.tensors.keys() - by_name.keys()
        if not name.endswith(_IGNORED_SUFFIXES) and name not in ignored
    }
    problems = [
        f"{len(names)} {what}: {', '.join(sorted(names)[:_SHOWN])}"
        + (", ..." if len(names) > _SHOWN else "")
        for what, names in (("missing", missing), ("unexpected", unexpected))
        if names
    ]
    for name in sorted(by_name.keys() - missing):
        stored = checkpoint.tensors[name].shape
        wanted = by_name[name].stored_shape(gguf=checkpoint.gguf)
        if stored != wanted:
            problems.append(f"{name} has shape {list(stored)}, the config asks {list(wanted)}")
    if problems:
        raise ModelError("the checkpoint does not fit its config: " + "; ".join(problems[:_SHOWN]))


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
