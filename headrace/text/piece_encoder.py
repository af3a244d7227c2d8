"""SentencePiece models out of GGUF files, without a list of merges.

`tokenizers` asks for every way to make a token of two others: half a million for a vocabulary of
262144, 3.5 s and 200 MB of every start. Here the vocabulary stays as it lies in the file, pieces
merge by the scores that it has (`native/pieces.py`), and texts of tokens are made when they are
asked for. The ids are the same as of `gguf_tokenizer.build`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, TypeVar, overload

from headrace.native import pieces
from headrace.native.build import Unavailable
from headrace.sources.gguf import Strings
from headrace.text.encoder import Added, Strip, piece_bytes, text_or_none

T = TypeVar("T")

# tokenizer.ggml.token_type
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
_ROLES = bytes.maketrans(
    bytes(range(256)),
    bytes(
        pieces.SPECIAL if k in (UNKNOWN, CONTROL) else pieces.USER * (k == USER_DEFINED)
        for k in range(256)
    ),
)
_ODD = Unavailable("the vocabulary is not a plain one", "check the file")


class Made(Sequence[T]):
    """`make(i)` of 0..size-1; what was asked for by its index is kept."""

    def __init__(self, size: int, make: Callable[[int], T]) -> None:
        self._size, self._make = size, make
        self._kept: dict[int, T] = {}

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...

    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        if isinstance(index, slice):
            return [self._make(i) for i in range(self._size)[index]]
        try:
            return self._kept[index]
        except KeyError:
            made = self._kept[index] = self._make(range(self._size)[index])
            return made

    def __iter__(self) -> Iterator[T]:
        return map(self._make, range(self._size))


class PieceEncoder:
    """See `Encoder`; made by `encoder_of`."""

    def __init__(
        self, merged: pieces.Pieces, tokens: Strings, roles: bytes, *, prefix: bool, definition: str
    ) -> None:
        self._pieces = merged
        self.tokens: Sequence[str | None] = tokens
        self.added: Mapping[int, Added] = {
            i: Added(tokens[i], role == pieces.SPECIAL, first=True)
            for i, role in enumerate(roles)
            if role and tokens[i]
        }
        self.strip: Strip = "space" if prefix else "nothing"
        self.definition = definition

        def raw(i: int) -> bytes:
            return piece_bytes(tokens[i], fallback=True)

        self.table: Sequence[bytes] | None = Made(len(tokens), raw)
        self.texts: Sequence[str | None] = Made(len(tokens), lambda i: text_or_none(raw(i)))

    def encode(self, texts: Sequence[str], *, parse_special: bool) -> list[list[int]]:
        return [self._pieces.encode(text.encode(), blind=not parse_special) for text in texts]

    def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], *, add_special: bool
    ) -> list[list[int]]:
        encode = self._pieces.encode
        return [
            encode(one.encode(), blind=False) + encode(two.encode(), blind=False)
            for one, two in pairs
        ]

    def ends(self) -> tuple[list[int] | None, list[int]]:
        return [], []

    def decode(self, ids: Sequence[int]) -> str:
        raise AssertionError("an encoder with a table is not asked")


def encoder_of(metadata: dict[str, Any]) -> PieceEncoder | Unavailable:
    """The encoder of a GGUF file with `tokenizer.ggml.model` = llama.

    Unavailable: `gguf_tokenizer.build` has to do it. There is no C++ compiler, or the vocabulary is
    not as it should be, and its fault must be named.
    """
    library = pieces.load()
    if isinstance(library, Unavailable):
        return library
    tokens, scores = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.scores")
    types = metadata.get("tokenizer.ggml.token_type")
    unknown_id = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    if not isinstance(tokens, Strings) or not isinstance(unknown_id, int):
        return _ODD
    if not (isinstance(scores, list) and isinstance(types, list)):
        return _ODD
    if not len(tokens) == len(scores) == len(types) > unknown_id >= 0:
        return _ODD
    try:
        numbers, roles = array("f", scores), bytes(types).translate(_ROLES)
    except (TypeError, ValueError, OverflowError):
        return _ODD
    if numbers.tolist() != scores:  # they are not float32, and rounding could make them equal
        return _ODD
    made = pieces.make(library, tokens.raw, numbers, roles, unknown_id=unknown_id, prefix=prefix)
    if made is None:
        return _ODD
    digest = blake2b(tokens.raw, digest_size=16)
    digest.update(repr((len(tokens), unknown_id, prefix)).encode())
    digest.update(numbers.tobytes() + roles)
    definition = f"sentencepiece {digest.hexdigest()}"
    return PieceEncoder(made, tokens, roles, prefix=prefix, definition=definition)
