"""Link an answer to the documents it repeats, or names by their number: `cite=overlap`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from headrace.errors import ConfigError
from headrace.hooks.contract import Citation

TEXT_FIELDS = ("text", "content", "contents", "snippet")
MAX_CHARS = 100_000  # of all documents of a request; what is behind is not looked at
RUN = 5  # words in a row that make a quotation
PLACES = 4  # of the same words in an answer that are looked at
_words = re.compile(r"\w+").finditer
_marks = re.compile(r"\[(\d{1,4})\]").finditer
_sentence_ends = re.compile(r"[.!?\n]\s*").finditer


class Word(NamedTuple):
    """`text[start:end]`, in lower case."""

    start: int
    end: int
    word: str


class Run(NamedTuple):
    """Quoted words: how many runs of RUN words overlap in it, and where it is in the document."""

    length: int
    document: int
    start: int
    end: int


class Overlap:
    """Cites where an answer has at least as many words in a row as a document (`cite=overlap:8`; 5
    if no number is given), and each sentence with a mark such as [2]: documents count from 1.

    Case and punctuation do not matter. Raises ConfigError.
    """

    def __init__(self, run: str) -> None:
        if run and not (run.isdecimal() and 2 <= int(run) <= 100):
            raise ConfigError(f"--hook cite=overlap:{run}: 2 to 100 words", param="hook")
        self._run = int(run or RUN)

    def cite(self, text: str, documents: Sequence[Mapping[str, Any]]) -> list[Citation]:
        """See `Citer`."""
        words, texts = _split(text), list(_texts(documents))
        found = self._quoted(words, texts)
        cited = [
            Citation(
                words[at].start,
                words[at + run.length + self._run - 2].end,
                run.document,
                texts[run.document][run.start : run.end],
            )
            for at, run in found
        ]
        cited += _marked(text, len(texts))
        return sorted(cited, key=lambda one: (one.start, one.end))

    def _quoted(self, words: Sequence[Word], texts: Sequence[str]) -> list[tuple[int, Run]]:
        """The longest runs from the left, none in another: place in `words`, run."""
        size = self._run
        grams: dict[tuple[str, ...], list[int]] = {}
        for at in range(len(words) - size + 1):
            places = grams.setdefault(tuple(word.word for word in words[at : at + size]), [])
            if len(places) < PLACES:
                places.append(at)
        best: dict[int, Run] = {}
        for number, text in enumerate(texts) if grams else ():
            there = _split(text)
            before: dict[int, int] = {}
            for spot in range(len(there) - size + 1):
                key = tuple(word.word for word in there[spot : spot + size])
                before = {at: before.get(at - 1, 0) + 1 for at in grams.get(key, ())}
                for at, length in before.items():
                    first = at - length + 1
                    if first not in best or length > best[first].length:
                        start, end = there[spot - length + 1].start, there[spot + size - 1].end
                        best[first] = Run(length, number, start, end)
        out, at = [], 0
        for first in sorted(best):
            if first >= at:
                out.append((first, best[first]))
                at = first + best[first].length + size - 1
        return out


def _split(text: str) -> list[Word]:
    return [Word(*found.span(), found.group().lower()) for found in _words(text)]


def _texts(documents: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What is said in each document, MAX_CHARS in all."""
    left = MAX_CHARS
    for document in documents:
        texts = (document.get(field) for field in TEXT_FIELDS)
        text = next((text for text in texts if isinstance(text, str)), "")[:left]
        left -= len(text)
        yield text


def _marked(text: str, count: int) -> Iterator[Citation]:
    """The sentence before each mark that names a document."""
    for mark in _marks(text):
        if not 1 <= int(mark[1]) <= count:
            continue
        start = 0
        for end in _sentence_ends(text, 0, mark.start()):
            if text[end.end() : mark.start()].strip():
                start = end.end()
        yield Citation(start, mark.end(), int(mark[1]) - 1)
