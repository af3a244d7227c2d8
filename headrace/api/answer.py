"""Tokens back to text, choice by choice; the same machine under streamed and whole answers."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from headrace.api.prepare import Prepared
from headrace.api.service import Service
from headrace.engine.client import Delta, TokenStream
from headrace.errors import RequestFailed
from headrace.text.choice import ChoiceText

FinishReason = Literal["stop", "length"]


class Choice:
    """One choice: its text machine (which counts its tokens), and how it ended."""

    __slots__ = ("finish", "index", "stop_reason", "text")

    def __init__(self, index: int, text: ChoiceText) -> None:
        self.index = index
        self.text = text
        self.finish: FinishReason | None = None
        self.stop_reason: str | int | None = None  # the stop string or stop_token_ids entry

    @property
    def ended(self) -> bool:
        return self.finish is not None


class Answer:
    """All choices of one request. `feed` deltas; text that comes back can no longer change."""

    def __init__(self, service: Service, prepared: Prepared, stream: TokenStream) -> None:
        self.stream = stream
        self.prepared = prepared
        self._eos_ids = frozenset(service.eos_ids)
        self.choices = [
            Choice(
                position * prepared.n + sample,
                ChoiceText(
                    service.tokenizer,
                    prepared.stops,
                    prepared.skip_special,
                    prepared.include_stop,
                    prompt_tail=job.prompt[-8:],
                    min_tokens=prepared.min_tokens,
                ),
            )
            for position, job in enumerate(prepared.jobs)
            for sample in range(prepared.n)
        ]

    def feed(self, delta: Delta) -> str:
        """New text of choice `delta.index`; sets its `finish` when it ended."""
        choice = self.choices[delta.index]
        if choice.ended:  # the overrun of a stop string
            return ""
        heard = choice.text.hear(delta.tokens, delta.end)
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
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": output_tokens,
            "total_tokens": prompt_tokens + output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.stream.cached_tokens},
        }


class Reply(msgspec.Struct, frozen=True):
    """What every chunk and body of one response repeats."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    include_usage: bool
    continuous_usage: bool
