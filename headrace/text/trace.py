"""Which bytes and characters of a text each token gave, in step with what is sent.

A span leaves when the character that holds its token's last byte has left: text held back for half
a character, or for a stop string, holds back its tokens too. Over all spans of an ended choice

    the `raw`, joined and read as UTF-8 with U+FFFD for what is not, are the text;
    text[start of one : start of the next], joined, is the text.

A token that is not shown (a special one, the stop token) has raw None. Of tokens that a stop string
cut off, raw holds the bytes before the cut.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from headrace.text.detokenizer import Detokenizer, detokenizer
from headrace.text.tokenizer import Tokenizer

_OPEN = -1  # Span.end while the character of its last byte is not complete


class Span(msgspec.Struct):
    """One token's place in the text of its choice, in characters."""

    token: int
    raw: bytes | None  # what it adds to the text
    start: int  # of the character that its first byte is in; characters before it are complete
    first: bool  # nothing is shown before it, where some tokenizers drop a space
    end: int  # characters that must be out for it to be out
    lead: bytes  # the part of an unfinished character that stood before it


class Trace:
    """A detokenizer that keeps account. See `detokenizer.Detokenizer`; then `release`."""

    def __init__(self, inner: Detokenizer) -> None:
        self._inner = inner
        self._spans: deque[Span] = deque()
        self._open: list[Span] = []
        self._chars = 0  # handed on, to whoever looks for stop strings
        self._sent = 0  # released as text that can no longer change

    @property
    def held(self) -> bytes:
        """As `Detokenizer.held`."""
        return self._inner.held

    def feed(self, token_id: int) -> str:
        """As `Detokenizer.feed`."""
        inner, start = self._inner, self._chars
        first, lead = inner.first, inner.held
        text, raw = inner.feed_raw(token_id)
        self._settle(text)
        span = Span(token_id, raw, start, first, self._chars, lead)
        self._spans.append(span)
        if inner.holding:
            span.end = _OPEN
            self._open.append(span)
        return text

    def flush(self) -> str:
        """As `Detokenizer.flush`."""
        text = self._inner.flush()
        if not self._inner.by_bytes:
            shown = [span for span in self._open if span.raw is not None]
            for span in shown[-1:]:
                span.raw = (span.raw or b"") + text.encode()
        self._settle(text)
        return text

    def _settle(self, text: str) -> None:
        """An unfinished character is one character of what comes out next, the first."""
        if text:
            for span in self._open:
                span.end = self._chars + 1
            self._open.clear()
            self._chars += len(text)

    def skip(self, token_id: int) -> None:
        """A token that is not fed: it ended the choice and is not shown."""
        self._spans.append(Span(token_id, None, self._chars, False, self._chars, b""))

    def release(self, text: str, *, last: bool) -> list[Span]:
        """The spans that leave with `text`. `last`: the choice ended with it, so all leave."""
        self._sent += len(text)
        out: list[Span] = []
        spans = self._spans
        while spans and (last or _OPEN < spans[0].end <= self._sent):
            span = spans.popleft()
            if last and (span.end == _OPEN or span.end > self._sent):
                _cut(span, self._sent)
            out.append(span)
        return out


def _cut(span: Span, chars: int) -> None:
    """The text ends after `chars` characters, before the span's end."""
    if span.raw is not None:
        span.raw = _bytes_of(span.lead + span.raw, max(0, chars - span.start))[len(span.lead) :]
    span.start = min(span.start, chars)


def _bytes_of(raw: bytes, chars: int) -> bytes:
    """The fewest first bytes that hold so many characters of `raw`, read as UTF-8 with U+FFFD."""
    wanted = raw.decode("utf-8", "replace")[:chars]
    for size in range(len(raw) + 1):
        if raw[:size].decode("utf-8", "replace") == wanted and _whole(raw, size, chars):
            return raw[:size]
    raise AssertionError(f"{chars} characters of {raw!r} end nowhere")


def _whole(raw: bytes, size: int, chars: int) -> bool:
    """Whether no character spans the cut at `size`."""
    return len(raw[size:].decode("utf-8", "replace")) + chars == len(raw.decode("utf-8", "replace"))


def prompt_spans(
    tokenizer: Tokenizer, ids: Sequence[int], text: str | None
) -> tuple[list[Span], str]:
    """The spans of a prompt, and the text that they add up to.

    text: what the caller gave; None: it gave ids. It comes back unless the tokenizer changes texts.
    What the tokenizer puts before every text is not shown, other special tokens are.
    """
    prefix = tokenizer.prefix_ids
    hidden = len(prefix) if text is not None and list(ids[: len(prefix)]) == prefix else 0
    if text == "":
        hidden = len(ids)  # an empty prompt is begun for the model's sake
    spans, shown = _spans_of(tokenizer, ids, hidden)
    if hidden and shown != text:
        plain = _spans_of(tokenizer, ids, 0)  # the text itself may begin with the prefix
        if plain[1] == text:
            return plain
    return spans, shown


def _spans_of(tokenizer: Tokenizer, ids: Sequence[int], hidden: int) -> tuple[list[Span], str]:
    trace = Trace(detokenizer(tokenizer, skip_special=False))
    for token in ids[:hidden]:
        trace.skip(token)
    text = "".join([trace.feed(token) for token in ids[hidden:]]) + trace.flush()
    return trace.release(text, last=True), text


def label(tokenizer: Tokenizer, token_id: int, *, first: bool = False) -> str:
    """A token's own text; bytes that are not whole characters are written \\xNN.

    `first`: at the start of a text. Tokens without text are `token_id:N`.
    """
    raw = bytes_of(tokenizer, token_id, first=first)
    return raw.decode("utf-8", "backslashreplace") if raw else f"token_id:{token_id}"


def bytes_of(tokenizer: Tokenizer, token_id: int, *, first: bool = False) -> bytes:
    """A token's own bytes, shown or not."""
    raw = tokenizer.id_to_bytes(token_id)
    if first and raw and tokenizer.table is not None:
        return tokenizer.first_bytes(token_id) or raw
    return raw
