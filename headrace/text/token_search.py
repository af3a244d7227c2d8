"""Which tokens hold a piece of text."""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from itertools import accumulate

from headrace.text.tokenizer import Tokenizer

_BETWEEN = "\0"


class TokenSearch:
    """The texts of a vocabulary, one after another, so that a search is one pass in C."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        texts = [text or "" for text in tokenizer.texts]
        self._all = _BETWEEN.join(texts)
        self._starts = list(accumulate((len(text) + 1 for text in texts), initial=0))

    def holding(self, piece: str) -> list[int]:
        """The ids, ascending, whose text contains `piece`, which is not empty."""
        if _BETWEEN in piece:
            return []
        found: list[int] = []
        at = self._all.find(piece)
        while at >= 0:
            token = bisect_right(self._starts, at) - 1
            found.append(token)
            at = self._all.find(piece, self._starts[token + 1])
        return found


@lru_cache(maxsize=2)
def token_search(tokenizer: Tokenizer) -> TokenSearch:
    """Built at its first use."""
    return TokenSearch(tokenizer)
