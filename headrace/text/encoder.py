"""What makes ids of texts and knows the text of each id; and the one over `tokenizers` (Rust)."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec
import tokenizers

from headrace.text.byte_level import token_bytes

SPACE = "▁"  # in tokens of SentencePiece
# What decoding drops at the start of a text: nothing, one space, or the first token's spaces.
Strip = Literal["nothing", "space", "first-token"]


class Added(msgspec.Struct, frozen=True):
    """A token that is found in a text as a whole. `first`: before anything else is done."""

    text: str
    special: bool
    first: bool


class Encoder(Protocol):
    """One vocabulary. Safe to use from several threads; long texts do not hold the GIL."""

    @property
    def tokens(self) -> Sequence[str | None]:
        """[id] -> as the vocabulary writes it; None or "": no text has this id."""

    @property
    def added(self) -> Mapping[int, Added]:
        """By id."""

    @property
    def table(self) -> Sequence[bytes] | None:
        """[id] -> bytes in the middle of a text; None: only `decode` knows."""

    @property
    def texts(self) -> Sequence[str | None]:
        """The table as text; None: not whole characters. Empty without a table."""

    @property
    def strip(self) -> Strip:
        """What goes at the start of a text."""

    @property
    def definition(self) -> str:
        """All of it, or what stands for it: equal definitions, equal encoders."""

    def encode(self, texts: Sequence[str], *, parse_special: bool) -> list[list[int]]:
        """The ids of texts without surrogates. Not parse_special: special tokens are spelled."""

    def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], *, add_special: bool
    ) -> list[list[int]]:
        """The ids of two texts as one; with what joins them, if add_special."""

    def ends(self) -> tuple[list[int] | None, list[int]]:
        """What it would put before and behind a text; None: it changes the text itself."""

    def decode(self, ids: Sequence[int]) -> str:
        """For encoders without a table."""


class LibraryEncoder:
    """See `Encoder`. `inner`: whose truncation and padding are switched off."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        inner.no_truncation()  # some tokenizer.json cut texts at the length of their training
        inner.no_padding()
        self._inner = inner
        self._plain: tokenizers.Tokenizer | None = None  # as `inner`, blind to special tokens
        self._plain_lock = threading.Lock()
        added: dict[int, tokenizers.AddedToken] = inner.get_added_tokens_decoder()
        self.added: Mapping[int, Added] = {
            i: Added(
                token.content,
                token.special,
                first=not (token.normalized or token.lstrip or token.single_word),
            )
            for i, token in added.items()
        }
        vocab: dict[str, int] = inner.get_vocab(with_added_tokens=True)
        tokens: list[str | None] = [None] * (1 + max(vocab.values(), default=-1))
        for token, i in vocab.items():
            tokens[i] = token
        self.tokens: Sequence[str | None] = tokens
        self.strip: Strip = "nothing"
        self.table: Sequence[bytes] | None = None
        self._build_table(json.loads(inner.decoder.__getstate__()) if inner.decoder else None)
        self.texts: Sequence[str | None] = [
            text_or_none(raw) for raw in self.table or list[bytes]()
        ]

    @property
    def definition(self) -> str:
        """As JSON, megabytes for a large vocabulary."""
        return str(self._inner.to_str())

    def encode(self, texts: Sequence[str], *, parse_special: bool) -> list[list[int]]:
        # The batch call, unlike the single one, releases the GIL.
        inner = self._inner if parse_special else self._blind()
        return [
            encoding.ids for encoding in inner.encode_batch_fast(texts, add_special_tokens=False)
        ]

    def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], *, add_special: bool
    ) -> list[list[int]]:
        encoded = self._inner.encode_batch_fast(pairs, add_special_tokens=add_special)
        return [encoding.ids for encoding in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._inner.decode(ids, skip_special_tokens=False))

    def ends(self) -> tuple[list[int] | None, list[int]]:
        """What the post-processor adds."""
        bare: list[int] = self._inner.encode("a", add_special_tokens=False).ids
        full: list[int] = self._inner.encode("a", add_special_tokens=True).ids
        places = range(len(full) - len(bare) + 1)
        at = next((at for at in places if full[at : at + len(bare)] == bare), None)
        return (None, []) if at is None else (full[:at], full[at + len(bare) :])

    def _blind(self) -> tokenizers.Tokenizer:
        """A copy that spells special tokens out: the switch is a property of the whole object."""
        with self._plain_lock:
            if self._plain is None:
                plain = tokenizers.Tokenizer.from_str(self._inner.to_str())
                plain.encode_special_tokens = True
                self._plain = plain
            return self._plain

    def _build_table(self, decoder: dict[str, Any] | None) -> None:
        """Fill `table` and `strip` if the decoder is one of the three kinds that a table can be."""
        steps = _flat(decoder)
        kinds = {step["type"] for step in steps}
        if kinds == {"ByteLevel"}:
            self.table = table = [token_bytes(t or "") for t in self.tokens]
            for i, token in self.added.items():
                table[i] = token.text.encode()
            return
        if not kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
            return
        for step in steps:
            if step["type"] == "Replace" and (
                step["pattern"] != {"String": SPACE} or step["content"] != " "
            ):
                return
            if step["type"] == "Strip":
                if (step["content"], step["start"], step["stop"]) != (" ", 1, 0):
                    return
                self.strip = "space"
            if step["type"] == "Metaspace":
                if step["replacement"] != SPACE:
                    return
                if step.get("prepend_scheme", "always") != "never":
                    self.strip = "first-token"
        if not kinds & {"Replace", "Metaspace"} or {"Strip", "Metaspace"} <= kinds:
            return
        fallback = "ByteFallback" in kinds
        self.table = [piece_bytes(t or "", fallback) for t in self.tokens]


def text_or_none(raw: bytes) -> str | None:
    """None: not whole characters."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None


def piece_bytes(token: str, fallback: bool) -> bytes:
    """The bytes of a token of SentencePiece: ▁ is a space and, if `fallback`, <0x0A> a byte."""
    if fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace(SPACE, " ").encode()


def _flat(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return [{"type": "none"}]
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in _flat(inner)]
    return [decoder]
