"""Tokenising piece by piece, so that what many prompts share is tokenised once.

A text is cut where its tokens cannot reach across: before special tokens, and in long stretches
between a word and a blank, or behind a line's end. Where a text is cut depends on what stands
before the cut and next to it alone, so texts with a common beginning have common pieces. Whether
this holds for a tokenizer is tried out on samples; one for which it does not is not cut there.
"""

from __future__ import annotations

import re
import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from typing import Literal

from headrace.text.samples import SAMPLES
from headrace.text.tokenizer import Tokenizer

Cuts = Literal["words", "special", "none"]
PIECE_CHARS = 1024  # of a long stretch, at least
ENTRY_BYTES = 256  # of a piece beside its text and its ids
_GAP = re.compile(r"(?<=\S)\n(?=\w)|(?<=\w)(?= [A-Za-z])")


class PieceCache:
    """Encodes as `tokenizer` does, and remembers pieces. Safe from several threads.

    max_bytes: of the pieces that are remembered; 0 = none.
    """

    def __init__(self, tokenizer: Tokenizer, max_bytes: int) -> None:
        self._tokenizer = tokenizer
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._known: OrderedDict[str, array[int]] = OrderedDict()  # oldest first
        self.used_bytes = self.hits = self.misses = 0  # hits and misses: characters
        self._special = _pattern(tokenizer)
        self.cuts: Cuts = next((cuts for cuts in _WAYS if self._holds(cuts)), "none")

    def encode(self, text: str, *, add_special: bool) -> array[int]:
        """See `Tokenizer.encode`."""
        pieces = list(self._cut(text, self.cuts))
        found, missing = self._look_up(pieces)
        if missing:
            encoded = self._tokenizer.encode_batch(missing, add_special=False)
            self._remember(dict(zip(missing, map(_packed, encoded), strict=True)), found)
        ids = array("I")
        for piece in pieces:
            ids.extend(found[piece])
        prefix = _packed(self._tokenizer.prefix_ids if add_special else [])
        return ids if ids[: len(prefix)] == prefix else prefix + ids

    def _look_up(self, pieces: list[str]) -> tuple[dict[str, array[int]], list[str]]:
        found: dict[str, array[int]] = {}
        missing: dict[str, None] = {}
        with self._lock:
            for piece in pieces:
                ids = self._known.get(piece)
                if ids is None:
                    missing[piece] = None
                    self.misses += len(piece)
                else:
                    self._known.move_to_end(piece)
                    found[piece] = ids
                    self.hits += len(piece)
        return found, list(missing)

    def _remember(self, new: dict[str, array[int]], found: dict[str, array[int]]) -> None:
        found.update(new)
        with self._lock:
            for piece, ids in new.items():
                if piece not in self._known:
                    self._known[piece] = ids
                    self.used_bytes += _size(piece, ids)
            while self.used_bytes > self._max_bytes:
                self.used_bytes -= _size(*self._known.popitem(last=False))

    def _cut(self, text: str, cuts: Cuts) -> Iterator[str]:
        start = 0
        if cuts != "none" and self._special is not None:
            for match in self._special.finditer(text):
                if match.start() > start:
                    yield from _stretch(text, start, match.start(), cuts)
                    start = match.start()
        if start < len(text):
            yield from _stretch(text, start, len(text), cuts)

    def _holds(self, cuts: Cuts) -> bool:
        """Samples have the same tokens in pieces and whole."""
        marks = sorted(self._tokenizer.special_texts)[:4]
        joined = "".join(f"{mark}{text}" for mark in (*marks, "") for text in SAMPLES.values())
        long = [text * (1 + 3 * PIECE_CHARS // len(text)) for text in SAMPLES.values()]
        for text in (joined, "".join(long), f"{joined} {joined}", *long):
            pieces = list(self._cut(text, cuts))
            encoded = self._tokenizer.encode_batch(pieces, add_special=False)
            whole = self._tokenizer.encode(text, add_special=False)
            if [i for ids in encoded for i in ids] != whole:
                return False
        return True


_WAYS: tuple[Cuts, ...] = ("words", "special")


def _stretch(text: str, start: int, end: int, cuts: Cuts) -> Iterator[str]:
    """Without special tokens, but for its first one."""
    while cuts == "words" and end - start > 2 * PIECE_CHARS:
        gap = _GAP.search(text, start + PIECE_CHARS, end)
        if gap is None:
            break
        yield text[start : gap.end()]
        start = gap.end()
    yield text[start:end]


def _pattern(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Finds special tokens, the longest that begin somewhere."""
    texts = sorted(tokenizer.special_texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, texts))) if texts else None


def _packed(ids: list[int]) -> array[int]:
    return array("I", ids)


def _size(piece: str, ids: array[int]) -> int:
    return sys.getsizeof(piece) + sys.getsizeof(ids) + ENTRY_BYTES
