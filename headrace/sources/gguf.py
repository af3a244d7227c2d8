"""The header of a GGUF file: metadata and where each tensor lies. Copies nothing else.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The `gguf` package's reader
builds a Python object for every vocabulary entry (2 to 11 s); this one notes where strings end and
makes them when they are asked for (0.05 s for 262k entries).
"""

from __future__ import annotations

import mmap
import struct
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import msgspec

from headrace.errors import ModelError

MAGIC = b"GGUF"
_SCALARS = {
    0: ("B", 1), 1: ("b", 1), 2: ("H", 2), 3: ("h", 2), 4: ("I", 4), 5: ("i", 4),
    6: ("f", 4), 7: ("?", 1), 10: ("Q", 8), 11: ("q", 8), 12: ("d", 8),
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4
_MAX_DEPTH = 4  # arrays in arrays
_MAX_ITEMS = 1 << 28  # a longer array or string means a broken file, not a bigger model


class TensorInfo(msgspec.Struct, frozen=True):
    """Where one tensor lies. `shape`: rows first, as torch has it; `offset`: from byte 0."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int  # gguf.GGMLQuantizationType
    offset: int


class Header(msgspec.Struct, frozen=True):
    """`metadata` holds Python scalars, strings, `Strings` and lists; `tensors` is in file order."""

    version: int
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]

    @property
    def architecture(self) -> str:
        """general.architecture, llama.cpp's name; "" where the file has none."""
        return str(self.metadata.get("general.architecture", ""))

    def get(self, key: str, default: Any = None) -> Any:
        """Metadata `<architecture>.<key>`."""
        return self.metadata.get(f"{self.architecture}.{key}", default)


class Strings(Sequence[str]):
    """An array of strings. What is no UTF-8 in them becomes U+FFFD.

    raw: as they lie in the file, each behind its length in 8 bytes; ends: of each, in `raw`.
    """

    def __init__(self, raw: bytes, ends: array[int]) -> None:
        self.raw, self._ends = raw, ends

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        index = range(len(self))[index]
        start = (self._ends[index - 1] if index else 0) + 8
        return self.raw[start : self._ends[index]].decode("utf-8", errors="replace")

    def __iter__(self) -> Iterator[str]:
        raw, start = self.raw, 8
        for end in self._ends:
            yield raw[start:end].decode("utf-8", errors="replace")
            start = end + 8


class _Cursor:
    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def take(self, code: str, size: int) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += size
        return value

    def count(self) -> int:
        n = int(self.take("Q", 8))
        if n > _MAX_ITEMS:
            raise ValueError(f"impossible length {n}")
        return n

    def string(self) -> str:
        n = self.count()
        if self.at + n > len(self.data):
            raise ValueError("a string runs past the end")
        raw = self.data[self.at : self.at + n]
        self.at += n
        return raw.decode("utf-8", errors="replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            if kind not in _SCALARS:
                raise ValueError(f"unknown value type {kind}")
            return self.take(*_SCALARS[kind])
        inner, n = self.take("I", 4), self.count()
        if inner == _STRING:
            return self._strings(n)
        if inner in _SCALARS:
            code, size = _SCALARS[inner]
            values = struct.unpack_from(f"<{n}{code}", self.data, self.at)
            self.at += n * size
            return list(values)
        if depth == _MAX_DEPTH:
            raise ValueError("arrays are nested too deep")
        return [self.value(inner, depth + 1) for _ in range(n)]

    def _strings(self, n: int) -> Strings:
        """The hot loop: 49k to 262k vocabulary entries."""
        data, start = self.data, self.at
        at, unpack = 0, struct.Struct("<Q").unpack_from
        ends = array("Q")
        append = ends.append
        for _ in range(n):
            (size,) = unpack(data, start + at)
            at += 8 + size
            append(at)
        if start + at > len(data):
            raise ValueError("a string runs past the end")
        self.at = start + at
        return Strings(data[start : self.at], ends)


def read_header(path: Path) -> Header:
    """Parse the header of `path`. Raises ModelError if the file is cut or not GGUF v2/v3."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(data)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, OverflowError, struct.error) as error:
        raise ModelError(f"{path} is not a readable GGUF file: {error}") from None


def _parse(data: mmap.mmap) -> Header:
    if data[:4] != MAGIC:
        raise ValueError("it does not start with GGUF")
    cursor = _Cursor(data)
    cursor.at = 4
    version = cursor.take("I", 4)
    if version not in (2, 3):
        raise ValueError(f"version {version} is not supported (2 and 3 are)")
    n_tensors, n_metadata = cursor.count(), cursor.count()
    metadata: dict[str, Any] = {}
    for _ in range(n_metadata):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.take("I", 4))
    raw = []
    for _ in range(n_tensors):
        name, n_dims = cursor.string(), cursor.take("I", 4)
        if n_dims > _MAX_DIMS:
            raise ValueError(f"tensor {name} has {n_dims} dimensions")
        dims = [cursor.count() for _ in range(n_dims)]
        raw.append((name, tuple(reversed(dims)), cursor.take("I", 4), cursor.take("Q", 8)))
    align = metadata.get("general.alignment", 32)
    if not isinstance(align, int) or align < 1:
        raise ValueError(f"alignment {align!r}")
    start = (cursor.at + align - 1) // align * align
    tensors = {n: TensorInfo(n, shape, kind, start + offset) for n, shape, kind, offset in raw}
    for tensor in tensors.values():
        if tensor.offset >= len(data):
            raise ValueError(f"tensor {tensor.name} lies past the end: the file was cut")
    return Header(version, metadata, tensors)
