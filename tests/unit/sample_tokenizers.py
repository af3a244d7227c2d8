"""Small tokenizers, one of each kind that a model may bring, without any file."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from headrace.native.build import Unavailable
from headrace.sources.card import ModelCard
from headrace.sources.gguf import Strings
from headrace.text import fake_tokenizer, gguf_tokenizer, piece_encoder
from headrace.text.byte_level import CHAR_OF
from headrace.text.encoder import LibraryEncoder
from headrace.text.tokenizer import Tokenizer

WORDS = (
    "▁",
    "▁hello",
    "▁world",
    "lo",
    "é",
    "漢",
    "▁▁",
    "he",
    "o",
    "l",
    "h",
    "e",
    ".",
    "w",
    "r",
    "d",
)


def card(
    *, bos_id: int | None = 1, eos_ids: tuple[int, ...] = (2,), add_bos: bool | None = True
) -> ModelCard:
    return ModelCard(1000, bos_id, eos_ids, add_bos, None, {})


def byte_level() -> Tokenizer:
    """The fake model's: every byte is a token, ids 256..258 are special."""
    return Tokenizer(LibraryEncoder(fake_tokenizer.build()), card(bos_id=256, eos_ids=(256, 258)))


def byte_merges() -> Tokenizer:
    """Byte-level with tokens that end or begin inside a character, and an added plain token."""
    pieces = [CHAR_OF[b] for b in range(256)]
    halves = ["é 🐙".encode()[:4], "🐙".encode()[:2], "🐙".encode()[2:], b" \xe6", b"\xbc\xa2"]
    pieces += ["".join(CHAR_OF[b] for b in half) for half in halves]
    built = tokenizers.Tokenizer(
        models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[])
    )
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    built.add_tokens([AddedToken("é|tool", special=False, normalized=False)])
    return Tokenizer(LibraryEncoder(built), card(bos_id=None, add_bos=False))


def packed(texts: Sequence[str]) -> Strings:
    """As a header that was read has them."""
    raw = [text.encode() for text in texts]
    ends = accumulate(8 + len(one) for one in raw)
    return Strings(b"".join(struct.pack("<Q", len(one)) + one for one in raw), array("Q", ends))


def sentencepiece_metadata(*, prefix: bool = True) -> dict[str, Any]:
    """GGUF metadata of a "llama" tokenizer: <unk>, <s>, </s>, 256 bytes, words."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *WORDS]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(WORDS),
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(n) for n in range(len(WORDS))],
        "tokenizer.ggml.add_space_prefix": prefix,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def sentencepiece(*, prefix: bool = True) -> Tokenizer:
    return Tokenizer(gguf_tokenizer.encoder(sentencepiece_metadata(prefix=prefix)), card())


def merged_pieces(*, prefix: bool = True) -> Tokenizer | None:
    """The same without a list of merges; None where there is no compiler."""
    metadata = sentencepiece_metadata(prefix=prefix)
    metadata["tokenizer.ggml.tokens"] = packed(metadata["tokenizer.ggml.tokens"])
    made = piece_encoder.encoder_of(metadata)
    return None if isinstance(made, Unavailable) else Tokenizer(made, card())


def metaspace() -> Tokenizer:
    """Unigram with the Metaspace decoder, which drops the spaces of the first token."""
    pieces = [("<unk>", -9.0), ("<s>", 0.0), ("</s>", 0.0), *((word, -2.0) for word in WORDS)]
    built = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    built.pre_tokenizer = pre_tokenizers.Metaspace()
    built.decoder = decoders.Metaspace()
    built.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(LibraryEncoder(built), card())


def wordpiece() -> Tokenizer:
    """A decoder that is no table: ## joins, everything else is set apart by a space."""
    words = ["[UNK]", "[CLS]", "[SEP]", "hello", "world", "##ing", "##s", ".", "é", "漢"]
    built = tokenizers.Tokenizer(
        models.WordPiece(vocab={word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    )
    built.normalizer = normalizers.Lowercase()
    built.pre_tokenizer = pre_tokenizers.Whitespace()
    built.decoder = decoders.WordPiece(cleanup=False)
    built.add_special_tokens(["[CLS]", "[SEP]"])
    return Tokenizer(LibraryEncoder(built), card())


_PIECES = {
    "merged_pieces": merged_pieces(),
    "merged_pieces_no_prefix": merged_pieces(prefix=False),
}
KINDS = {
    "byte_level": byte_level(),
    "byte_merges": byte_merges(),
    "sentencepiece": sentencepiece(),
    "sentencepiece_no_prefix": sentencepiece(prefix=False),
    **{name: made for name, made in _PIECES.items() if made is not None},
    "metaspace": metaspace(),
    "wordpiece": wordpiece(),
}
