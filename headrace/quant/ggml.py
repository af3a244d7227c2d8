"""GGUF tensor types: sizes in bytes, and dequantisation to float32 (by the `gguf` package)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize as _dequantize

from headrace.errors import ModelError

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_PLAIN = {0: "float32", 1: "float16", 30: "bfloat16"}  # ggml type -> torch name


def type_name(ggml_type: int) -> str:
    """`float32` for plain types, `Q4_1` and the like for quantised ones.

    Raises ModelError for a type the gguf package does not know.
    """
    if ggml_type in _PLAIN:
        return _PLAIN[ggml_type]
    try:
        return str(GGMLQuantizationType(ggml_type).name)
    except ValueError:
        raise ModelError(f"unknown GGUF tensor type {ggml_type}") from None


def row_bytes(columns: int, ggml_type: int) -> int:
    """Bytes of one row of `columns` weights. Raises ModelError if blocks do not fill the row."""
    name = type_name(ggml_type)
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType(ggml_type)]
    if columns % block:
        raise ModelError(f"a row of {columns} is not a multiple of the {block}-blocks of {name}")
    return int(columns // block * size)


def dequantize(raw: Bytes, ggml_type: int) -> Floats:
    """raw [rows, row_bytes] -> float32 [rows, columns].

    Raises ModelError for a type without a dequantiser.
    """
    try:
        values: Floats = _dequantize(raw, GGMLQuantizationType(ggml_type))
    except (NotImplementedError, ValueError) as error:
        raise ModelError(f"cannot dequantise {type_name(ggml_type)}: {error}") from None
    return values
