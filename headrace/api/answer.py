"""Tokens back to text, choice by choice; the same machine under streamed and whole answers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from headrace.api.hooked import Hooked, annotated, hooked_parser
from headrace.api.logprobs import Entry
from headrace.api.metering import Bill
from headrace.api.prepare import Prepared
from headrace.api.record import Full
from headrace.api.service import Service
from headrace.engine.token_stream import Delta, TokenStream
from headrace.errors import RequestFailed
from headrace.messages import Logprobs
from headrace.text.choice import ChoiceText
from headrace.text.parts import Parser, Part, Text, joined
from headrace.text.trace import Span

FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]


class Choice:
    """One choice: its text machine (which counts its tokens), and how it ended.

    entries: what is said of its tokens, since they were last taken; where that is asked for.
    parser: tells its text apart; None: all of it is `Text`.
    rank: what a scoring hook says of it; None: nothing.
    annotations: citations of its content, once it has ended.
    """

    __slots__ = (
        "_said",
        "annotations",
        "entries",
        "finish",
        "index",
        "parser",
        "rank",
        "reasoning_tokens",
        "score",
        "stop_reason",
        "text",
    )

    def __init__(self, index: int, text: ChoiceText, parser: Parser | None = None) -> None:
        self.index = index
        self.text = text
        self.parser = parser
        self.reasoning_tokens = 0
        self.entries: list[Entry] = []
        self.annotations: list[dict[str, Any]] = []
        self.rank: float | None = None
        self.score = 0.0  # sum of the log-probabilities of all tokens so far
        self._said: deque[Logprobs] = deque()  # of tokens whose text is held back
        self.finish: FinishReason | None = None
        self.stop_reason: str | int | None = None  # the stop string or stop_token_ids entry

    @property
    def ended(self) -> bool:
        return self.finish is not None

    def note(self, said: list[Logprobs], spans: Iterable[Span]) -> None:
        """Reports as they came, and the tokens that leave now."""
        waiting = self._said
        waiting.extend(said)
        for span in spans:
            one = waiting.popleft() if waiting else None
            self.entries.append(Entry(span, one))
            self.score += one.logprob if one else 0.0

    def take(self) -> list[Entry]:
        """The entries since the last take."""
        taken, self.entries = self.entries, []
        return taken


class Answer:
    """All choices of one request. Give every delta to `parts`, or to `feed` where no choice has a
    parser; what comes back can no longer change."""

    def __init__(
        self,
        service: Service,
        prepared: Prepared,
        stream: TokenStream,
        full: Full | None = None,
    ) -> None:
        """full: hears what becomes of the text, token by token."""
        self.stream = stream
        self._full = full
        self.prepared = prepared
        self.bill: Bill | None = None  # shown in `usage`, once everything has come
        self._open = len(prepared.jobs) * prepared.drawn  # choices that have not ended
        self.traced = prepared.shown.tokens or prepared.drawn > prepared.n
        self._plain = not (self.traced or prepared.stops)
        self._eos_ids = frozenset(service.eos_ids)
        grammar = prepared.jobs[0].grammar
        form = grammar.kind if grammar is not None else ""
        make = hooked_parser(
            service.hooks, prepared.parser, form, prepared.documents, prepared.tools
        )
        self.choices = [
            Choice(
                position * prepared.drawn + sample,
                ChoiceText(
                    service.tokenizer,
                    prepared.stops,
                    prepared.skip_special,
                    prepared.include_stop,
                    prompt_tail=job.prompt[-8:],
                    traced=self.traced,
                    min_tokens=prepared.min_tokens,
                    kept=prepared.kept,
                ),
                make() if make is not None else None,
            )
            for position, job in enumerate(prepared.jobs)
            for sample in range(prepared.drawn)
        ]

    def feed(self, delta: Delta) -> str:
        """New text of choice `delta.index`; sets its `finish` when it ended."""
        if self._full is None:
            return self._fed(delta)
        return "".join([self._recorded(self._full, piece) for piece in _singly(delta)])

    def _recorded(self, full: Full, delta: Delta) -> str:
        text, machine = self._fed(delta), self.choices[delta.index].text
        full.wrote(delta.index, machine.n_tokens, text, machine.held, machine.held_bytes)
        return text

    def _end(self, choice: Choice, finish: FinishReason) -> None:
        """The choice has ended; with the last one the answer is whole."""
        choice.finish = finish
        self._open -= 1
        self.stream.whole = not self._open

    def _fed(self, delta: Delta) -> str:
        choice = self.choices[delta.index]
        if choice.ended:  # the overrun of a stop string
            return ""
        if self._plain and delta.end is None:  # most tokens of most answers
            return choice.text.say(delta.tokens)
        heard = choice.text.hear(delta.tokens, delta.end)
        if self.traced:
            choice.note(delta.logprobs, heard.spans)
        if heard.overrun:
            self.stream.finish(choice.index, choice.text.n_tokens)
        if heard.finish == "error":
            self.stream.abort()  # the others have no reader any more; the Done says what it was
        elif heard.finish in ("stop", "length"):  # else the Done's error, or `check`, says so
            self._end(choice, heard.finish)
            choice.stop_reason = choice.text.matched
            stop_id = delta.end.stop_id if delta.end is not None else -1
            if choice.stop_reason is None and stop_id >= 0 and stop_id not in self._eos_ids:
                choice.stop_reason = stop_id
        return heard.text

    def parts(self, delta: Delta) -> list[Part]:
        """As `feed`, told apart; [] where text is held back."""
        choice = self.choices[delta.index]
        parser = choice.parser
        if parser is None:
            text = self.feed(delta)
            return [Text(text)] if text else []
        out: list[Part] = []
        # Where reasoning or a filter may end, tokens go one by one: no count may depend on merging.
        apart = parser.may_think or (isinstance(parser, Hooked) and parser.may_stop)
        for piece in _singly(delta) if apart else [delta]:
            out += self._told_apart(choice, parser, piece)
        return out

    def _told_apart(self, choice: Choice, parser: Parser, delta: Delta) -> list[Part]:
        if choice.ended:  # the overrun of a stop string
            return []
        thought = parser.thinking
        out = parser.feed(self.feed(delta))
        if thought or parser.thinking:  # it is the beginning of the answer, or nothing
            choice.reasoning_tokens = choice.text.n_tokens
        hooked = parser if isinstance(parser, Hooked) else None
        if hooked is not None and hooked.stopped and choice.finish is None:
            self.stream.finish(choice.index, choice.text.n_tokens)
            self._end(choice, "content_filter")
        if choice.finish is not None:
            out += parser.flush()
            if hooked is not None:
                choice.annotations = annotated(hooked.citations, self.prepared.documents)
            if hooked is not None and hooked.stopped:
                choice.finish, choice.stop_reason = "content_filter", None
            elif choice.finish == "stop" and parser.called:
                choice.finish = "tool_calls"
        return out

    async def collect(self) -> list[list[Part]]:
        """Wait for everything: the parts of each choice. Raises what ended it early."""
        all_parts: list[list[Part]] = [[] for _ in self.choices]
        while not self.stream.done:
            for delta in await self.stream.take():
                all_parts[delta.index] += self.parts(delta)
        self.check()
        return [joined(parts) for parts in all_parts]

    def best(self, parts: list[list[Part]]) -> list[tuple[Choice, list[Part]]]:
        """The choices that are shown, with their parts, numbered anew.

        Of more than n drawn ones, those with the highest rank, or else log-probability a token,
        best first.
        """
        n, drawn = self.prepared.n, self.prepared.drawn
        pairs = list(zip(self.choices, parts, strict=True))
        if drawn == n:
            return pairs
        out: list[tuple[Choice, list[Part]]] = []
        for at in range(0, len(pairs), drawn):
            ranked = sorted(pairs[at : at + drawn], key=lambda pair: -_worth(pair[0]))
            out += ranked[:n]
        for index, (choice, _) in enumerate(out):
            choice.index = index
        return out

    def said_of_prompt(self, position: int) -> list[Logprobs]:
        """Of the tokens of a prompt, from its second on. Call once a token, or an end, has come."""
        said = self.stream.prompt_logprobs.get(position, [])
        assert len(said) == len(self.prepared.jobs[position].prompt) - 1, "a report is missing"
        return said

    def echo(self, position: int) -> str:
        """The text before the answers to a prompt."""
        return self.prepared.echo[position] if self.prepared.echo else ""

    def echoed(self, position: int) -> list[Entry]:
        """What is said of the tokens of an echoed prompt; [] where nothing is asked."""
        if not self.prepared.shown.echo:
            return []
        said = [None, *self.said_of_prompt(position)]
        return [Entry(*pair) for pair in zip(self.prepared.shown.echo[position], said, strict=True)]

    def check(self) -> None:
        """Call when the stream is done. Raises RequestFailed if a choice did not end properly."""
        if any(choice.finish is None for choice in self.choices):
            raise RequestFailed("the engine ended the request early")

    def summary(self) -> str:
        """Counts for the access log."""
        usage = self.usage()
        return (
            f" prompt={usage['prompt_tokens']} cached={self.stream.cached_tokens}"
            f" output={usage['completion_tokens']} choices={len(self.choices)}"
        )

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage: the same numbers whether streamed or not."""
        prompt_tokens, output_tokens = self.prepared.prompt_tokens, self.output_tokens
        usage: dict[str, Any] = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": output_tokens,
            "total_tokens": prompt_tokens + output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.stream.cached_tokens},
        }
        if self.prepared.parser is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        if self.bill is not None and self.stream.done:
            usage["headrace"] = self.bill.shown(self)
        return usage

    @property
    def output_tokens(self) -> int:
        """Of all choices that are drawn."""
        return sum(choice.text.n_tokens for choice in self.choices)

    @property
    def finishes(self) -> list[str | None]:
        """How each choice ended; None: it did not."""
        return [choice.finish for choice in self.choices]

    @property
    def reasoning_tokens(self) -> int:
        """Of all choices; their markers count, as OpenAI's do."""
        return sum(choice.reasoning_tokens for choice in self.choices)


def _singly(delta: Delta) -> list[Delta]:
    """The same news, a token at a time; its reports and its end stay whole."""
    if len(delta.tokens) < 2:
        return [delta]
    pieces = [Delta(delta.index, [token]) for token in delta.tokens]
    pieces[0].logprobs, pieces[-1].end = delta.logprobs, delta.end
    return pieces


def _worth(choice: Choice) -> float:
    """Its rank, or else its log-probability a token, all tokens that count."""
    if choice.rank is not None:
        return choice.rank
    return choice.score / max(1, choice.text.n_tokens)


class Reply(msgspec.Struct, frozen=True):
    """What every chunk and body of one response repeats."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    include_usage: bool
    continuous_usage: bool
