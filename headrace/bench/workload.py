"""What a load run sends: sessions of requests, the same ones for the same seed and nonce.

A plain request is a session of one turn with one request. Later turns carry what was said before,
with the server's own answers, so a session is what one user or one agent does.

Two things are drawn apart. Lengths, arrivals, shares and choices of prefixes come from `seed`
alone; the words come from `seed` and `nonce`, so a rerun with another nonce does the same work
without finding its own prompts in the server's prefix cache.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

from headrace.bench.lengths import Lengths, drawn
from headrace.bench.trace import TraceLine, replayed

# Short everyday words: nearly every BPE vocabulary has each of them, with its leading space, as one
# token, so `prompt_tokens` words are about as many tokens. The exact number comes back in `usage`.
_TEXT = """
time year people way day man thing woman life child world school state family student group
country problem hand part place case week company system program question work government
number night point home water room mother area money story fact month lot right study book
eye job word business issue side kind head house service friend father power hour game line
end member law car city community name president team minute idea kid body information back
parent face others level office door health person art war history party result change
morning reason research girl guy moment air teacher force education foot boy age policy
music market sense nation plan college interest death experience effect use class control
care field development role effort rate heart drug show leader light voice wife police mind
price report decision son view relationship town road arm difference value building action
model season society tax director position player record paper space ground form event
matter center couple site project activity star table need court oil situation cost industry
figure street image phone data picture practice piece land product doctor wall patient
worker news test movie north love support technology step baby computer type attention film
tree source organization hair look window culture chance brother energy period course summer
plant term
"""
WORDS = tuple(_TEXT.split())

Prompt = str | list[int]

# What a structured answer must be, unless the run brings a schema of its own.
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "count": {"type": "integer", "minimum": 0, "maximum": 9999},
        "kind": {"enum": ["small", "medium", "large"]},
    },
    "required": ["name", "count", "kind"],
    "additionalProperties": False,
}


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One request to come, without what was said before it."""

    prompt: Prompt
    max_tokens: int
    structured: bool = False
    cancel_after_chunks: int | None = None  # close the connection then; 0: at the response's head


class Turn(msgspec.Struct, frozen=True):
    """Requests that are sent side by side, `think_s` after the turn before has ended."""

    asks: Sequence[Ask]
    think_s: float = 0.0


class Session(msgspec.Struct, frozen=True):
    """Turns one after another. `at_s` is a trace's own time of arrival."""

    index: int
    turns: Sequence[Turn]
    at_s: float | None = None


