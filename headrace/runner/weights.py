"""Fills a model's parameters from a checkpoint, or at random, in the target dtype.

Weights pass in pieces of a few megabytes, read by several threads; the whole model exists once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

from headrace.backends.cpu.device import cores
from headrace.backends.cuda.host_rows import page_locked
from headrace.errors import ModelError
from headrace.models.layers import Decoder
from headrace.models.registry import module_of, slots_of
from headrace.models.slots import Slot
from headrace.models.spec import ModelSpec
from headrace.runner.checkpoint import RawCheckpoint, SafetensorsFolder
from headrace.runner.fit import checked
from headrace.runner.named import fold
from headrace.runner.pieces import Piece, pieces
from headrace.runner.progress import Count, Progress
from headrace.runner.upload import upload

_READERS = 8  # threads; more than one card's link can take from memory
_DUMMY_SEED = 0
_DUMMY_STD = 0.02
_DUMMY_ROWS = 4096  # drawn at once for what is in another memory

PROCESSOR = torch.device("cpu")


def load_model(
    spec: ModelSpec,
    checkpoint: RawCheckpoint | None,
    dtype: torch.dtype,
    device: torch.device = PROCESSOR,
    progress: Progress | None = None,
) -> Decoder:
    """The model with its weights on `device`; random ones if `checkpoint` is None."""
    with torch.device(device):
        model = module_of(spec.architecture).build(spec, dtype)
    slots = slots_of(spec)
    if device.type == "cuda":
        _lock(model, slots)
    if checkpoint is None:
        fill_dummy(model, slots)
    else:
        load(model, slots, checkpoint, progress)
    return model


def load(
    model: Decoder, slots: list[Slot], checkpoint: RawCheckpoint, progress: Progress | None = None
) -> None:
    """Set every parameter of `model`, wherever they are; `progress` hears of every piece.

    Raises ModelError naming tensors that are missing, unexpected, or of the wrong shape or type.
    """
    by_name = checked(model.spec, slots, checkpoint, tied=model.head is None)
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


def _pieces(by_name: Mapping[str, Slot], checkpoint: RawCheckpoint) -> list[Piece]:
    """In the order in which they lie in the files, so that reading is sequential."""
    return [
        piece
        for name in checkpoint.tensors
        if name in by_name
        for piece in pieces(by_name[name], name, gguf=checkpoint.gguf)
    ]


def check(spec: ModelSpec, slots: list[Slot], checkpoint: RawCheckpoint, dtype: str) -> None:
    """Raise ModelError naming the tensors with values that are not finite, as they are stored or
    in `dtype` (torch's name)."""
    target: torch.dtype = getattr(torch, dtype)
    with torch.device("meta"):
        model = module_of(spec.architecture).build(spec, target)
    by_name = checked(model.spec, slots, checkpoint, tied=model.head is None)
    found: Counter[str] = Counter()

    def look(piece: Piece) -> tuple[str, int]:
        rows = piece.read(checkpoint).to(target)
        return piece.name, int(rows.numel() - torch.isfinite(rows).sum())

    with ThreadPoolExecutor(min(_READERS, cores()), "check") as pool:
        for name, count in pool.map(look, _pieces(by_name, checkpoint)):
            found[name] += count
    if bad := sorted(name for name, count in found.items() if count):
        total = sum(found.values())
        raise ModelError(f"{total} weights are NaN or infinite as {dtype}, in {fold(bad)}")


def _map(model: Decoder, by_name: dict[str, Slot], checkpoint: RawCheckpoint) -> None:
    """Leave what may stay in the checkpoint there, and drop it from `by_name`: a view of the file,
    whose pages the system reads as rows are used, and may forget. A GPU reads no such pages."""
    on_gpu = any(one.is_cuda for one in model.parameters())
    if on_gpu or not isinstance(checkpoint, SafetensorsFolder):
        return
    for name in [name for name, slot in by_name.items() if slot.mapped]:
        _put(model, by_name.pop(name), checkpoint.mapped(name))


def _lock(model: Decoder, slots: list[Slot]) -> None:
    """Memory that the GPU reads for what stays in the processor's. Raises ModelError."""
    for slot in slots:
        if slot.mapped:
            _put(model, slot, page_locked(slot.shape, model.dtype))


def _put(model: Decoder, slot: Slot, values: torch.Tensor) -> None:
    owner, _, leaf = slot.parameter.rpartition(".")
    setattr(model.get_submodule(owner), leaf, torch.nn.Parameter(values, requires_grad=False))


def fill_dummy(model: Decoder, slots: list[Slot]) -> None:
    """Random weights (normal, std 0.02; norms are 1), drawn where those are that steps read whole.

    The same on every run on one kind of device.
    """
    parameters = dict(model.named_parameters())
    read_whole = (slot.parameter for slot in slots if slot.parameter and not slot.mapped)
    device = parameters[next(read_whole)].device
    generator = torch.Generator(device).manual_seed(_DUMMY_SEED)
    for slot in slots:
        if not slot.parameter:
            continue
        target = parameters[slot.parameter][slot.start : slot.start + slot.shape[0]]
        if slot.dummy == "ones":
            target.fill_(1.0)
        elif target.device == device:
            target.normal_(0.0, _DUMMY_STD, generator=generator)
        else:
            for first in range(0, target.shape[0], _DUMMY_ROWS):
                rows = target[first : first + _DUMMY_ROWS]
                drawn = torch.empty_like(rows, device=device)
                rows.copy_(drawn.normal_(0.0, _DUMMY_STD, generator=generator))
