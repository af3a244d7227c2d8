"""Text to token ids and back.

Encoding is `tokenizers` (Rust). Decoding is ours: a table from id to bytes, read as UTF-8 with
U+FFFD for what is not. So the whole text and the streamed text come from the same bytes and cannot
differ. Tokenizers whose decoder is no such table decode through `tokenizers`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import tokenizers

from headrace.errors import InvalidRequest, ModelError
from headrace.sources.card import ModelCard, read_card
from headrace.sources.files import ModelFiles
from headrace.sources.gguf import read_header
from headrace.text import fake_tokenizer, gguf_tokenizer
from headrace.text.byte_level import token_bytes

_SPACE = "▁"
# What decoding drops at the start of a text: nothing, one space, or the first token's spaces.
Strip = Literal["nothing", "space", "first-token"]


class Tokenizer:
    """One model's tokenizer. Safe to use from several threads; long texts do not hold the GIL.

    Args:
        inner: the `tokenizers` tokenizer.
        card: what the model says of BOS.
    """

    def __init__(self, inner: tokenizers.Tokenizer, card: ModelCard) -> None:
        inner.no_truncation()  # some tokenizer.json cut texts at the length of their training
        inner.no_padding()
        self._inner = inner
        self._plain: tokenizers.Tokenizer | None = None  # as `inner`, blind to special tokens
        self._plain_lock = threading.Lock()
        added: dict[int, tokenizers.AddedToken] = inner.get_added_tokens_decoder()
        self.bos_id = card.bos_id
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.special_texts = [  # of added tokens that are found before anything else is done
            token.content
            for token in added.values()
            if not (token.normalized or token.lstrip or token.single_word)
        ]
        self.prefix_ids, self.suffix_ids = self._find_ends(card)
        self.strip: Strip = "nothing"
        self.table: list[bytes] | None = None  # [id] -> bytes in the middle of a text
        vocab: dict[str, int] = inner.get_vocab(with_added_tokens=True)
        self._tokens: list[str | None] = [None] * (1 + max(vocab.values(), default=-1))
        for token, i in vocab.items():
            self._tokens[i] = token
        decoder = json.loads(inner.decoder.__getstate__()) if inner.decoder else None
        self._build_table(decoder, {i: token.content for i, token in added.items()})
        self.texts = [
            _text_or_none(raw) for raw in self.table or list[bytes]()
        ]  # None: not whole characters

    @property
    def vocab_size(self) -> int:
        """One more than the largest id that stands for text; the model may have more rows."""
        return len(self._tokens)

    @property
    def definition(self) -> str:
        """All of it as JSON, megabytes for a large vocabulary: equal texts, equal tokenizers."""
        return str(self._inner.to_str())

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
        """`encode` of each text. The batch call, unlike the single one, releases the GIL.

        add_end: what the model wants behind a whole text goes there too, if add_special.
        """
        inner = self._inner if parse_special else self._blind()
        clean = [text.encode("utf-8", "replace").decode("utf-8") for text in texts]
        out: list[list[int]] = [
            encoding.ids for encoding in inner.encode_batch_fast(clean, add_special_tokens=False)
        ]
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
            tuple(text.encode("utf-8", "replace").decode("utf-8") for text in pair)
            for pair in pairs
        ]
        encoded = self._inner.encode_batch_fast(clean, add_special_tokens=add_special)
        prefix = self.prefix_ids if add_special else []
        every: list[list[int]] = [encoding.ids for encoding in encoded]
        return [ids if ids[: len(prefix)] == prefix else prefix + ids for ids in every]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of `ids`. Bytes that are not UTF-8 become U+FFFD; unknown ids become nothing."""
        shown = self.shown(ids, skip_special=skip_special)
        if self.table is None:
            return str(self._inner.decode(shown, skip_special_tokens=False))
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
            return str(self._inner.decode([token_id], skip_special_tokens=False)).encode()
        return self.table[token_id]

    def first_bytes(self, token_id: int) -> bytes:
        """The bytes that `token_id` gives at the very start of a text."""
        assert self.table is not None, "only tokenizers with a byte table strip by token"
        raw = self.table[token_id]
        if self.strip == "space":
            return raw.removeprefix(b" ")
        if self.strip == "first-token":
            return raw.replace(b" ", b"") if _SPACE in (self._tokens[token_id] or "") else raw
        return raw

    def _blind(self) -> tokenizers.Tokenizer:
        """A copy that spells special tokens out: the switch is a property of the whole object."""
        with self._plain_lock:
            if self._plain is None:
                plain = tokenizers.Tokenizer.from_str(self._inner.to_str())
                plain.encode_special_tokens = True
                self._plain = plain
            return self._plain

    def _find_ends(self, card: ModelCard) -> tuple[list[int], list[int]]:
        """The ids that go before every text ([BOS] or [], or what the post-processor puts there),
        and those behind a whole one, which only the post-processor knows."""
        bare: list[int] = self._inner.encode("a", add_special_tokens=False).ids
        full: list[int] = self._inner.encode("a", add_special_tokens=True).ids
        places = range(len(full) - len(bare) + 1)
        at = next((at for at in places if full[at : at + len(bare)] == bare), None)
        suffix = [] if at is None else full[at + len(bare) :]
        if card.add_bos is not None:
            return [card.bos_id] if card.add_bos and card.bos_id is not None else [], suffix
        if at is None:
            raise ModelError(
                "tokenizer.json's post-processor changes the tokens of the text itself"
            )
        return full[:at], suffix

    def _build_table(self, decoder: dict[str, Any] | None, added: dict[int, str]) -> None:
        """Fill `table` and `strip` if the decoder is one of the three kinds that a table can be."""
        steps = _flat(decoder)
        kinds = {step["type"] for step in steps}
        if kinds == {"ByteLevel"}:
            self.table = [token_bytes(t or "") for t in self._tokens]
            for i, text in added.items():
                self.table[i] = text.encode()
            return
        if not kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
            return
        for step in steps:
            if step["type"] == "Replace" and (
                step["pattern"] != {"String": _SPACE} or step["content"] != " "
            ):
                return
            if step["type"] == "Strip":
                if (step["content"], step["start"], step["stop"]) != (" ", 1, 0):
                    return
                self.strip = "space"
            if step["type"] == "Metaspace":
                if step["replacement"] != _SPACE:
                    return
                if step.get("prepend_scheme", "always") != "never":
                    self.strip = "first-token"
        if not kinds & {"Replace", "Metaspace"} or {"Strip", "Metaspace"} <= kinds:
            return
        fallback = "ByteFallback" in kinds
        self.table = [_piece_bytes(t or "", fallback) for t in self._tokens]


