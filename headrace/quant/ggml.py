"""GGUF tensor types: sizes in bytes, and dequantisation to float32 (by the `gguf` package)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headrace.errors import ModelError

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

# ggml type -> name, weights of a block, bytes of a block: those that native kernels read and plain
# ones. The `gguf` package has all of them, and its import is a tenth of a start.
_KNOWN = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}
_PLAIN = {0: "float32", 1: "float16", 30: "bfloat16"}  # ggml type -> torch name


def _block(ggml_type: int) -> tuple[str, int, int]:
    """As in _KNOWN. Raises ModelError for a type the gguf package does not know."""
    if ggml_type in _KNOWN:
        return _KNOWN[ggml_type]
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        kind = GGMLQuantizationType(ggml_type)
    except ValueError:
        raise ModelError(f"unknown GGUF tensor type {ggml_type}") from None
    weights, size_bytes = GGML_QUANT_SIZES[kind]
    return str(kind.name), int(weights), int(size_bytes)


def type_name(ggml_type: int) -> str:
    """`float32` for plain types, `Q4_1` and the like for quantised ones.

    Raises ModelError for a type the gguf package does not know.
    """
    return _PLAIN.get(ggml_type) or _block(ggml_type)[0]


def row_bytes(columns: int, ggml_type: int) -> int:
    """Bytes of one row of `columns` weights. Raises ModelError if blocks do not fill the row."""
    name, weights, size_bytes = _block(ggml_type)
    if columns % weights:
        raise ModelError(f"a row of {columns} is not a multiple of the {weights}-blocks of {name}")
    return columns // weights * size_bytes


def dequantize(raw: Bytes, ggml_type: int) -> Floats:
    """raw [rows, row_bytes] -> float32 [rows, columns].

    Raises ModelError for a type without a dequantiser.
    """
    from gguf import quants
    from gguf.constants import GGMLQuantizationType

    try:
        values: Floats = quants.dequantize(raw, GGMLQuantizationType(ggml_type))
    except (NotImplementedError, ValueError) as error:
        raise ModelError(f"cannot dequantise {type_name(ggml_type)}: {error}") from None
    return values
