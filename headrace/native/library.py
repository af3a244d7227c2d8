"""The C ABI of `src/` in ctypes. `src/native.h` says what the fields mean."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_char_p, c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

from headrace.native.build import Unavailable, build, opened

# Kinds and flags of an Op; types of KV caches.
EMBED, QUANTISE, LINEAR, GATED, ROTATE, ATTEND, PEAKS, GATHER, ADD_NORMED = range(9)
ADD, OF_HEAD, EXACT, GELU = 1, 2, 4, 8
KV_TYPES = {"float32": 0, "float16": 1, "bfloat16": 30, "int8": 8}
BLOCK, TILE = 32, 16  # columns of a block, rows of a tile


class Matrix(Structure):
    """A packed weight matrix."""

    _fields_ = [
        ("data", c_void_p),
        ("type", c_int32),
        ("rows", c_int32),
        ("columns", c_int32),
    ]


class Op(Structure):
    """One operation of a step; every thread takes pieces of it."""

    _fields_ = [
        ("kind", c_int32),
        ("flags", c_int32),
        ("part_count", c_int32),
        ("width", c_int32),
        ("parts", POINTER(POINTER(Matrix))),
        ("x", c_void_p),
        ("out", c_void_p),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("acts", c_void_p),
        ("k", c_void_p),
        ("v", c_void_p),
        ("k_scales", c_void_p),
        ("v_scales", c_void_p),
        ("epsilon", c_float),
        ("window", c_int32),
        ("best", c_void_p),
        ("finite", c_void_p),
        ("stride", c_int32),
        ("scale", c_float),
        ("softcap", c_float),
        ("group", c_int32),
        ("k_norm", c_void_p),
        ("cosines", c_void_p),
        ("sines", c_void_p),
    ]


Parts = Any  # POINTER(POINTER(Matrix)): what Op.parts takes


def pointers(matrices: Sequence[Matrix]) -> Parts:
    """Matrices side by side for Op.parts. Keep the matrices' memory alive."""
    array = (POINTER(Matrix) * len(matrices))(*(ctypes.pointer(matrix) for matrix in matrices))
    return ctypes.cast(array, POINTER(POINTER(Matrix)))


class Step(Structure):
    """Columns of one step and the shape of the model."""

    _fields_ = [
        ("tokens", c_int32),
        ("head_count", c_int32),
        ("ids", c_void_p),
        ("head_rows", c_void_p),
        ("rows", c_void_p),
        ("positions", c_void_p),
        ("writes", c_void_p),
        ("tables", c_void_p),
        ("table_width", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("block_size", c_int32),
        ("kv_type", c_int32),
        ("table_rows", c_int32),
    ]


class Library:
    """The functions of a built library, with their types."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self.path = path
        self.size_of = library.hr_size_of
        self.size_of.argtypes, self.size_of.restype = [c_int32], c_int64
        self.packed_bytes = library.hr_packed_bytes
        self.packed_bytes.argtypes, self.packed_bytes.restype = [c_int32] * 3, c_int64
        self.pack_rows = library.hr_pack_rows
        self.pack_rows.argtypes = [c_int32, c_int32, c_void_p, c_int32, c_void_p, c_void_p]
        self.pack_rows.restype = None
        self.quantise_rows = library.hr_quantise_rows
        self.quantise_rows.argtypes = [c_int32] * 3 + [c_void_p, c_int32, c_void_p, c_char_p]
        self.quantise_rows.restype = c_int32
        self.pool_new = library.hr_pool_new
        self.pool_new.argtypes = [c_int32, c_int32, c_char_p]
        self.pool_new.restype = c_void_p
        self.pool_free = library.hr_pool_free
        self.pool_free.argtypes, self.pool_free.restype = [c_void_p], None
        self.pool_isa = library.hr_pool_isa
        self.pool_isa.argtypes, self.pool_isa.restype = [c_void_p], c_char_p
        self.run = library.hr_run
        self.run.argtypes = [c_void_p, POINTER(Op), c_int32, POINTER(Step)]
        self.run.restype = None
        for what, mine in enumerate((Matrix, Op, Step)):
            assert self.size_of(what) == ctypes.sizeof(mine), f"{mine.__name__} differs from C++"
        self.fast_block_bytes, self.exact_block_bytes = self.size_of(3), self.size_of(4)


@functools.cache
def load() -> Library | Unavailable:
    """The library of this machine, built if need be; the same answer for the whole process."""
    return opened(build(), Library)
