"""Vocabulary: what a grammar must know of a tokenizer, as llguidance takes it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from llguidance import LLTokenizer, TokenizerWrapper

from headrace.errors import InvalidRequest

_SPELLINGS = 4096  # of forced texts that are kept: a grammar forces the same few again and again
_SPECIAL = b"\xff"  # llguidance: what begins with this byte is no text


def special_name(text: str) -> str:
    """How a Lark grammar names a special token: as it is if that is <like this>, else <|it|>."""
    plain = text.startswith("<") and text.endswith(">") and not text.startswith("<[")
    return text if plain else f"<|{text}|>"


class Vocabulary:
    """The bytes of every token, from the same table that makes text of answers.

    tokens [id] -> bytes; special: ids that no text may match; end_ids: what the model ends with;
    size: logits a row, at least len(tokens); encode: text -> ids, special tokens spelled out.
    """

    def __init__(
        self,
        tokens: Sequence[bytes],
        special: frozenset[int],
        end_ids: Sequence[int],
        size: int,
        encode: Callable[[str], list[int]],
    ) -> None:
        if not any(tokens):
            raise InvalidRequest(
                "structured output needs text, and this model has no tokenizer.json",
                param="structured_outputs",
            )
        self.tokens, self.special, self.size = list(tokens[:size]), special, size
        self.end_ids = [i for i in end_ids if 0 <= i < size]
        self._encode = encode
        self._spell = functools.lru_cache(_SPELLINGS)(self._spelled)

    def build(self) -> LLTokenizer:
        """The trie of all tokens; 0.3 s for 50 000 of them."""
        return LLTokenizer(
            TokenizerWrapper(_Inner(self)), n_vocab=self.size, eos_token=self.end_ids or [0]
        )

    def spell(self, text: str) -> list[int]:
        """The tokens that the model itself would write for `text`, in the middle of a text."""
        return list(self._spell(text))

    def _spelled(self, text: str) -> Sequence[int]:
        ids = self._encode(text)
        if self._bytes(ids) == text.encode():
            return ids
        ids = self._encode("\n" + text)  # a SentencePiece model puts a space before a text
        for at in range(1, min(4, len(ids)) + 1):
            if self._bytes(ids[at:]) == text.encode():
                return ids[at:]
        return self._greedy(text.encode())

    def _bytes(self, ids: Sequence[int]) -> bytes:
        return b"".join([self.tokens[i] for i in ids])

    def _greedy(self, raw: bytes) -> list[int]:
        """Longest tokens first: right, if not what the model would choose."""
        known: dict[bytes, int] = {}
        for i, token in enumerate(self.tokens):
            if token and i not in self.special:
                known.setdefault(token, i)
        longest = max(map(len, known))
        out, at = list[int](), 0
        while at < len(raw):
            size = next(
                (n for n in range(min(longest, len(raw) - at), 0, -1) if raw[at : at + n] in known),
                0,
            )
            if not size:
                break  # a byte that no token holds: llguidance forces no further
            out.append(known[raw[at : at + size]])
            at += size
        return out


class _Inner:
    """The shape that llguidance's TokenizerWrapper asks for."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.end_ids[0] if vocabulary.end_ids else 0
        self.special_token_ids = sorted(vocabulary.special)
        self.tokens = [
            _SPECIAL + special_name(token.decode("utf-8", "replace")).encode()
            if i in vocabulary.special
            else token
            for i, token in enumerate(vocabulary.tokens)
        ]
        self._vocabulary = vocabulary

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TypeError("text, not bytes")  # so that llguidance cuts at whole characters
        return self._vocabulary.spell(text)
