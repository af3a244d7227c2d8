"""Tokens back to text, choice by choice; the same machine under streamed and whole answers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from headrace.api.logprobs import Entry
from headrace.api.prepare import Prepared
from headrace.api.service import Service
from headrace.engine.client import Delta, TokenStream
from headrace.errors import RequestFailed
from headrace.messages import Logprobs
from headrace.text.choice import ChoiceText
from headrace.text.trace import Span

FinishReason = Literal["stop", "length"]


class Choice:
    """One choice: its text machine (which counts its tokens), and how it ended.

    entries: what is said of its tokens, since they were last taken; where that is asked for.
    """

    __slots__ = ("_said", "entries", "finish", "index", "score", "stop_reason", "text")

    def __init__(self, index: int, text: ChoiceText) -> None:
        self.index = index
        self.text = text
        self.entries: list[Entry] = []
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
    """All choices of one request. `feed` deltas; text that comes back can no longer change."""

    def __init__(self, service: Service, prepared: Prepared, stream: TokenStream) -> None:
        self.stream = stream
        self.prepared = prepared
        self.traced = prepared.shown.tokens or prepared.drawn > prepared.n
        self._eos_ids = frozenset(service.eos_ids)
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
                ),
            )
            for position, job in enumerate(prepared.jobs)
            for sample in range(prepared.drawn)
        ]

    def feed(self, delta: Delta) -> str:
        """New text of choice `delta.index`; sets its `finish` when it ended."""
        choice = self.choices[delta.index]
        if choice.ended:  # the overrun of a stop string
            return ""
        heard = choice.text.hear(delta.tokens, delta.end)
        if self.prepared.echo_only:
            choice.finish = "length" if heard.finish in ("stop", "length") else None
            return ""
        if self.traced:
            choice.note(delta.logprobs, heard.spans)
        if heard.overrun:
            self.stream.finish(choice.index, choice.text.n_tokens)
        if heard.finish in ("stop", "length"):  # else the Done's error, or `check`, says so
            choice.finish = heard.finish
            choice.stop_reason = choice.text.matched
            stop_id = delta.end.stop_id if delta.end is not None else -1
            if choice.stop_reason is None and stop_id >= 0 and stop_id not in self._eos_ids:
                choice.stop_reason = stop_id
        return heard.text

    async def collect(self) -> list[str]:
        """Wait for everything: the whole text of each choice. Raises what ended it early."""
        texts: list[list[str]] = [[] for _ in self.choices]
        while not self.stream.done:
            for delta in await self.stream.take():
                texts[delta.index].append(self.feed(delta))
        self.check()
        return ["".join(text) for text in texts]

    def best(self, texts: list[str]) -> list[tuple[Choice, str]]:
        """The choices that are shown, with their texts, numbered anew.

        Of more than n drawn ones, those with the highest log-probability a token, best first.
        """
        n, drawn = self.prepared.n, self.prepared.drawn
        pairs = list(zip(self.choices, texts, strict=True))
        if drawn == n:
            return pairs
        out: list[tuple[Choice, str]] = []
        for at in range(0, len(pairs), drawn):
            ranked = sorted(pairs[at : at + drawn], key=lambda pair: -_mean(pair[0]))
            out += ranked[:n]
        for index, (choice, _) in enumerate(out):
            choice.index = index
        return out

    def said_of_prompt(self, position: int) -> list[Logprobs]:
        """Of the tokens of a prompt, from its second on. Call once a token has come."""
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
        prompt_tokens = self.prepared.prompt_tokens
        output_tokens = sum(choice.text.n_tokens for choice in self.choices)
        if self.prepared.echo_only:
            output_tokens = 0
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": output_tokens,
            "total_tokens": prompt_tokens + output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.stream.cached_tokens},
        }


def _mean(choice: Choice) -> float:
    """Log-probability a token, all tokens that count."""
    return choice.score / max(1, choice.text.n_tokens)


class Reply(msgspec.Struct, frozen=True):
    """What every chunk and body of one response repeats."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    include_usage: bool
    continuous_usage: bool
