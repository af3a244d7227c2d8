"""Weights for the native kernels: matrices packed as the checkpoint stores them, vectors float32.

A GGUF file's quantised blocks are repacked, never dequantised (types without a kernel become
float32); other checkpoints keep their float type or are quantised as they are read (RECIPES).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.errors import ModelError
from headrace.models.outline import PLAIN_MATRICES
from headrace.models.rope import Floats
from headrace.models.slots import Slot
from headrace.models.spec import ModelSpec
from headrace.native.library import Library
from headrace.native.weights import PLAIN_TYPES, Q4_1, Q8_0, Arena, Bytes, PackedMatrix, quantise
from headrace.quant import ggml
from headrace.runner.checkpoint import GgufFile, RawCheckpoint
from headrace.runner.fit import checked
from headrace.runner.pieces import ordered
from headrace.runner.progress import Count, Progress

_CHUNK_BYTES = 16 * 2**20  # of a checkpoint's rows, packed at a time
NUMBERS = {name: number for number, name in PLAIN_TYPES.items()}  # GGUF's, of plain types
_ITEM_BYTES = {0: 4, 1: 2, 30: 2}  # of PLAIN_TYPES
_BOTH = "gate_up.weight"  # kernels take gate and up as two matrices
_VOCABULARY = ("embed.weight", "head.weight")


class Recipe(msgspec.Struct, frozen=True):
    """What `quantization` makes of plain floats: ggml types of the layers' matrices and of
    embedding and head."""

    layers: int
    vocabulary: int


RECIPES = {"int8": Recipe(Q8_0, Q8_0), "int4": Recipe(Q4_1, Q8_0)}


class Weights(msgspec.Struct, frozen=True):
    """A model's, by parameters as `layers.Decoder` names them."""

    packed: dict[str, list[PackedMatrix]]  # matrices in order of rows
    vectors: dict[str, Floats]  # and what no kernel reads: see `models.outline`

    @property
    def size_bytes(self) -> int:
        """Of all of it."""
        matrices = chain.from_iterable(self.packed.values())
        vectors = self.vectors.values()
        return sum(m.memory.size for m in matrices) + sum(v.nbytes for v in vectors)

    @property
    def count(self) -> int:
        """Parameters."""
        matrices = chain.from_iterable(self.packed.values())
        vectors = self.vectors.values()
        return sum(m.rows * m.columns for m in matrices) + sum(v.size for v in vectors)

    def describe(self) -> str:
        """The types of the matrices, those with the most bytes first: `packed as Q4_1, Q8_0`."""
        sizes: Counter[str] = Counter()
        for matrix in chain.from_iterable(self.packed.values()):
            sizes[ggml.type_name(matrix.ggml_type)] += matrix.memory.size
        return "packed as " + ", ".join(name for name, _ in sizes.most_common())


def is_plain(name: str, shape: tuple[int, ...]) -> bool:
    """It stays as it is: a vector, or one of the few matrices that no kernel reads."""
    return len(shape) == 1 or name in PLAIN_MATRICES


