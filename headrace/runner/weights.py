"""Fills a model's parameters from a checkpoint, or at random, in the target dtype.

Each weight passes through one buffer of a few megabytes; the whole model exists once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.errors import ModelError
from headrace.models.layers import Decoder
from headrace.models.slots import Slot
from headrace.runner.checkpoint import Checkpoint

_CHUNK_BYTES = 16 * 2**20  # of float32 in flight
_SHOWN = 8  # names in an error message
_DUMMY_SEED = 0
_DUMMY_STD = 0.02

# Buffers that older exporters saved; they follow from the config.
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
_OUTPUT_LAYER = ("lm_head.weight", "output.weight")  # a copy of the embedding when tied


def load(model: Decoder, slots: list[Slot], checkpoint: Checkpoint) -> None:
    """Set every parameter of `model`.

    Raises ModelError naming tensors that are missing, unexpected or of the wrong shape.
    """
    by_name = {slot.gguf if checkpoint.gguf else slot.hf: slot for slot in slots}
    _check(by_name, checkpoint, tied=model.head is None)
    parameters = dict(model.named_parameters())
    for name, slot in by_name.items():
        fill(parameters[slot.parameter], slot, name, checkpoint)


def _check(by_name: dict[str, Slot], checkpoint: Checkpoint, *, tied: bool) -> None:
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
        stored, wanted = checkpoint.tensors[name].shape, by_name[name].shape
        if stored != wanted:
            problems.append(f"{name} has shape {list(stored)}, the config asks {list(wanted)}")
    if problems:
        raise ModelError("the checkpoint does not fit its config: " + "; ".join(problems[:_SHOWN]))


def fill(parameter: Tensor, slot: Slot, name: str, checkpoint: Checkpoint) -> None:
    """Copy one checkpoint tensor into its rows of `parameter`."""
    target = parameter[slot.start : slot.start + slot.shape[0]]
    rows = slot.shape[0]
    if slot.interleaved_heads and checkpoint.gguf:
        target.copy_(halves(checkpoint.read(name, 0, rows), slot.interleaved_heads))
        return
    columns = max(1, target.numel() // rows)
    step = rows if target.ndim == 1 else max(1, _CHUNK_BYTES // (4 * columns))
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        target[start:stop].copy_(checkpoint.read(name, start, stop))


def halves(stored: Tensor, heads: int) -> Tensor:
    """Rows of each head from interleaved rotary pairs (a0 b0 a1 b1 ...) to (a0 a1 ... b0 b1 ...).

    stored [heads * d, ...] -> the same shape.
    """
    pairs = stored.reshape(heads, stored.shape[0] // heads // 2, 2, *stored.shape[1:])
    return pairs.transpose(1, 2).reshape(stored.shape)


def fill_dummy(model: Decoder, slots: list[Slot]) -> None:
    """Random weights (normal, std 0.02; norms are 1), the same on every run."""
    generator = torch.Generator().manual_seed(_DUMMY_SEED)
    parameters = dict(model.named_parameters())
    for slot in slots:
        target = parameters[slot.parameter][slot.start : slot.start + slot.shape[0]]
        if slot.dummy == "ones":
            target.fill_(1.0)
        else:
            target.normal_(0.0, _DUMMY_STD, generator=generator)
