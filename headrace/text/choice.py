"""The text of one choice: tokens in, text that can be sent out."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from headrace.messages import End, Reason
from headrace.text.detokenizer import Detokenizer, detokenizer
from headrace.text.stops import StopStrings
from headrace.text.tokenizer import Tokenizer
from headrace.text.trace import Span, Trace


class Piece(msgspec.Struct, frozen=True):
    """What one `feed` gives. `stop_at`: tokens of this choice, from its first, up to and including
    the one that completed a stop string; None while there was none. Later pieces repeat it.
    """

    text: str
    stop_at: int | None = None


class Heard(msgspec.Struct, frozen=True):
    """What one `hear` gives. `finish`: the choice ended with this news, and why. `overrun`: a stop
    string ended it before the engine did: tell the engine to finish after `n_tokens` tokens.
    """

    text: str
    finish: Reason | None = None
    overrun: bool = False
    spans: Sequence[Span] = ()  # of tokens that are now out, where they are traced


class ChoiceText:
    """A feed/flush machine: detokenizer, then stop strings.

    Feed the tokens as they come, except a stop token that ended the choice: give that to `end`.

    Args:
        stops: stop strings, none empty.
        include_stop: show the stop string, or the stop token's text, that ended the choice.
        prompt_tail: the prompt's ids, or the last eight; None: unknown, the text goes on from
            something (keeps a leading space that some tokenizers drop at the start of a text).
        traced: keep account of each token's part in the text, for `Heard.spans`.
        min_tokens: a stop string that is complete before as many tokens is text like any other.
        kept: special tokens that are shown in spite of `skip_special`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        skip_special: bool = True,
        include_stop: bool = False,
        *,
        prompt_tail: Sequence[int] | None = None,
        traced: bool = False,
        min_tokens: int = 0,
        kept: frozenset[int] = frozenset(),
    ) -> None:
        plain = detokenizer(
            tokenizer, skip_special=skip_special, prompt_tail=prompt_tail, kept=kept
        )
        self._trace = Trace(plain) if traced else None
        self._detokenizer: Detokenizer | Trace = self._trace or plain
        self._stops = StopStrings(stops, include=include_stop) if stops else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self.n_tokens = 0  # fed so far, those after a stop string not counted
        self.stop_at: int | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that was found."""
        return self._stops.matched if self._stops else None

    @property
    def held(self) -> str:
        """The text that waits, for it may begin a stop string."""
        return self._stops.held if self._stops else ""

    @property
    def held_bytes(self) -> bytes:
        """The bytes that wait for the rest of their character, where tokens have bytes."""
        return self._detokenizer.held

    def feed(self, tokens: Sequence[int]) -> Piece:
        """The text that `tokens` complete. Tokens after a stop string's last one are dropped."""
        feed, stops = self._detokenizer.feed, self._stops
        if stops is None:
            self.n_tokens += len(tokens)
            return Piece("".join([feed(token) for token in tokens]))
        out: list[str] = []
        for token in tokens:
            if self.stop_at is not None:
                break
            self.n_tokens += 1
            early = self.n_tokens < self._min_tokens
            out.append(stops.feed(feed(token), ignore=early))
            if stops.matched is not None:
                self.stop_at = self.n_tokens
        return Piece("".join(out), self.stop_at)

    def say(self, tokens: Sequence[int]) -> str:
        """As `hear` of a choice that goes on, where its text is that of its tokens alone."""
        assert self._stops is None, "stop strings must be looked for"
        assert self._trace is None, "tokens are accounted for"
        self.n_tokens += len(tokens)
        feed = self._detokenizer.feed
        return feed(tokens[0]) if len(tokens) == 1 else "".join([feed(token) for token in tokens])

    def hear(self, tokens: Sequence[int], end: End | None) -> Heard:
        """News of a choice that has not ended: its next tokens, and how it ended if it did.

        The last of `tokens` is the stop token if one ended it. Call no more after a `finish`.
        """
        heard = self._hear(tokens, end)
        if self._trace is None:
            return heard
        spans = self._trace.release(heard.text, last=heard.finish is not None)
        return Heard(heard.text, heard.finish, heard.overrun, spans)

    def _hear(self, tokens: Sequence[int], end: End | None) -> Heard:
        stop_id = end.stop_id if end is not None else -1
        piece = self.feed(tokens[:-1] if stop_id >= 0 else tokens)
        if piece.stop_at is not None:
            return Heard(piece.text, "stop", overrun=end is None)
        if end is None:
            return Heard(piece.text)
        text = piece.text + self.end(stop_id)
        # Bytes that were held back may complete a stop string.
        cut = end.reason == "length" and self.matched is not None
        return Heard(text, "stop" if cut else end.reason)

    def flush(self) -> str:
        """What was held back: call once, when the choice ended without a stop token."""
        if self.stop_at is not None:
            return ""
        last = self._detokenizer.flush()
        if self._stops is None:
            return last
        return self._stops.feed(last) + self._stops.flush()

    def end(self, stop_id: int) -> str:
        """As `flush`, when the choice ended by drawing `stop_id` (-1: it did not).

        The stop token was not fed. Its text is shown only with `include_stop`.
        """
        if self.stop_at is not None:
            return ""
        self.n_tokens += stop_id >= 0
        shown = self._detokenizer.feed(stop_id) if self._include_stop and stop_id >= 0 else ""
        shown += self._detokenizer.flush()
        if self._trace is not None and stop_id >= 0 and not self._include_stop:
            self._trace.skip(stop_id)
        if self._stops is None:
            return shown
        return self._stops.feed(shown) + self._stops.flush()
