"""Weights for the native kernels: matrices packed as the checkpoint stores them, vectors float32.

A GGUF file's quantised blocks are repacked, never dequantised (types without a kernel become
float32); other checkpoints keep their float type.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from headrace.models.layers import Decoder, Rotary
from headrace.models.slots import Slot
from headrace.models.spec import ModelSpec
from headrace.native.library import Library
from headrace.native.weights import PLAIN_TYPES, Arena, Bytes, PackedMatrix
from headrace.runner import weights
from headrace.runner.checkpoint import Checkpoint, GgufFile
from headrace.runner.pieces import pieces

_CHUNK_BYTES = 16 * 2**20  # of a checkpoint's rows, packed at a time
_NUMBERS = {name: number for number, name in PLAIN_TYPES.items()}

Packed = dict[str, list[PackedMatrix]]  # parameter name -> matrices, in order of rows


def shell(build: nn.Module, spec: ModelSpec) -> None:
    """Give a decoder that was built on the meta device real vectors and rotary tables.

    Its matrices stay without memory: they are packed elsewhere.
    """
    build.rotary = Rotary(spec.rope, spec.head_dim)
    for name, parameter in list(build.named_parameters()):
        if parameter.ndim == 1 and parameter.is_meta:
            owner, _, leaf = name.rpartition(".")
            real = nn.Parameter(torch.empty(parameter.shape), requires_grad=False)
            setattr(build.get_submodule(owner), leaf, real)


def load(
    model: Decoder, slots: list[Slot], checkpoint: Checkpoint, library: Library, arena: Arena
) -> Packed:
    """Set every vector of `model` and pack every matrix. Raises as `weights.load` does."""
    by_name = {slot.gguf if checkpoint.gguf else slot.hf: slot for slot in slots}
    weights.check(by_name, checkpoint, tied=model.head is None)
    parameters = dict(model.named_parameters())
    found: dict[str, dict[int, PackedMatrix]] = {}
    for name, slot in by_name.items():
        if len(slot.shape) == 1:
            for piece in pieces(slot, name, gguf=checkpoint.gguf):
                piece.target(parameters).copy_(piece.read(checkpoint))
            continue
        matrix = _pack(slot, name, checkpoint, library, arena)
        found.setdefault(slot.parameter, {})[slot.start] = matrix
    return {name: [parts[start] for start in sorted(parts)] for name, parts in found.items()}


def pack_parameters(model: Decoder, library: Library, arena: Arena) -> Packed:
    """Pack the matrices of a model that is in memory; gate and up apart, as `load` has them."""
    found: Packed = {}
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            continue
        parts = parameter.chunk(2) if name.endswith("gate_up.weight") else (parameter,)
        found[name] = [_packed_tensor(part, library, arena) for part in parts]
    return found


def _packed_tensor(values: Tensor, library: Library, arena: Arena) -> PackedMatrix:
    rows, columns = values.shape
    number = _NUMBERS[str(values.dtype).removeprefix("torch.")]
    matrix = PackedMatrix(library, arena, number, rows, columns)
    matrix.fill(_bytes(values), np.arange(rows, dtype=np.int32))
    return matrix


def _pack(
    slot: Slot, name: str, checkpoint: Checkpoint, library: Library, arena: Arena
) -> PackedMatrix:
    rows, columns = slot.shape
    number, chunks = _rows(name, rows, checkpoint, library, columns)
    matrix = PackedMatrix(library, arena, number, rows, columns)
    targets = np.arange(rows, dtype=np.int32)
    if slot.interleaved_heads and checkpoint.gguf:
        # Stored as pairs (0, d/2, 1, d/2 + 1, ...) within a head; see pieces.halves.
        heads = targets.reshape(slot.interleaved_heads, 2, -1)
        targets = heads.transpose(0, 2, 1).reshape(-1)
    start = 0
    for raw in chunks:
        matrix.fill(raw, targets[start : start + raw.shape[0]])
        start += raw.shape[0]
    return matrix


def _rows(
    name: str, rows: int, checkpoint: Checkpoint, library: Library, columns: int
) -> tuple[int, Iterator[Bytes]]:
    """The type that a matrix is packed in, and its rows as that type stores them, in chunks."""
    step = max(1, _CHUNK_BYTES // (4 * columns))
    spans = [(start, min(rows, start + step)) for start in range(0, rows, step)]
    if isinstance(checkpoint, GgufFile):
        number = checkpoint.header.tensors[name].ggml_type
        if library.packed_bytes(number, rows, columns) >= 0:
            return number, (checkpoint.raw(name, *span) for span in spans)
        return _NUMBERS["float32"], (_bytes(checkpoint.read(name, *span)) for span in spans)
    number = _NUMBERS[checkpoint.tensors[name].dtype]
    return number, (_bytes(checkpoint.read(name, *span)) for span in spans)


def _bytes(values: Tensor) -> Bytes:
    """values [rows, columns] -> uint8 [rows, bytes of a row]."""
    raw: Bytes = values.detach().contiguous().view(torch.uint8).numpy()
    return raw
