"""Beam search: a client of an engine, which knows nothing of it.

A step asks for one more token of each live beam, with the 2 * width most likely ones. Its prompt is
the prompt and the beam's tokens so far, whose full blocks the prefix cache holds, so a step
computes less than a block a beam, whatever came before.

As in transformers' `generate` (https://arxiv.org/abs/1702.01806 names the variants): of all
continuations, the likeliest are looked at in order; one by a stop id ends its beam if it is among
the first `width`; the first `width` others live on. A beam's score is

    (sum of its log-probabilities) / (its output tokens, an end token too) ** length_penalty
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

import msgspec

from headrace.messages import Logprobs, Reason, Sampling


class BeamRules(msgspec.Struct, frozen=True):
    """How to search.

    early_stopping: True = as soon as `width` beams have ended; False = when the best live one,
    ending now, would not be among them; "never" = when it could not at any length.
    """

    width: int
    length_penalty: float = 1.0  # above 0, longer is better; below, shorter
    early_stopping: bool | Literal["never"] = False

    @property
    def sampling(self) -> Sampling:
        """Of the one token that a step draws; only its report is used."""
        return Sampling(temperature=0.0, logprobs=2 * self.width)


class Beam(msgspec.Struct, frozen=True):
    """One hypothesis: output tokens, what is said of each, and the sum of their logprobs."""

    tokens: list[int]
    said: list[Logprobs]
    total: float
    stop_id: int = -1  # its last token, if that ended it

    @property
    def reason(self) -> Reason:
        """Why it ended."""
        return "stop" if self.stop_id >= 0 else "length"


class BeamSearch:
    """A feed machine for one prompt: while not `done`, ask for `prompts`, `feed` their reports."""

    def __init__(
        self, prompt: list[int], rules: BeamRules, max_tokens: int, stop_ids: Collection[int]
    ) -> None:
        assert max_tokens > 0, "a search without a step"
        self._prompt, self._rules, self._max_tokens = prompt, rules, max_tokens
        self._stop_ids = frozenset(stop_ids)
        self._live = [Beam([], [], 0.0)]
        self._ended: list[Beam] = []  # best first, at most `width`
        self._length = 0
        self.done = False

    @property
    def prompts(self) -> list[list[int]]:
        """What the next step asks for: one token after each."""
        return [self._prompt + beam.tokens for beam in self._live]

    def feed(self, reports: Sequence[Logprobs]) -> None:
        """The reports of the tokens drawn after `prompts`, in their order."""
        assert not self.done, "a search that is done takes no step"
        width = self._rules.width
        found = [
            (beam.total + value, at, rank)
            for at, (beam, report) in enumerate(zip(self._live, reports, strict=True))
            for rank, value in enumerate(report.top)
        ]
        found.sort(key=lambda one: (-one[0], one[1], one[2]))
        live: list[Beam] = []
        for place, (total, at, rank) in enumerate(found[: 2 * width]):
            beam = _longer(self._live[at], reports[at], rank, total)
            if beam.tokens[-1] not in self._stop_ids:
                live.append(beam)
                if len(live) == width:
                    break
            elif place < width:
                self._ended.append(msgspec.structs.replace(beam, stop_id=beam.tokens[-1]))
        self._ended.sort(key=self._score, reverse=True)
        del self._ended[width:]
        self._live = live
        self._length += 1
        self.done = self._is_done()

    def best(self, n: int) -> list[Beam]:
        """The n best, best first; of those still live too, if the search ran out of tokens."""
        assert self.done, "the search goes on"
        live = [] if self._settled() else self._live
        return sorted(self._ended + live, key=self._score, reverse=True)[:n]

    def _score(self, beam: Beam) -> float:
        return self._normal(beam.total, len(beam.tokens))

    def _normal(self, total: float, length: int) -> float:
        scale: float = length**self._rules.length_penalty
        return total / scale

    def _is_done(self) -> bool:
        return self._length == self._max_tokens or not self._live or self._settled()

    def _settled(self) -> bool:
        """No live beam needs to be looked at any more."""
        rules = self._rules
        if len(self._ended) < rules.width:
            return False
        if not self._live or rules.early_stopping is True:
            return True
        longest = rules.early_stopping == "never" and rules.length_penalty > 0
        length = self._max_tokens if longest else self._length
        return self._normal(self._live[0].total, length) <= self._score(self._ended[-1])


def _longer(beam: Beam, report: Logprobs, rank: int, total: float) -> Beam:
    """The beam with the token of this rank."""
    token, value = report.top_ids[rank], report.top[rank]
    said = Logprobs(value, 1 + sum(x > value for x in report.top), report.top_ids, report.top)
    return Beam([*beam.tokens, token], [*beam.said, said], total)
