"""Fills a model's parameters from a checkpoint, or at random, in the target dtype.

Weights pass in pieces of a few megabytes, read by several threads; the whole model exists once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

from headrace.backends.cpu.device import cores
from headrace.errors import ModelError
from headrace.models.layers import Decoder
from headrace.models.registry import family_of, module_of
from headrace.models.slots import Slot
from headrace.models.spec import ModelSpec
from headrace.runner.checkpoint import PLAIN_DTYPES, Checkpoint, SafetensorsFolder
from headrace.runner.named import fold
from headrace.runner.pieces import Piece, pieces
from headrace.runner.progress import Count, Progress
from headrace.runner.upload import upload

_READERS = 8  # threads; more than one card's link can take from memory
_DUMMY_SEED = 0
_DUMMY_STD = 0.02

# Buffers that older exporters saved; they follow from the config.
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
_OUTPUT_LAYER = ("lm_head.weight", "output.weight")  # a copy of the embedding when tied


def load(
    model: Decoder, slots: list[Slot], checkpoint: Checkpoint, progress: Progress | None = None
) -> None:
    """Set every parameter of `model`, wherever they are; `progress` hears of every piece.

    Raises ModelError naming tensors that are missing, unexpected, or of the wrong shape or type.
    """
    by_name = checked(model, slots, checkpoint)
    _map(model, by_name, checkpoint)
    parameters = dict(model.named_parameters())
    todo = _pieces(by_name, checkpoint)
    targets = [piece.target(parameters) for piece in todo]
    count = Count(sum(one.numel() * one.element_size() for one in targets), progress)
    threads = torch.get_num_threads()
    try:
        upload(parameters, todo, checkpoint, min(_READERS, cores()), count.add)
    finally:
        torch.set_num_threads(threads)  # the readers' one thread each is torch's newest default


def _pieces(by_name: Mapping[str, Slot], checkpoint: Checkpoint) -> list[Piece]:
    """In the order in which they lie in the files, so that reading is sequential."""
    return [
        piece
        for name in checkpoint.tensors
        if name in by_name
        for piece in pieces(by_name[name], name, gguf=checkpoint.gguf)
    ]


def check(spec: ModelSpec, slots: list[Slot], checkpoint: Checkpoint, dtype: torch.dtype) -> None:
    """Raise ModelError naming the tensors with values that are not finite, as they are stored or
    in `dtype`."""
    with torch.device("meta"):
        model = module_of(spec.architecture).build(spec, dtype)
    by_name = checked(model, slots, checkpoint)
    found: Counter[str] = Counter()

    def look(piece: Piece) -> tuple[str, int]:
        rows = piece.read(checkpoint).to(dtype)
        return piece.name, int(rows.numel() - torch.isfinite(rows).sum())

    with ThreadPoolExecutor(min(_READERS, cores()), "check") as pool:
        for name, count in pool.map(look, _pieces(by_name, checkpoint)):
            found[name] += count
    if bad := sorted(name for name, count in found.items() if count):
        total, kind = sum(found.values()), str(dtype).removeprefix("torch.")
        raise ModelError(f"{total} weights are NaN or infinite as {kind}, in {fold(bad)}")


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

    Raises ModelError naming tensors that are missing, unexpected, or of the wrong shape or type.
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
        f"{len(names)} {what}: {fold(names)}"
        for what, names in (("missing", missing), ("unexpected", unexpected))
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
    if problems:
        raise ModelError("the checkpoint does not fit its config: " + "; ".join(problems))
    return {stored[name]: slot for name, slot in wanted.items()}


def fill_dummy(model: Decoder, slots: list[Slot]) -> None:
    """Random weights (normal, std 0.02; norms are 1), drawn where the parameters are.

    The same on every run on one kind of device.
    """
    parameters = dict(model.named_parameters())
    device = parameters[slots[0].parameter].device
    generator = torch.Generator(device).manual_seed(_DUMMY_SEED)
    for slot in slots:
        if not slot.parameter:
            continue
        target = parameters[slot.parameter][slot.start : slot.start + slot.shape[0]]
        if slot.dummy == "ones":
            target.fill_(1.0)
        else:
            target.normal_(0.0, _DUMMY_STD, generator=generator)
