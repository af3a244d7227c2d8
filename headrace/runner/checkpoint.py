"""Checkpoints on disk, read a few rows at a time: as the bytes that lie there, or as torch's
tensors. torch is imported by whoever asks for tensors."""

from __future__ import annotations

import math
import mmap
import os
import pickle
import struct
import weakref
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open

from headrace.errors import ModelError
from headrace.quant import ggml
from headrace.runner import shards
from headrace.sources.files import ModelFiles
from headrace.sources.gguf import Header, read_header

if TYPE_CHECKING:
    from torch import Tensor

_SAFETENSORS_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
PLAIN_DTYPES = frozenset(_ITEM_BYTES)


class Stored(msgspec.Struct, frozen=True):
    """One tensor in a checkpoint. `dtype`: a torch name, or a GGUF type such as Q4_1."""

    shape: tuple[int, ...]
    dtype: str


class Checkpoint(Protocol):
    """Names, shapes and rows. `gguf`: which of a Slot's names are used."""

    gguf: bool

    @property
    def tensors(self) -> Mapping[str, Stored]:
        """What it stores, by name."""

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) along the first axis, a plain float type. Raises ModelError."""


class RawCheckpoint(Checkpoint, Protocol):
    """A checkpoint on disk, whose rows can be had without torch."""

    def raw(self, name: str, start: int, stop: int) -> ggml.Bytes:
        """The rows as they are stored: uint8 [rows, bytes of a row], one row of a tensor of
        one axis. Raises ModelError."""


def open_checkpoint(files: ModelFiles, allow_pickle: bool = False) -> RawCheckpoint:
    """Raises ModelError if files are missing, cut or hold types that cannot be read."""
    if files.kind == "gguf":
        return GgufFile(files.path)
    if allow_pickle and not any(files.path.glob("*.safetensors")):
        return PickledFolder(files.path)
    return SafetensorsFolder(files.path)


def dtypes_of(checkpoint: Checkpoint) -> frozenset[str]:
    """The types the checkpoint stores its matrices in (norms are often float32)."""
    return frozenset(t.dtype for t in checkpoint.tensors.values() if len(t.shape) > 1)


class SafetensorsFolder:
    """A folder with model.safetensors, or with shards and model.safetensors.index.json.

    `tensors` are in the order in which they lie in the files. Rows are read from the file, not
    through a memory map: what was read is then no part of this process's memory. Any thread.
    """

    gguf = False

    def __init__(self, folder: Path) -> None:
        self.tensors: Mapping[str, Stored]
        self.tensors = found = {}
        self._places: dict[str, _Place] = {}
        paths, indexed = shards.find(folder, "model", ".safetensors")
        for path in paths:
            places = self._open(path)
            shards.keep(path, places, self._places, indexed)
        shards.refuse_lost(self._places, indexed)
        for name, place in self._places.items():
            found[name] = Stored(place.shape, _SAFETENSORS_TYPES.get(place.kind, place.kind))

    def _open(self, path: Path) -> dict[str, _Place]:
        try:
            with safe_open(path, framework="np"):  # it checks the header against the file
                pass
            file = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        except (OSError, SafetensorError) as error:
            raise ModelError(f"cannot read {path}: {error}") from None
        weakref.finalize(self, os.close, file)
        (length,) = struct.unpack("<Q", os.pread(file, 8, 0))
        header = msgspec.json.decode(os.pread(file, length, 8))
        header.pop("__metadata__", None)
        places = [
            _Place(
                file=file,
                path=path,
                offset=8 + length + one["data_offsets"][0],
                shape=tuple(one["shape"]),
                kind=one["dtype"],
                name=name,
            )
            for name, one in header.items()
        ]
        return {place.name: place for place in sorted(places, key=lambda place: place.offset)}

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) along the first axis."""
        dtype = _plain(name, self.tensors[name].dtype)
        shape = (stop - start, *self.tensors[name].shape[1:])
        return _tensor(self._rows(name, start, stop, _ITEM_BYTES[dtype]), dtype, shape)

    def raw(self, name: str, start: int, stop: int) -> ggml.Bytes:
        """See `RawCheckpoint`."""
        size = _ITEM_BYTES[_plain(name, self.tensors[name].dtype)]
        flat = len(self.tensors[name].shape) == 1
        return self._rows(name, start, stop, size).reshape(1 if flat else stop - start, -1)

    def bytes(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a tensor of bytes. Raises ModelError if it is of another type."""
        if self.tensors[name].dtype != "U8":
            raise ModelError(f"tensor {name}: type {self.tensors[name].dtype}, bytes are needed")
        shape = (stop - start, *self.tensors[name].shape[1:])
        return _tensor(self._rows(name, start, stop, 1), "uint8", shape)

    def _rows(self, name: str, start: int, stop: int, item_bytes: int) -> ggml.Bytes:
        """Their bytes, flat."""
        place = self._places[name]
        row_bytes = math.prod(place.shape[1:]) * item_bytes
        raw = np.empty((stop - start) * row_bytes, np.uint8)
        memory = raw.data
        at = place.offset + start * row_bytes
        while memory:
            got = os.preadv(place.file, [memory], at)
            if not got:
                raise ModelError(f"tensor {name}: its file was cut while it was read")
            memory, at = memory[got:], at + got
        return raw

    def mapped(self, name: str) -> Tensor:
        """All of a tensor, as a view of the file's memory map."""
        _plain(name, self.tensors[name].dtype)
        with safe_open(self._places[name].path, framework="pt") as file:
            whole: Tensor = file.get_tensor(name)
        return whole


class _Place(msgspec.Struct, frozen=True):
    """Where a tensor lies. `offset`: bytes from the start of the open file `file`."""

    file: int
    path: Path
    offset: int
    shape: tuple[int, ...]
    kind: str
    name: str


def _plain(name: str, dtype: str) -> str:
    if dtype not in PLAIN_DTYPES:
        raise ModelError(f"tensor {name}: type {dtype} is not supported")
    return dtype


def _tensor(raw: ggml.Bytes, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """Bytes in memory of their own as a tensor."""
    import torch

    if not raw.size:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return torch.from_numpy(raw.reshape(-1)).view(getattr(torch, dtype)).reshape(shape)


def bytes_of(values: Tensor) -> ggml.Bytes:
    """values [rows, ...], or of one axis -> uint8 as `RawCheckpoint.raw` has them."""
    import torch

    flat: ggml.Bytes = values.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return flat.reshape(1 if values.ndim == 1 else values.shape[0], -1)


class PickledFolder:
    """A folder with pytorch_model.bin, or with shards and pytorch_model.bin.index.json.

    Torch's restricted unpickler builds tensors and plain containers, and calls nothing else. The
    tensors are views of memory maps where the file's format allows that.
    """

    gguf = False

    def __init__(self, folder: Path) -> None:
        self._values: dict[str, Tensor] = {}  # torch's own format: nothing else reads it
        paths, indexed = shards.find(folder, "pytorch_model", ".bin")
        for path in paths:
            shards.keep(path, self._open(path), self._values, indexed)
        shards.refuse_lost(self._values, indexed)
        self.tensors: Mapping[str, Stored] = {
            name: Stored(tuple(value.shape), str(value.dtype).removeprefix("torch."))
            for name, value in self._values.items()
        }

    @staticmethod
    def _open(path: Path) -> dict[str, Tensor]:
        import torch

        try:
            mapped = zipfile.is_zipfile(path)  # files from before torch 1.6 are none
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
        except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise ModelError(f"cannot read {path}: {reason[0]}") from None
        named = isinstance(found, dict) and all(isinstance(name, str) for name in found)
        if not named or not all(isinstance(value, torch.Tensor) for value in found.values()):
            raise ModelError(f"{path} holds something else than tensors by their names")
        return dict(found)

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) along the first axis."""
        _plain(name, self.tensors[name].dtype)
        return self._values[name][start:stop]

    def raw(self, name: str, start: int, stop: int) -> ggml.Bytes:
        """See `RawCheckpoint`."""
        return bytes_of(self.read(name, start, stop))

    def bytes(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a tensor of bytes. Raises ModelError if it is of another type."""
        if self.tensors[name].dtype != "uint8":
            raise ModelError(f"tensor {name}: type {self.tensors[name].dtype}, bytes are needed")
        return self._values[name][start:stop]


class GgufFile:
    """A GGUF file; quantised rows are dequantised as they are read."""

    gguf = True

    def __init__(self, path: Path) -> None:
        self.header: Header = read_header(path)
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
            return _tensor(raw.copy(), stored, shape)  # torch does not take read-only memory
        return _tensor(ggml.dequantize(raw, info.ggml_type).view(np.uint8), "float32", shape)

    def raw(self, name: str, start: int, stop: int) -> ggml.Bytes:
        """See `RawCheckpoint`; a view of the file."""
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
