"""Find phrases of a list in text that comes in pieces: leftmost, then longest, each on its own.

Case does not matter. Where a phrase begins or ends with a letter of a script that parts words by
blanks, it must not go on there: `ass` is not in `class`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from headrace.errors import ConfigError

MAX_PHRASES, MAX_CHARS = 20_000, 200
_EDGE = "0-9A-Za-z_\u00c0-\u02af\u0370-\u052f"  # digits; Latin, Greek and Cyrillic letters
_is_edge = re.compile(f"[{_EDGE}]").match


def fold(text: str) -> str:
    """Lower case, a character for a character, and none depends on its neighbours."""
    if text.isascii():
        return text.lower()
    return "".join(map(_fold, text))


def _fold(char: str) -> str:
    low = char.lower()
    return "σ" if low == "ς" else low if len(low) == 1 else char


class Phrases:
    """A list to search for. `search` and `pending` take folded text."""

    def __init__(self, phrases: Iterable[str]) -> None:
        """Folded, none empty."""
        self._words = frozenset(phrases)
        assert self._words, "an empty list finds nothing"
        self._prefixes = {word[:size] for word in self._words for size in range(1, len(word) + 1)}
        self._longest = max(map(len, self._words))
        firsts = {word[0] for word in self._words}
        inside = "".join(re.escape(char) for char in firsts if _is_edge(char))
        others = "".join(re.escape(char) for char in firsts if not _is_edge(char))
        ways = [f"(?<![{_EDGE}])[{inside}]"] if inside else []
        ways += [f"[{others}]"] if others else []
        self._starts = re.compile("|".join(ways))  # where a phrase may begin

    def search(self, text: str, at: int) -> tuple[int, int] | None:
        """The first phrase that begins at `at` or later, the longest of those that begin there."""
        for found in self._starts.finditer(text, at):
            start, end, best = found.start(), found.end(), 0
            while end <= len(text) and (part := text[start:end]) in self._prefixes:
                if part in self._words and not self._goes_on(text, end):
                    best = end
                end += 1
            if best:
                return start, best
        return None

    @staticmethod
    def _goes_on(text: str, end: int) -> bool:
        return bool(_is_edge(text, end - 1) and _is_edge(text, end))

    def pending(self, text: str, at: int) -> int:
        """Where in `text` the first phrase begins that more text could complete or break off."""
        for start in range(max(at, len(text) - self._longest), len(text)):
            if text[start:] in self._prefixes:
                return start
        return len(text)


def read_phrases(path: str, kind: str) -> dict[str, str]:
    """Phrase, folded -> what stands behind `=>` in its line, "" if nothing does.

    One phrase a line; `#` begins a comment line. Raises ConfigError.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--hook {kind}=words:{path}: {error}", param="hook") from None
    found: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        phrase, _, meaning = line.partition("=>")
        phrase = fold(phrase.strip())
        if not phrase or line.lstrip().startswith("#"):
            continue
        if len(phrase) > MAX_CHARS:
            raise ConfigError(f"{path}:{number} is over {MAX_CHARS} characters", param="hook")
        found[phrase] = meaning.strip()
    if not found or len(found) > MAX_PHRASES:
        raise ConfigError(f"{path}: 1 to {MAX_PHRASES} phrases, not {len(found)}", param="hook")
    return found