class NoTokenizer(Tokenizer):
    """Where a model folder has none: prompts are ids, answers are ids without text.

    Whatever needs text raises InvalidRequest.
    """

    def __init__(self, card: ModelCard) -> None:
        empty = tokenizers.Tokenizer(tokenizers.models.BPE())
        empty.decoder = tokenizers.decoders.ByteLevel()  # a byte table without entries
        super().__init__(empty, card)

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


def _text_or_none(raw: bytes) -> str | None:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None


def _flat(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return [{"type": "none"}]
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in _flat(inner)]
    return [decoder]


def _piece_bytes(token: str, fallback: bool) -> bytes:
    """SentencePiece: ▁ is a space, <0x0A> is a byte."""
    if fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace(_SPACE, " ").encode()


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
    if files.kind == "fake":
        return Tokenizer(fake_tokenizer.build(), card)
    if files.kind == "gguf":
        return Tokenizer(gguf_tokenizer.build(read_header(files.path).metadata), card)
    return Tokenizer(_from_json(files.path / "tokenizer.json"), card)


def _from_json(path: Path) -> tokenizers.Tokenizer:
    if not path.exists():
        raise ModelError(f"{path} is missing: only fast tokenizers are supported")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception for whatever it cannot parse
        raise ModelError(f"cannot read {path}: {error}") from None
