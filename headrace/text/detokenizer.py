"""Token ids to text, one token at a time, never half a character.

Two machines with the same two methods. Over a byte table: append the token's bytes, hand out what
is complete UTF-8, hold the rest; what can never become a character is U+FFFD at once. Without a
table: compare two decodes of a short window of ids. Either way the outputs, joined, are what
`Tokenizer.decode` gives for all ids at once.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence
from typing import Protocol

from headrace.text.tokenizer import Tokenizer

_TAIL = (
    8  # prompt ids that a window begins with: enough for a decoder to see that it is inside text
)
_MAX_HELD = 16  # tokens held for the sake of a character; no character has more bytes than 4


class Detokenizer(Protocol):
    """A feed/flush machine for one choice."""

    def feed(self, token_id: int) -> str:
        """The text that is complete now. Never raises; an unknown id adds nothing."""

    def flush(self) -> str:
        """What was held back: U+FFFD for an unfinished character. Call once, at the end."""

    # For who keeps account of tokens; see `text.trace`.

    def feed_raw(self, token_id: int) -> tuple[str, bytes | None]:
        """As `feed`, with the bytes that the token adds; None if it is not shown."""

    @property
    def first(self) -> bool:
        """Nothing is before the next token, so it may lose a leading space."""

    @property
    def held(self) -> bytes:
        """The bytes of an unfinished character, if `by_bytes`."""

    @property
    def holding(self) -> bool:
        """Something is held back."""

    @property
    def by_bytes(self) -> bool:
        """Tokens have bytes of their own. Else a token's bytes are the text that came with it."""


def detokenizer(
    tokenizer: Tokenizer,
    *,
    skip_special: bool = True,
    prompt_tail: Sequence[int] | None = (),
    kept: frozenset[int] = frozenset(),
) -> Detokenizer:
    """A fresh machine.

    kept: special tokens that are shown in spite of `skip_special`.

    prompt_tail: ids before the first fed one: the prompt, or at least its last eight. () when there
    are none, so that the text starts as `decode` starts it; None when there are some but unknown.
    A leading space is kept when the prompt holds any text, so prompt + output reads on (B004).
    """
    hidden = tokenizer.special_ids - kept if skip_special else frozenset[int]()
    if tokenizer.table is None:
        return _WindowDetokenizer(tokenizer, hidden, prompt_tail or ())
    inside = prompt_tail is None or bool(tokenizer.shown(prompt_tail, skip_special=skip_special))
    return _TableDetokenizer(tokenizer, hidden, inside)


class _TableDetokenizer:
    """`_held` is an unfinished UTF-8 sequence of at most three bytes."""

    __slots__ = ("_held", "_hidden", "_inside", "_size", "_table", "_texts", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int], inside: bool) -> None:
        assert tokenizer.table is not None, "a table detokenizer needs a byte table"
        self._tokenizer = tokenizer
        self._table = tokenizer.table
        self._texts = tokenizer.texts
        self._size = len(self._table)
        self._hidden = hidden
        self._held = b""
        self._inside = inside or tokenizer.strip == "nothing"

    def feed(self, token_id: int) -> str:
        if token_id in self._hidden or not 0 <= token_id < self._size:
            return ""
        if self._inside:
            if not self._held and (text := self._texts[token_id]) is not None:
                return text
            raw = self._table[token_id]
        else:
            raw = self._table[token_id]
            if not raw:
                return ""
            self._inside = True
            raw = self._tokenizer.first_bytes(token_id)
        text, used = utf_8_decode(self._held + raw, "replace", False)
        self._held = (self._held + raw)[used:]
        return text

    def flush(self) -> str:
        text = self._held.decode("utf-8", errors="replace")
        self._held = b""
        return text

    by_bytes = True

    def feed_raw(self, token_id: int) -> tuple[str, bytes | None]:
        if token_id in self._hidden or not 0 <= token_id < self._size:
            return "", None
        first = self.first
        raw = self._tokenizer.first_bytes(token_id) if first else self._table[token_id]
        return self.feed(token_id), raw if self._table[token_id] else None

    @property
    def first(self) -> bool:
        return not self._inside

    @property
    def held(self) -> bytes:
        return self._held

    @property
    def holding(self) -> bool:
        return bool(self._held)


class _WindowDetokenizer:
    """`_ids[:_done]` are the ids last handed out (`_before` is their text), the rest are held back.

    Both hold only ids that show, so that a decoder always sees that it is inside a text.
    """

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int], before: Sequence[int]) -> None:
        self._tokenizer, self._hidden = tokenizer, hidden
        self._ids = [token for token in before if self._shows(token)][-_TAIL:]
        self._done = len(self._ids)
        self._before = self._decode(self._ids)

    def _shows(self, token_id: int) -> bool:
        known = self._tokenizer.shown((token_id,), skip_special=False)
        return bool(known) and token_id not in self._hidden

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special=False)

    def feed(self, token_id: int) -> str:
        if not self._shows(token_id):
            return ""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        held = len(self._ids) - self._done
        whole = text.startswith(self._before) and not text.endswith("\ufffd")
        return self._hand_out(text) if whole or held >= _MAX_HELD else ""

    def flush(self) -> str:
        return self._hand_out(self._decode(self._ids))

    by_bytes = False
    held = b""

    def feed_raw(self, token_id: int) -> tuple[str, bytes | None]:
        if not self._shows(token_id):
            return "", None
        text = self.feed(token_id)
        return text, text.encode()

    @property
    def first(self) -> bool:
        return not self._ids

    @property
    def holding(self) -> bool:
        return len(self._ids) > self._done

    def _hand_out(self, text: str) -> str:
        """The new part of `text`. If the decoder changed what was sent, the part that differs."""
        common = len(self._before)
        if not text.startswith(self._before):
            pairs = zip(self._before, text, strict=False)
            common = next((i for i, (a, b) in enumerate(pairs) if a != b), min(common, len(text)))
        self._ids = self._ids[self._done :] or self._ids
        self._done = len(self._ids)
        self._before = self._decode(self._ids)
        return text[common:]
