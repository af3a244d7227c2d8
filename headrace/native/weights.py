"""Weight matrices as the kernels read them: quantised blocks stay quantised, rows in panels."""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt

from headrace.errors import ModelError
from headrace.native.library import BLOCK, Library, Matrix
from headrace.native.memory import ALIGN_BYTES

PLAIN_TYPES = {0: "float32", 1: "float16", 30: "bfloat16"}  # ggml type -> torch's name
_CHUNK_BYTES = 32 * 2**20

Bytes = npt.NDArray[np.uint8]

# ggml types that `quantise` makes -> bytes of a block of 32 columns.
Q4_1, Q8_0 = 3, 8
_BLOCK_BYTES = {Q4_1: 20, Q8_0: 34}


def zeros(size_bytes: int) -> Bytes:
    """Zeros from the system, not from the heap: a page takes memory only once it is written."""
    if not hasattr(mmap, "MAP_PRIVATE"):
        return np.frombuffer(mmap.mmap(-1, size_bytes), np.uint8)
    # Private: Linux gives shared memory no huge pages unless it is set up to.
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


class Arena:
    """Zeroed memory for weights in large chunks, on huge pages where the system has them."""

    def __init__(self, chunk_bytes: int = _CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        self._left: Bytes = np.empty(0, np.uint8)
        self.used_bytes = 0

    def take(self, size_bytes: int) -> Bytes:
        """`size_bytes` zeros, aligned to 64; they live as long as the array does."""
        padded = -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES
        if padded > self._left.size:
            self._left = zeros(max(padded, self._chunk_bytes))
        taken, self._left = self._left[:size_bytes], self._left[padded:]
        self.used_bytes += size_bytes
        return taken


class PackedMatrix:
    """W [rows, columns] of one ggml type (plain floats are types too)."""

    def __init__(
        self, library: Library, arena: Arena, ggml_type: int, rows: int, columns: int
    ) -> None:
        size_bytes = library.packed_bytes(ggml_type, rows, columns)
        if size_bytes < 0:
            raise ModelError(
                f"no native kernels for a [{rows}, {columns}] matrix of GGUF type {ggml_type}"
            )
        self._library = library
        self.memory = arena.take(size_bytes)
        self.ggml_type, self.rows, self.columns = ggml_type, rows, columns
        self.c = Matrix(self.memory.ctypes.data, ggml_type, rows, columns)

    def fill(self, raw: Bytes, targets: npt.NDArray[np.int32]) -> None:
        """raw [n, bytes of a row as GGUF stores it]; row i becomes row targets[i]. Once a row."""
        assert raw.shape[0] == targets.size, "one target a row"
        assert targets.size == 0 or (targets.min() >= 0 and targets.max() < self.rows), "rows"
        raw, targets = np.ascontiguousarray(raw), np.ascontiguousarray(targets)
        self._library.pack_rows(
            self.ggml_type,
            self.columns,
            raw.ctypes.data,
            targets.size,
            targets.ctypes.data,
            self.memory.ctypes.data,
        )


def quantise(
    library: Library, ggml_type: int, source: int, raw: Bytes, columns: int, isa: str = ""
) -> Bytes:
    """Plain floats to quantised rows, both as GGUF stores them. `columns`: a multiple of 32.

    raw [n, bytes of a row of type `source`] -> uint8 [n, bytes of a row of `ggml_type`]. Q8_0: the
    scale is the largest magnitude of a block over 127. Q4_1: scale and minimum of least squares.
    """
    out = np.empty((raw.shape[0], columns // BLOCK * _BLOCK_BYTES[ggml_type]), np.uint8)
    raw = np.ascontiguousarray(raw)
    done = library.quantise_rows(
        ggml_type,
        source,
        columns,
        raw.ctypes.data,
        raw.shape[0],
        out.ctypes.data,
        isa.encode(),
    )
    assert done, f"type {source} to type {ggml_type}, {columns} columns"
    return out
