"""Checkpoints on disk, read a few rows at a time through a memory map."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headrace.errors import ModelError
from headrace.quant import ggml
from headrace.sources.files import ModelFiles
from headrace.sources.gguf import Header, read_header

_SAFETENSORS_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
PLAIN_DTYPES = frozenset(_SAFETENSORS_TYPES.values())


class Stored(msgspec.Struct, frozen=True):
    """One tensor in a checkpoint. `dtype`: a torch name, or a GGUF type such as Q4_1."""

    shape: tuple[int, ...]
    dtype: str


class Checkpoint(Protocol):
    """Names, shapes and rows. `gguf`: which of a Slot's names are used."""

    gguf: bool

    @property
    def tensors(self) -> Mapping[str, Stored]: ...

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) along the first axis, a plain float type. Raises ModelError."""


def open_checkpoint(files: ModelFiles) -> Checkpoint:
    """Raises ModelError if files are missing, cut or hold types that cannot be read."""
    return GgufFile(files.path) if files.kind == "gguf" else SafetensorsFolder(files.path)


def dtypes_of(checkpoint: Checkpoint) -> frozenset[str]:
    """The types the checkpoint stores its matrices in (norms are often float32)."""
    return frozenset(t.dtype for t in checkpoint.tensors.values() if len(t.shape) > 1)


class SafetensorsFolder:
    """A folder with model.safetensors, or with shards and model.safetensors.index.json."""

    gguf = False

    def __init__(self, folder: Path) -> None:
        self.tensors: Mapping[str, Stored]
        self.tensors = found = {}
        self._files: dict[str, Any] = {}
        for path in _safetensors_files(folder):
            try:
                handle: Any = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ModelError(f"cannot read {path}: {error}") from None
            for name in handle.keys():  # noqa: SIM118 - not a dict
                piece = handle.get_slice(name)
                kind = piece.get_dtype()
                found[name] = Stored(tuple(piece.get_shape()), _SAFETENSORS_TYPES.get(kind, kind))
                self._files[name] = handle

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) along the first axis."""
        self._plain(name)
        rows: Tensor = self._files[name].get_slice(name)[start:stop]
        return rows

    def bytes(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a tensor of bytes. Raises ModelError if it is of another type."""
        if self.tensors[name].dtype != "U8":
            raise ModelError(f"tensor {name}: type {self.tensors[name].dtype}, bytes are needed")
        rows: Tensor = self._files[name].get_slice(name)[start:stop]
        return rows

    def mapped(self, name: str) -> Tensor:
        """All of a tensor, as a view of the file's memory map."""
        self._plain(name)
        whole: Tensor = self._files[name].get_tensor(name)
        return whole

    def _plain(self, name: str) -> None:
        if self.tensors[name].dtype not in PLAIN_DTYPES:
            raise ModelError(f"tensor {name}: type {self.tensors[name].dtype} is not supported")


def _safetensors_files(folder: Path) -> list[Path]:
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if not index.exists():
        if not single.exists():
            raise ModelError(f"{folder} holds no model.safetensors and no index of shards")
        return [single]
    try:
        shards = set(msgspec.json.decode(index.read_bytes())["weight_map"].values())
    except (OSError, msgspec.DecodeError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is not an index of shards: {error!r}") from None
    outside = sorted(str(name) for name in shards if Path(str(name)).name != name)
    if outside:
        raise ModelError(f"{index} names files outside its folder: {', '.join(outside)}")
    missing = sorted(name for name in shards if not (folder / name).exists())
    if missing:
        raise ModelError(f"{folder} lacks {', '.join(missing)}")
    return [folder / name for name in sorted(shards)]


class GgufFile:
    """A GGUF file; quantised rows are dequantised as they are read."""

    gguf = True

    def __init__(self, path: Path) -> None:
        self.header: Header = read_header(path, strings=False)
        self.tensors = {
            name: Stored(info.shape, ggml.type_name(info.ggml_type))
            for name, info in self.header.tensors.items()
        }
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._data = np.frombuffer(self._map, np.uint8)
        for name, info in self.header.tensors.items():
            columns = info.shape[-1] if info.shape else 1
            rows = int(np.prod(info.shape[:-1], dtype=np.int64))
            end = info.offset + rows * ggml.row_bytes(columns, info.ggml_type)
            if end > self._data.size:
                raise ModelError(f"{path}: tensor {name} ends past the file: the file was cut")

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) along the first axis, float32 where the file is quantised."""
        info = self.header.tensors[name]
        raw = self.raw(name, start, stop)
        shape = (stop - start, *info.shape[1:])
        stored = self.tensors[name].dtype
        if stored in PLAIN_DTYPES:
            # A copy of these rows: torch does not take read-only memory.
            return torch.from_numpy(raw.copy()).view(getattr(torch, stored)).reshape(shape)
        return torch.from_numpy(ggml.dequantize(raw, info.ggml_type)).reshape(shape)

    def raw(self, name: str, start: int, stop: int) -> ggml.Bytes:
        """The same rows as the file stores them, [rows, bytes of a row]: a view of the file."""
        info = self.header.tensors[name]
        flat = len(info.shape) == 1
        columns = stop - start if flat else info.shape[-1]
        size = ggml.row_bytes(columns, info.ggml_type)
        inner = 1 if flat else int(np.prod(info.shape[1:-1], dtype=np.int64))
        rows = 1 if flat else (stop - start) * inner
        first = ggml.row_bytes(start, info.ggml_type) if flat else start * inner * size
        at = info.offset + first
        return self._data[at : at + rows * size].reshape(rows, size)

    def forget(self, raw: ggml.Bytes) -> None:
        """What `raw` gave counts no more as this process's memory, until it is read again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            start = raw.ctypes.data - self._data.ctypes.data
            first = start // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, first, start + raw.size - first)
