"""Random quantised weights, and steps of one op, in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from headrace.native import library as abi
from headrace.native.library import Library, Op, Step
from headrace.native.pool import Pool
from headrace.native.weights import Arena, PackedMatrix

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

QUANTISED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
PLAIN = ("F32", "F16", "BF16")
# Where the half-precision scales of a block are; all other bytes may be anything.
_HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}


def ggml_type(name: str) -> int:
    return int(GGMLQuantizationType[name])


def random_raw(rng: np.random.Generator, name: str, rows: int, columns: int) -> Bytes:
    """Rows as GGUF stores them [rows, bytes]: any quants, scales of some size."""
    kind = GGMLQuantizationType[name]
    if name in PLAIN:
        values = rng.standard_normal((rows, columns), np.float32)
        if name == "F16":
            return values.astype(np.float16).view(np.uint8)
        if name == "BF16":
            return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        return values.view(np.uint8)
    block, size = GGML_QUANT_SIZES[kind]
    assert columns % block == 0
    raw = rng.integers(0, 256, (rows, columns // block, size), np.uint8)
    for at in _HALVES[name]:
        scale = rng.uniform(-0.1, 0.1, raw.shape[:2]).astype(np.float16)
        raw[:, :, at : at + 2] = scale[..., None].view(np.uint8)
    return raw.reshape(rows, -1)


def floats(raw: Bytes, name: str) -> Floats:
    """What the rows mean, by the gguf package."""
    values: Floats = dequantize(raw, GGMLQuantizationType[name]).astype(np.float32)
    return values


def pack(library: Library, raw: Bytes, name: str, columns: int) -> PackedMatrix:
    matrix = PackedMatrix(library, Arena(), ggml_type(name), raw.shape[0], columns)
    matrix.fill(raw, np.arange(raw.shape[0], dtype=np.int32))
    return matrix


def acts_buffer(library: Library, rows: int, columns: int) -> Bytes:
    """Room for activations of either kind, filled with NaN bytes."""
    blocks = -(-rows // abi.TILE) * -(-columns // abi.BLOCK)
    size = max(library.fast_block_bytes, library.exact_block_bytes)
    return np.full(blocks * size, 0xFF, np.uint8)


def address(array: npt.NDArray[Any] | None) -> int | None:
    if array is None:
        return None
    assert array.flags.c_contiguous
    return array.ctypes.data


def run(pool: Pool, ops: list[Op], step: Step) -> None:
    pool.run((Op * len(ops))(*ops), step)


def quantised(x: Floats) -> Floats:
    """x [rows, columns] as the fast kernels see it: int8 with a scale for each 32 columns."""
    rows, columns = x.shape
    padded = np.zeros((rows, -(-columns // 32) * 32), np.float32)
    padded[:, :columns] = x
    blocks = padded.reshape(rows, padded.shape[1] // 32, 32)
    top = np.abs(blocks).max(-1, keepdims=True)
    inverse = np.divide(np.float32(127), top, out=np.zeros_like(top), where=top > 0)
    q = np.rint(blocks * inverse)
    values: Floats = (q * (top / np.float32(127))).reshape(padded.shape)[:, :columns]
    return values


def linear(
    pool: Pool,
    library: Library,
    x: Floats,
    matrices: list[PackedMatrix],
    *,
    exact: bool,
    bias: Floats | None = None,
    add_to: Floats | None = None,
    gated: bool = False,
    gelu: bool = False,
    softcap: float = 0.0,
) -> Floats:
    """x [rows, columns] times the matrices side by side."""
    rows, columns = x.shape
    width = matrices[0].rows if gated else sum(m.rows for m in matrices)
    out = np.full((rows, width), np.nan, np.float32) if add_to is None else add_to.copy()
    acts = acts_buffer(library, rows, columns)
    parts = abi.pointers([matrix.c for matrix in matrices])
    how = abi.EXACT if exact else 0
    quantise = Op(kind=abi.QUANTISE, flags=how, width=columns, x=address(x), acts=address(acts))
    product = Op(
        kind=abi.GATED if gated else abi.LINEAR,
        flags=how | (0 if add_to is None else abi.ADD) | (abi.GELU if gelu else 0),
        softcap=softcap,
        part_count=len(matrices),
        width=width,
        parts=parts,
        out=address(out),
        bias=address(bias),
        acts=address(acts),
    )
    run(pool, [quantise, product], Step(tokens=rows, heads=1, kv_heads=1, head_dim=16))
    return out
