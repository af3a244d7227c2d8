"""What a tokenizer makes of texts: characters a token, and tokens that no text gives."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from headrace.text.samples import SAMPLES
from headrace.text.tokenizer import Tokenizer

# Before and after a token's text: the start of a text, words, lines and numbers around it.
_AROUND = (("", ""), ("a", ""), ("a ", " a"), ("\n", "\n"), ("1", "1"), (".", "."))
_BATCH = 4096  # texts that are encoded at once


class Survey(msgspec.Struct, frozen=True):
    """Facts of one tokenizer. Lists hold ids, in order.

    `parts`: tokens that hold no whole characters, so that no text shows them alone.
    `unreachable`: tokens of whole characters that come back when their text is encoded in none of
    the surroundings tried; None = this tokenizer gives tokens no texts of their own.
    """

    vocabulary: int  # ids, special ones among them
    special: int
    parts: int | None
    unreachable: list[int] | None
    characters_per_token: dict[str, float]  # kind of text -> characters a token


def survey(tokenizer: Tokenizer) -> Survey:
    """Takes a second or two for a large vocabulary."""
    texts, special = tokenizer.texts, tokenizer.special_ids
    whole = [i for i, text in enumerate(texts) if text and i not in special]
    parts = sum(text is None and i not in special for i, text in enumerate(texts))
    return Survey(
        vocabulary=tokenizer.vocab_size,
        special=len(special),
        parts=parts if texts else None,
        unreachable=_unreachable(tokenizer, whole) if texts else None,
        characters_per_token={
            kind: len(text) / len(tokenizer.encode(text, add_special=False))
            for kind, text in SAMPLES.items()
        },
    )


def _unreachable(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int]:
    left = list(ids)
    for before, after in _AROUND:
        found: list[int] = []
        for start in range(0, len(left), _BATCH):
            some = left[start : start + _BATCH]
            texts = [f"{before}{tokenizer.texts[i]}{after}" for i in some]
            encoded = tokenizer.encode_batch(texts, add_special=False, parse_special=False)
            found += [i for i, made in zip(some, encoded, strict=True) if i not in made]
        left = found
    return left
