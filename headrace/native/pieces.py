"""SentencePiece's merging in C++ (src/pieces.cpp), over the vocabulary as a GGUF file holds it."""

from __future__ import annotations

import ctypes
import functools
import weakref
from array import array
from ctypes import POINTER, c_char_p, c_int32, c_int64, c_void_p
from pathlib import Path

from headrace.native.build import Unavailable, build_pieces, opened

SPECIAL, USER = 1, 2  # roles: found in a text before anything is merged; 0 = plain


class Library:
    """The functions of the library, with their types."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self.new = library.hr_pieces_new
        self.new.argtypes = [c_char_p, c_int64, c_int32, c_void_p, c_char_p, c_int32, c_int32]
        self.new.argtypes += [POINTER(c_int32)]
        self.new.restype = c_void_p
        self.free = library.hr_pieces_free
        self.free.argtypes, self.free.restype = [c_void_p], None
        self.encode = library.hr_pieces_encode
        self.encode.argtypes = [c_void_p, c_char_p, c_int64, c_int32, POINTER(c_int64)]
        self.encode.restype = c_void_p
        self.ids_of = library.hr_ids_of
        self.ids_of.argtypes, self.ids_of.restype = [c_void_p], POINTER(c_int32)
        self.ids_free = library.hr_ids_free
        self.ids_free.argtypes, self.ids_free.restype = [c_void_p], None


@functools.cache
def load() -> Library | Unavailable:
    """The library of this machine, built if need be; the same answer for the whole process."""
    return opened(build_pieces(), Library)


class Pieces:
    """One vocabulary. Safe from several threads, which encode side by side."""

    def __init__(self, library: Library, handle: int) -> None:
        self._library, self._handle = library, handle
        weakref.finalize(self, library.free, handle)

    def encode(self, text: bytes, *, blind: bool) -> list[int]:
        """The ids of UTF-8. blind: special tokens in it are spelled out."""
        count = c_int64()
        library = self._library
        ids = library.encode(self._handle, text, len(text), blind, ctypes.byref(count))
        try:
            found: list[int] = library.ids_of(ids)[: count.value]
            return found
        finally:
            library.ids_free(ids)


def make(
    library: Library,
    strings: bytes,
    scores: array[float],
    roles: bytes,
    *,
    unknown_id: int,
    prefix: bool,
) -> Pieces | None:
    """The vocabulary `strings`: of each token its length in 8 bytes (little-endian) and its text.

    scores: float32, roles: a byte, by id. prefix: a space goes before every text.
    None: tokens that are no UTF-8, that occur twice, or scores that are not numbers.
    """
    assert len(scores) == len(roles), "a score and a role for each token"
    assert scores.itemsize == 4, "scores are float32"
    status = c_int32()
    handle = library.new(
        strings,
        len(strings),
        len(roles),
        scores.buffer_info()[0],
        roles,
        unknown_id,
        prefix,
        ctypes.byref(status),
    )
    return Pieces(library, handle) if handle else None
