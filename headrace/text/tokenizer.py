"""Text to token ids and back.

Encoding is an `Encoder`'s: `tokenizers` (Rust), or ours for SentencePiece models in GGUF files.
Decoding is ours: a table from id to bytes, read as UTF-8 with U+FFFD for what is not. So the whole
text and the streamed text come from the same bytes and cannot differ. Tokenizers whose decoder is
no such table decode through `tokenizers`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import tokenizers

from headrace.errors import InvalidRequest, ModelError
from headrace.sources.card import ModelCard, card_of_header, read_card
from headrace.sources.files import ModelFiles
from headrace.sources.gguf import read_header
from headrace.text import fake_tokenizer, gguf_tokenizer
from headrace.text.encoder import SPACE, Encoder, LibraryEncoder


class Tokenizer:
    """One model's tokenizer. Safe to use from several threads; long texts do not hold the GIL.

    Args:
        encoder: its vocabulary.
        card: what the model says of BOS.
    """

    def __init__(self, encoder: Encoder, card: ModelCard) -> None:
        self._encoder = encoder
        self.bos_id = card.bos_id
        self.special_ids = frozenset(i for i, token in encoder.added.items() if token.special)
        self.special_texts = [  # of added tokens that are found before anything else is done
            token.text for token in encoder.added.values() if token.first
        ]
        self.prefix_ids, self.suffix_ids = self._find_ends(card)
        self.strip = encoder.strip
        self.table = encoder.table  # [id] -> bytes in the middle of a text
        self.texts = encoder.texts  # None: not whole characters
        self._tokens = encoder.tokens

    @property
    def vocab_size(self) -> int:
        """One more than the largest id that stands for text; the model may have more rows."""
        return len(self._tokens)

    @property
    def definition(self) -> str:
        """Up to megabytes for a large vocabulary: equal texts, equal tokenizers."""
        return self._encoder.definition

    def need_text(self, param: str) -> None:
        """Raise InvalidRequest if this tokenizer has no text, which the field `param` needs."""

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = True
    ) -> list[int]:
        """The ids of `text`.

        add_special: put the model's BOS first, if it wants one and the text does not begin with it.
        parse_special: `<|im_end|>` in the text becomes that one token; else it is spelled out.
        """
        return self.encode_batch([text], add_special=add_special, parse_special=parse_special)[0]

    def encode_batch(
        self,
        texts: Sequence[str],
        *,
        add_special: bool = True,
        parse_special: bool = True,
        add_end: bool = False,
    ) -> list[list[int]]:
        """`encode` of each text.

        add_end: what the model wants behind a whole text goes there too, if add_special.
        """
        clean = [text.encode("utf-8", "replace").decode("utf-8") for text in texts]
        out = self._encoder.encode(clean, parse_special=parse_special)
        if not add_special:
            return out
        prefix, suffix = self.prefix_ids, self.suffix_ids if add_end else []
        if prefix:
            out = [ids if ids[: len(prefix)] == prefix else prefix + ids for ids in out]
        return [ids + suffix for ids in out] if suffix else out

    def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], *, add_special: bool = True
    ) -> list[list[int]]:
        """The ids of two texts as one prompt, joined as tokenizer.json's post-processor does."""
        clean = [
            (one.encode("utf-8", "replace").decode(), two.encode("utf-8", "replace").decode())
            for one, two in pairs
        ]
        every = self._encoder.encode_pairs(clean, add_special=add_special)
        prefix = self.prefix_ids if add_special else []
        return [ids if ids[: len(prefix)] == prefix else prefix + ids for ids in every]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of `ids`. Bytes that are not UTF-8 become U+FFFD; unknown ids become nothing."""
        shown = self.shown(ids, skip_special=skip_special)
        if self.table is None:
            return self._encoder.decode(shown)
        first = b"".join([self.first_bytes(i) for i in shown[:1]])
        rest = b"".join([self.table[i] for i in shown[1:]])
        return (first + rest).decode("utf-8", errors="replace")

    def shown(self, ids: Iterable[int], *, skip_special: bool) -> list[int]:
        """The ids that stand for text: in use, and not special if `skip_special`."""
        tokens, size = self._tokens, len(self._tokens)
        hidden = self.special_ids if skip_special else frozenset[int]()
        return [i for i in ids if 0 <= i < size and tokens[i] and i not in hidden]

    def id_to_bytes(self, token_id: int) -> bytes:
        """The bytes that `token_id` adds in the middle of a text; b"" for an unused id."""
        if not 0 <= token_id < len(self._tokens):
            return b""
        if self.table is None:
            return self._encoder.decode([token_id]).encode()
        return self.table[token_id]

    def first_bytes(self, token_id: int) -> bytes:
        """The bytes that `token_id` gives at the very start of a text."""
        assert self.table is not None, "only tokenizers with a byte table strip by token"
        raw = self.table[token_id]
        if self.strip == "space":
            return raw.removeprefix(b" ")
        if self.strip == "first-token":
            return raw.replace(b" ", b"") if SPACE in (self._tokens[token_id] or "") else raw
        return raw

    def _find_ends(self, card: ModelCard) -> tuple[list[int], list[int]]:
        """The ids that go before every text ([BOS] or [], or what the post-processor puts there),
        and those behind a whole one, which only the post-processor knows."""
        prefix, suffix = self._encoder.ends()
        if card.add_bos is not None:
            return [card.bos_id] if card.add_bos and card.bos_id is not None else [], suffix
        if prefix is None:
            raise ModelError(
                "tokenizer.json's post-processor changes the tokens of the text itself"
            )
        return prefix, suffix


class NoTokenizer(Tokenizer):
    """Where a model folder has none: prompts are ids, answers are ids without text.

    Whatever needs text raises InvalidRequest.
    """

    def __init__(self, card: ModelCard) -> None:
        empty = tokenizers.Tokenizer(tokenizers.models.BPE())
        empty.decoder = tokenizers.decoders.ByteLevel()  # a byte table without entries
        super().__init__(LibraryEncoder(empty), card)

    def need_text(self, param: str) -> None:
        raise InvalidRequest(
            f"{param} needs text, and this model's folder has no tokenizer.json: give token ids",
            param=param,
        )

    def encode_batch(
        self,
        texts: Sequence[str],
        *,
        add_special: bool = True,
        parse_special: bool = True,
        add_end: bool = False,
    ) -> list[list[int]]:
        if texts:
            self.need_text("prompt")
        return []

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        self.need_text("tokens")
        raise AssertionError("need_text raises")


def load_tokenizer(
    files: ModelFiles, card: ModelCard | None = None, *, optional: bool = False
) -> Tokenizer:
    """The tokenizer of a resolved model.

    `optional`: a folder without one gets `NoTokenizer`. Raises ModelError if there is none or it
    is broken.
    """
    card = card or read_card(files)
    if optional and not files.has_text:
        return NoTokenizer(card)
    return Tokenizer(_encoder(files), card)


def load_text(files: ModelFiles, *, optional: bool = False) -> tuple[ModelCard, Tokenizer]:
    """`read_card` and `load_tokenizer`; a GGUF header is read once."""
    if files.kind != "gguf":
        card = read_card(files)
        return card, load_tokenizer(files, card, optional=optional)
    header = read_header(files.path)
    card = card_of_header(files, header)
    return card, Tokenizer(gguf_tokenizer.encoder(header.metadata), card)


def _encoder(files: ModelFiles) -> Encoder:
    if files.kind == "fake":
        return LibraryEncoder(fake_tokenizer.build())
    if files.kind == "gguf":
        return gguf_tokenizer.encoder(read_header(files.path).metadata)
    return LibraryEncoder(_from_json(files.path / "tokenizer.json"))


def _from_json(path: Path) -> tokenizers.Tokenizer:
    if not path.exists():
        raise ModelError(f"{path} is missing: only fast tokenizers are supported")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception for whatever it cannot parse
        raise ModelError(f"cannot read {path}: {error}") from None