def load(
    spec: ModelSpec,
    slots: list[Slot],
    checkpoint: RawCheckpoint,
    library: Library,
    *,
    quantization: str = "none",
    threads: int = 1,
    progress: Progress | None = None,
) -> Weights:
    """Read every vector and pack every matrix, `threads` chunks of rows at a time.

    `quantization`: none, or a key of RECIPES for a checkpoint of plain floats. `progress` hears of
    every chunk. Raises as `weights.load` does.
    """
    by_name = checked(spec, slots, checkpoint, tied=spec.tied)
    rows, arena = _rows(by_name.values()), Arena()
    vectors: dict[str, Floats] = {}
    found: dict[str, dict[int, PackedMatrix]] = {}
    todo: list[_Chunk] = []
    for name, slot in by_name.items():
        total = rows[slot.parameter]
        if is_plain(slot.parameter, slot.shape):
            whole = vectors.setdefault(
                slot.parameter, np.empty((total, *slot.shape[1:]), np.float32)
            )
            whole[slot.start : slot.start + slot.shape[0]] = _floats(name, slot, checkpoint)
            continue
        stored = _stored_type(name, checkpoint)
        parts = 1  # gate and up are apart, unless they are stored as one
        if slot.shape[0] == total and slot.parameter.endswith(_BOTH):
            parts = 2
        shape = (slot.shape[0] // parts, slot.shape[1])
        for first in range(0, slot.shape[0], shape[0]):
            number = packed_type(slot.parameter, stored, shape, library, quantization)
            matrix = PackedMatrix(library, arena, number, *shape)
            found.setdefault(slot.parameter, {})[slot.start + first] = matrix
            todo += _chunks(slot, name, stored, matrix, checkpoint, first)
    count = Count(sum(chunk.size_bytes for chunk in todo), progress)
    with ThreadPoolExecutor(threads, "pack") as pool:
        packing = pool.map(lambda chunk: chunk.pack(checkpoint, library), todo)
        for chunk, _ in zip(todo, packing, strict=True):
            count.add(chunk.size_bytes)
    packed = {name: [parts[start] for start in sorted(parts)] for name, parts in found.items()}
    return Weights(packed, vectors)


def _rows(slots: Iterable[Slot]) -> Counter[str]:
    """Of each parameter."""
    rows: Counter[str] = Counter()
    for slot in slots:
        rows[slot.parameter] += slot.shape[0]
    return rows


def _floats(name: str, slot: Slot, checkpoint: RawCheckpoint) -> Floats:
    """All of a small tensor, as its parameter has it."""
    stored = _stored_type(name, checkpoint)
    raw = np.ascontiguousarray(checkpoint.raw(name, 0, slot.shape[0])).reshape(-1)
    if stored == NUMBERS["bfloat16"]:
        values: Floats = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    elif stored in PLAIN_TYPES:
        values = raw.view(PLAIN_TYPES[stored]).astype(np.float32)
    else:
        values = ggml.dequantize(raw[None], stored)
    shaped = ordered(values.reshape(slot.shape), slot.order(gguf=checkpoint.gguf))
    return shaped + np.float32(slot.shift(gguf=checkpoint.gguf))


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

    def pack(self, checkpoint: RawCheckpoint, library: Library) -> None:
        """On any thread: chunks share no byte."""
        if self.transposed:
            columns, item_bytes = self.matrix.columns, _ITEM_BYTES[self.stored]
            whole = checkpoint.raw(self.name, 0, columns).reshape(columns, -1, item_bytes)
            raw: Bytes = whole.transpose(1, 0, 2).reshape(self.targets.size, -1)
        else:
            raw = checkpoint.raw(self.name, self.start, self.stop)
        fill(self.matrix, raw, self.stored, self.targets, library)
        if isinstance(checkpoint, GgufFile):
            checkpoint.forget(raw)


def fill(
    matrix: PackedMatrix,
    raw: Bytes,
    stored: int,
    targets: npt.NDArray[np.int32],
    library: Library,
) -> None:
    """raw [n, bytes of a row of type `stored`] goes to rows `targets`, in the matrix's type."""
    if stored not in PLAIN_TYPES and matrix.ggml_type != stored:
        raw, stored = ggml.dequantize(raw, stored).view(np.uint8), NUMBERS["float32"]
    if stored in PLAIN_TYPES and matrix.ggml_type not in PLAIN_TYPES:
        raw = quantise(library, matrix.ggml_type, stored, raw, matrix.columns)
    matrix.fill(raw, targets)


def _chunks(
    slot: Slot, name: str, stored: int, matrix: PackedMatrix, checkpoint: RawCheckpoint, first: int
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


def _stored_type(name: str, checkpoint: RawCheckpoint) -> int:
    if isinstance(checkpoint, GgufFile):
        return checkpoint.header.tensors[name].ggml_type
    dtype = checkpoint.tensors[name].dtype
    if dtype not in NUMBERS:
        raise ModelError(f"tensor {name}: type {dtype} is not supported")
    return NUMBERS[dtype]


def packed_type(
    parameter: str, stored: int, shape: tuple[int, ...], library: Library, quantization: str
) -> int:
    """The type that a matrix is packed in: its own, float32 where no kernel takes that, or the
    recipe's if blocks fill its rows."""
    if quantization != "none":
        assert stored in PLAIN_TYPES, "packed checkpoints were refused"
        recipe = RECIPES[quantization]
        number = recipe.vocabulary if parameter in _VOCABULARY else recipe.layers
        return number if library.packed_bytes(number, *shape) >= 0 else stored
    return stored if library.packed_bytes(stored, *shape) >= 0 else NUMBERS["float32"]
