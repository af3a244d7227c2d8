"""Weights for the native kernels: matrices packed as the checkpoint stores them, vectors float32.

A GGUF file's quantised blocks are repacked, never dequantised (types without a kernel become
float32); other checkpoints keep their float type or are quantised as they are read (RECIPES).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from headrace.errors import ModelError
from headrace.models.layers import PLAIN_MATRICES, Decoder
from headrace.models.positions import rotaries
from headrace.models.slots import Slot
from headrace.models.spec import ModelSpec
from headrace.native.library import Library
from headrace.native.weights import PLAIN_TYPES, Q4_1, Q8_0, Arena, Bytes, PackedMatrix, quantise
from headrace.quant import ggml
from headrace.runner import weights
from headrace.runner.checkpoint import Checkpoint, GgufFile
from headrace.runner.pieces import pieces
from headrace.runner.progress import Count, Progress

_CHUNK_BYTES = 16 * 2**20  # of a checkpoint's rows, packed at a time
_NUMBERS = {name: number for number, name in PLAIN_TYPES.items()}
_BOTH = "gate_up.weight"  # kernels take gate and up as two matrices
_VOCABULARY = ("embed.weight", "head.weight")


class Recipe(msgspec.Struct, frozen=True):
    """What `quantization` makes of plain floats: ggml types of the layers' matrices and of
    embedding and head."""

    layers: int
    vocabulary: int


RECIPES = {"int8": Recipe(Q8_0, Q8_0), "int4": Recipe(Q4_1, Q8_0)}

Packed = dict[str, list[PackedMatrix]]  # parameter name -> matrices, in order of rows


def shell(build: nn.Module, spec: ModelSpec) -> None:
    """Give a decoder that was built on the meta device real vectors and rotary tables.

    Its matrices stay without memory: they are packed elsewhere.
    """
    build.rotaries = rotaries(spec)
    for name, parameter in list(build.named_parameters()):
        if _is_plain(name, parameter.shape) and parameter.is_meta:
            _replace(build, name, torch.empty(parameter.shape))


def _is_plain(name: str, shape: tuple[int, ...]) -> bool:
    """It stays a tensor: a vector, or one of the few matrices that no kernel reads."""
    return len(shape) == 1 or name in PLAIN_MATRICES


def _replace(build: nn.Module, name: str, values: Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(build.get_submodule(owner), leaf, nn.Parameter(values, requires_grad=False))


def load(
    model: Decoder,
    slots: list[Slot],
    checkpoint: Checkpoint,
    library: Library,
    arena: Arena,
    *,
    quantization: str = "none",
    threads: int = 1,
    progress: Progress | None = None,
) -> Packed:
    """Set every vector of `model` and pack every matrix, `threads` chunks of rows at a time.

    Matrices that no kernel reads stay tensors. `quantization`: none, or a key of RECIPES for a
    checkpoint of plain floats. `progress` hears of every chunk. Raises as `weights.load` does.
    """
    by_name = weights.checked(model, slots, checkpoint)
    parameters = dict(model.named_parameters())
    found: dict[str, dict[int, PackedMatrix]] = {}
    todo: list[_Chunk] = []
    for name, slot in by_name.items():
        if _is_plain(slot.parameter, slot.shape):
            for piece in pieces(slot, name, gguf=checkpoint.gguf):
                piece.target(parameters).copy_(piece.read(checkpoint))
            continue
        stored = _stored_type(name, checkpoint)
        whole = slot.shape[0] == parameters[slot.parameter].shape[0]
        parts = 2 if whole and slot.parameter.endswith(_BOTH) else 1  # stored as one
        shape = (slot.shape[0] // parts, slot.shape[1])
        for first in range(0, slot.shape[0], shape[0]):
            number = _packed_type(slot.parameter, stored, shape, library, quantization)
            matrix = PackedMatrix(library, arena, number, *shape)
            found.setdefault(slot.parameter, {})[slot.start + first] = matrix
            todo += _chunks(slot, name, stored, matrix, checkpoint, first)
    count = Count(sum(chunk.size_bytes for chunk in todo), progress)
    with ThreadPoolExecutor(threads, "pack") as pool:
        packing = pool.map(lambda chunk: chunk.pack(checkpoint, library), todo)
        for chunk, _ in zip(todo, packing, strict=True):
            count.add(chunk.size_bytes)
    return {name: [parts[start] for start in sorted(parts)] for name, parts in found.items()}


def pack_parameters(
    model: Decoder, library: Library, arena: Arena, *, quantization: str = "none"
) -> Packed:
    """Pack the matrices of a model that is in memory; gate and up apart, as `load` has them.

    Each gives up its own memory once it is packed.
    """
    found: Packed = {}
    for name, parameter in list(model.named_parameters()):
        if _is_plain(name, parameter.shape):
            continue
        parts = parameter.chunk(2) if name.endswith(_BOTH) else (parameter,)
        found[name] = []
        for part in parts:
            stored = _NUMBERS[str(part.dtype).removeprefix("torch.")]
            number = _packed_type(name, stored, tuple(part.shape), library, quantization)
            matrix = PackedMatrix(library, arena, number, *part.shape)
            _fill(matrix, _bytes(part), stored, np.arange(part.shape[0], dtype=np.int32), library)
            found[name].append(matrix)
        _replace(model, name, torch.empty_like(parameter, device="meta"))
    return found


def describe(packed: Packed) -> str:
    """The types of the matrices, those with the most bytes first: `packed as Q4_1, Q8_0`."""
    sizes: Counter[str] = Counter()
    for matrix in chain.from_iterable(packed.values()):
        sizes[ggml.type_name(matrix.ggml_type)] += matrix.memory.size
    return "packed as " + ", ".join(name for name, _ in sizes.most_common())


class _Chunk(msgspec.Struct, frozen=True):
    """Rows [start, stop) of the checkpoint tensor `name`, of type `stored`, for rows `targets`.

    transposed: stored with columns first, and this is all of it.
    """

    name: str
    stored: int
    start: int
    stop: int
    matrix: PackedMatrix
    targets: npt.NDArray[np.int32]
    transposed: bool

    @property
    def size_bytes(self) -> int:
        """As the checkpoint stores it."""
        return self.targets.size * ggml.row_bytes(self.matrix.columns, self.stored)

    def pack(self, checkpoint: Checkpoint, library: Library) -> None:
        """On any thread: chunks share no byte."""
        if isinstance(checkpoint, GgufFile) and self.stored == self.matrix.ggml_type:
            raw = checkpoint.raw(self.name, self.start, self.stop)
            self.matrix.fill(raw, self.targets)
            checkpoint.forget(raw)
            return
        if self.transposed:
            rows = checkpoint.read(self.name, 0, self.matrix.columns).t()
        else:
            rows = checkpoint.read(self.name, self.start, self.stop)
        raw = _bytes(rows)
        _fill(self.matrix, raw, self.stored, self.targets, library)


def _fill(
    matrix: PackedMatrix,
    raw: Bytes,
    stored: int,
    targets: npt.NDArray[np.int32],
    library: Library,
) -> None:
    if stored in PLAIN_TYPES and matrix.ggml_type not in PLAIN_TYPES:
        raw = quantise(library, matrix.ggml_type, stored, raw, matrix.columns)
    matrix.fill(raw, targets)


def _chunks(
    slot: Slot, name: str, stored: int, matrix: PackedMatrix, checkpoint: Checkpoint, first: int
) -> Iterator[_Chunk]:
    """Of the rows of the slot from `first` on, as many as `matrix` has."""
    rows, columns = matrix.rows, matrix.columns
    targets = np.arange(rows, dtype=np.int32)
    order, transposed = slot.order(gguf=checkpoint.gguf), slot.transposed(gguf=checkpoint.gguf)
    if order:  # row order[i] of a stored head goes to row i of ours
        places = np.argsort(order).astype(np.int32)
        targets = (targets.reshape(-1, len(order))[:, :1] + places).reshape(-1)
    assert rows == slot.shape[0] or not (order or transposed), "such matrices are packed whole"
    step = rows if transposed else max(1, _CHUNK_BYTES // (4 * columns))
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        at = (first + start, first + stop)
        yield _Chunk(name, stored, *at, matrix, targets[start:stop], transposed)


def _stored_type(name: str, checkpoint: Checkpoint) -> int:
    if isinstance(checkpoint, GgufFile):
        return checkpoint.header.tensors[name].ggml_type
    dtype = checkpoint.tensors[name].dtype
    if dtype not in _NUMBERS:
        raise ModelError(f"tensor {name}: type {dtype} is not supported")
    return _NUMBERS[dtype]


def _packed_type(
    parameter: str, stored: int, shape: tuple[int, ...], library: Library, quantization: str
) -> int:
    """The type that a matrix is packed in: its own, float32 where no kernel takes that, or the
    recipe's if blocks fill its rows."""
    if quantization != "none":
        assert stored in PLAIN_TYPES, "packed checkpoints were refused"
        recipe = RECIPES[quantization]
        number = recipe.vocabulary if parameter in _VOCABULARY else recipe.layers
        return number if library.packed_bytes(number, *shape) >= 0 else stored
    return stored if library.packed_bytes(stored, *shape) >= 0 else _NUMBERS["float32"]


def _bytes(values: Tensor) -> Bytes:
    """values [rows, columns] -> uint8 [rows, bytes of a row]."""
    raw: Bytes = values.detach().contiguous().view(torch.uint8).numpy()
    return raw