class Said(msgspec.Struct, frozen=True):
    """A prompt of an earlier turn and what the server answered."""

    prompt: Prompt
    answer: str


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of session, many times over.

    `single` set: every request carries that text. Otherwise each prompt is `prompt_tokens` random
    words, or exactly that many ids from `id_range`, behind one of `prefixes` shared prefixes.
    """

    requests: int = 64
    max_tokens: int | Lengths = 75
    prompt_tokens: int | Lengths = 64
    single: str = ""
    kind: Literal["words", "ids"] = "words"
    id_range: tuple[int, int] = (1000, 10_000)  # half open; "ids" only
    endpoint: Literal["chat", "completions"] = "chat"
    stream: bool = True
    ignore_eos: bool = True
    temperature: float = 0.0
    seed: int = 0
    nonce: str = ""
    prefixes: int = 0  # shared prefixes to choose from; 0: none
    prefix_tokens: int = 0
    zipf: float = 0.0  # the prefix of rank k is k^-zipf as likely as the first; 0: all alike
    drift: int = 0  # every so many sessions a new prefix takes the lowest rank; 0: never
    turns: int = 1
    think_s: float = 0.0  # mean of an exponential law between two turns
    fan_out: int = 0  # agents: a request, then so many side by side, then one over all answers
    structured: float = 0.0  # share of requests that must answer by `schema`
    schema: dict[str, Any] = msgspec.field(default_factory=lambda: SCHEMA)
    cancel: float = 0.0  # share of requests that the client drops at a random chunk
    trace: str = ""  # a file of `TraceLine`: its prompts, lengths and times instead of all above
    speed: float = 1.0  # of the trace's clock
    trace_block_tokens: int = 512  # what one hash id stands for; other sizes scale all lengths

    def path(self) -> str:
        return "/v1/chat/completions" if self.endpoint == "chat" else "/v1/completions"

    @property
    def asks_a_session(self) -> int:
        return self.fan_out + 2 if self.fan_out else self.turns

    def sessions(self, part: str, count: int | None = None) -> Iterator[Session]:
        """`count` sessions, or an endless row of them (of a trace: all its lines at most).

        `part` names the level: two levels share no random prompt, so that one cannot find the
        other's prefixes in the server's cache.
        """
        if self.trace:
            lines = replayed(self.trace, self.trace_block_tokens)
            return map(self._replay, range(count) if count else itertools.count(), lines)
        indices = itertools.count() if count is None else iter(range(count))
        return (self._session(part, index) for index in indices)

    def _session(self, part: str, index: int) -> Session:
        shape = random.Random(f"{self.seed}/{part}/{index}")
        prefix = self._prefix(part, index, shape)
        numbers = [1, self.fan_out, 1] if self.fan_out else [1] * self.turns
        key = f"{self.seed}/{self.nonce}/{part}/{index}"
        turns = []
        for turn, number in enumerate(numbers):
            think_s = shape.expovariate(1 / self.think_s) if turn and self.think_s else 0.0
            asks = [
                self._ask(f"{key}/{turn}/{branch}", shape, [] if turn else prefix)
                for branch in range(number)
            ]
            turns.append(Turn(asks, think_s))
        return Session(index, turns)

    def _ask(self, key: str, shape: random.Random, prefix: list[Any]) -> Ask:
        """`shape` draws what the server must do, `key` the words."""
        max_tokens = drawn(self.max_tokens, shape)
        tokens = drawn(self.prompt_tokens, shape)
        structured = self.structured > 0 and shape.random() < self.structured
        cancels = self.cancel > 0 and shape.random() < self.cancel
        return Ask(
            prompt=self.single or self.joined([*prefix, *self.draw(key, tokens)]),
            max_tokens=max_tokens,
            structured=structured,
            cancel_after_chunks=shape.randrange(max_tokens) if cancels else None,
        )

    def _prefix(self, part: str, index: int, shape: random.Random) -> list[Any]:
        """The shared prefix of session `index`: words or ids; empty without prefixes."""
        if not self.prefixes:
            return []
        weights = _cumulative(self.prefixes, self.zipf)
        rank = bisect.bisect_left(weights, shape.random() * weights[-1])
        # Drift: who was at rank r is at r - 1 a while later, and a new one comes in at the end.
        number = rank + (index // self.drift if self.drift else 0)
        return self.draw(f"{self.seed}/{self.nonce}/{part}/prefix {number}", self.prefix_tokens)

    def _replay(self, index: int, line: TraceLine) -> Session:
        prompt: list[Any] = []
        for block, tokens in line.blocks(self.trace_block_tokens):
            prompt += self.draw(f"{self.seed}/{self.nonce}/block {block}", tokens)
        ask = Ask(prompt=self.joined(prompt), max_tokens=line.output_length)
        return Session(index, [Turn([ask])], line.timestamp / 1000 / self.speed)

    def draw(self, key: str, tokens: int) -> list[Any]:
        """`tokens` words or ids: a pure function of the workload and the key."""
        source = random.Random(key)
        if self.kind == "ids":
            return source.choices(range(*self.id_range), k=tokens)
        return source.choices(WORDS, k=tokens)

    def joined(self, parts: list[Any]) -> Prompt:
        return parts if self.kind == "ids" else " ".join(parts)

    def body(self, model: str, ask: Ask, said: Sequence[Said] = ()) -> dict[str, Any]:
        """The request of `ask` after all that was said."""
        body: dict[str, Any] = {
            "model": model,
            "max_tokens": ask.max_tokens,
            "temperature": self.temperature,
            "stream": self.stream,
        }
        if self.ignore_eos and not ask.structured:  # a grammar ends where it ends
            body["ignore_eos"] = True  # left out when off: servers other than vLLM's kin refuse it
        if self.stream:
            body["stream_options"] = {"include_usage": True}
        if ask.structured:
            named = {"name": "answer", "schema": self.schema, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": named}
        if self.endpoint == "chat":
            assert isinstance(ask.prompt, str), "chat messages hold text; ids go to completions"
            messages = []
            for before in said:
                messages.append({"role": "user", "content": before.prompt})
                messages.append({"role": "assistant", "content": before.answer})
            return body | {"messages": [*messages, {"role": "user", "content": ask.prompt}]}
        if isinstance(ask.prompt, str):
            texts = [f"{before.prompt}\n{before.answer}\n" for before in said]
            return body | {"prompt": "".join(texts) + ask.prompt}
        assert not said, "answers are text: sessions of ids are refused where options are read"
        return body | {"prompt": ask.prompt}


@functools.lru_cache(8)
def _cumulative(count: int, exponent: float) -> list[float]:
    """Running sums of k^-exponent, k = 1..count."""
    return list(itertools.accumulate(rank**-exponent for rank in range(1, count + 1)))
