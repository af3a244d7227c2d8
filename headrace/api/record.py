"""Record: what one HTTP process knows of a request of the model, while it runs and after it.

Every such request has a light one: when it reached which stage, its counts, how it ended. One that
asked for it (`X-Headrace-Record: full`) has a `Full` too: prompt, tokens, steps, blocks, draws and
text. Both are written as things happen and read by whoever looks; nothing is computed for a look.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from headrace.api.metering import Caller, Counted

MOST_TOKENS = 8192  # of the answers of one request, in a full record
MOST_BYTES = 16 * 2**20  # of one full record
_TOKEN_BYTES = 200  # about what is kept of one token, or of its text, as Python's objects
_ID_BYTES = 40  # of a token of a prompt


class Times(Protocol):
    """When a stream's tokens came: `engine.token_stream.TokenStream`."""

    @property
    def first_token_s(self) -> float: ...
    @property
    def last_token_s(self) -> float: ...
    @property
    def cached_tokens(self) -> int: ...


class Charges(Protocol):
    """What the engine said when it was done: `api.metering.Bill`."""

    @property
    def queue_s(self) -> float: ...
    @property
    def prefill_s(self) -> float: ...
    @property
    def compute_s(self) -> float: ...
    @property
    def preempted_s(self) -> list[float]: ...
    @property
    def parameters(self) -> dict[str, Any]: ...
    def charged(self) -> tuple[float, str] | None: ...


class PromptSpan(NamedTuple):
    """Characters [start, end) of a prompt's text."""

    start: int
    end: int
    kind: str  # template or content
    role: str


class Token(NamedTuple):
    """One token of an answer."""

    id: int
    choice: int
    at_s: float  # time.monotonic()


class Emitted(NamedTuple):
    """What became of the text of a choice with its newest token."""

    choice: int
    token_index: int
    emitted: str
    held: str  # by stop strings that may follow
    held_bytes: bytes  # of an unfinished character


class Full:
    """The parts of a full record. `size_bytes` is about what it takes."""

    def __init__(self) -> None:
        self.text: str | None = None  # of the prompt; None: it came as ids
        self.spans: list[PromptSpan] = []
        self.prompt: list[int] = []
        self.choices = 1
        self.tokens: list[Token] = []
        self.told: list[bytes] = []  # each a `messages.Recorded`
        self.emitted: list[Emitted] = []
        self.size_bytes = 0
        self.cut = ""  # why something is missing

    def prompted(self, text: str, spans: list[PromptSpan]) -> None:
        """The prompt as text."""
        self.text, self.spans = text, spans
        self.size_bytes += sys.getsizeof(text) + 100 * len(spans)

    def token(self, index: int, token: int, now_s: float) -> None:
        """See `engine.token_stream.Watcher`."""
        if index < self.choices and self._room(len(self.tokens), _TOKEN_BYTES):
            self.tokens.append(Token(token, index, now_s))

    def hear(self, told: bytes) -> None:
        """See `engine.token_stream.Watcher`."""
        if self._room(0, len(told)):
            self.told.append(told)

    def wrote(self, choice: int, count: int, emitted: str, held: str, unfinished: bytes) -> None:
        """A choice's text after its first `count` tokens."""
        size_bytes = _TOKEN_BYTES + sys.getsizeof(emitted) + sys.getsizeof(held)
        if choice < self.choices and self._room(len(self.emitted), size_bytes):
            self.emitted.append(Emitted(choice, count - 1, emitted, held, unfinished))

    def _room(self, tokens: int, size_bytes: int) -> bool:
        if tokens >= MOST_TOKENS:
            self.cut = self.cut or f"only the first {MOST_TOKENS} tokens were recorded"
            return False
        if self.size_bytes + size_bytes > MOST_BYTES:
            self.cut = self.cut or f"a record takes at most {MOST_BYTES} bytes"
            return False
        self.size_bytes += size_bytes
        return True


class Record:
    """Times are time.monotonic(), 0 = not yet. key: the name of the caller's API key.

    Clients may give several requests the same id. `mark` is this one's alone, in all processes.
    """

    __slots__ = (
        "_answer",
        "_bill",
        "_stream",
        "arrived_s",
        "cached_tokens",
        "cost",
        "created_s",
        "device_s",
        "done_s",
        "endpoint",
        "error",
        "finishes",
        "first_token_s",
        "full",
        "id",
        "key",
        "last_token_s",
        "mark",
        "model",
        "note",
        "output_tokens",
        "params",
        "parsed_s",
        "preempted_s",
        "prefill_s",
        "prompt_tokens",
        "queue_s",
        "reasoning_tokens",
        "rendered_s",
        "status",
        "submitted_s",
        "tokenized_s",
        "trace_id",
    )

    def __init__(self, caller: Caller, model: str, mark: str, full: Full | None) -> None:
        self.id, self.endpoint, self.key, self.model = (
            caller.request_id,
            caller.path,
            caller.key,
            model,
        )
        self.mark, self.full, self.trace_id = mark, full, caller.trace_id
        self.note = ""  # why it is not what was asked for
        self.arrived_s, self.created_s = caller.arrived_s, time.time()
        self.parsed_s = self.rendered_s = self.tokenized_s = self.submitted_s = 0.0
        self.first_token_s = self.last_token_s = self.done_s = 0.0
        self.params: dict[str, Any] = {}
        self.prompt_tokens = self.cached_tokens = self.output_tokens = self.reasoning_tokens = 0
        self.finishes: list[str | None] = []
        self.status, self.error = 0, ""
        self.queue_s = self.prefill_s = self.device_s = 0.0
        self.preempted_s: list[float] = []
        self.cost: tuple[float, str] | None = None
        self._stream: Times | None = None  # these while it runs
        self._answer: Counted | None = None
        self._bill: Charges | None = None

    @property
    def name(self) -> str:
        """Its own, where `id` may be that of others too."""
        return f"{self.id}~{self.mark}"

    def parsed(self) -> None:
        """The body was read and is sound."""
        self.parsed_s = time.monotonic()

    def rendered(self) -> None:
        """The prompt is text. From any thread."""
        self.rendered_s = time.monotonic()

    def tokenized(self) -> None:
        """The prompt is ids. From any thread."""
        self.tokenized_s = time.monotonic()

    def submitted(self, prompts: Sequence[Sequence[int]], choices: int, bill: Charges) -> None:
        """It goes to the engine."""
        self.submitted_s = time.monotonic()
        self.prompt_tokens = sum(map(len, prompts))
        self._bill = bill
        if self.full is not None:
            self.full.prompt, self.full.choices = list(prompts[0]), choices
            self.full.size_bytes += _ID_BYTES * len(prompts[0])
            if len(prompts) > 1:
                self.full.cut = f"of {len(prompts)} prompts the first is recorded"

    def follow(self, stream: Times, answer: Counted | None = None) -> None:
        """Where its tokens come, and who counts them."""
        self._stream, self._answer = stream, answer

    def refresh(self) -> None:
        """Take over how far it has come."""
        if self._stream is not None:
            self.first_token_s = self._stream.first_token_s
            self.last_token_s = self._stream.last_token_s
            self.cached_tokens = self._stream.cached_tokens
        if self._answer is not None:
            self.output_tokens = self._answer.output_tokens
            self.reasoning_tokens = self._answer.reasoning_tokens
            self.finishes = self._answer.finishes
        if (bill := self._bill) is not None:
            self.queue_s, self.prefill_s = bill.queue_s, bill.prefill_s
            self.device_s, self.preempted_s = bill.compute_s, bill.preempted_s
            self.params = bill.parameters

    def done(self, status: int, error: str) -> None:
        """Its last byte leaves now, or nobody reads any more."""
        self.done_s, self.status, self.error = time.monotonic(), status, error
        self.refresh()
        if self._bill is not None:
            self.cost = self._bill.charged()
        self._stream = self._answer = self._bill = None

    @property
    def scheduled_s(self) -> float:
        """When its first step was planned; 0 = not yet, or nobody said."""
        return self.submitted_s + self.queue_s if self.prefill_s else 0.0

    @property
    def size_bytes(self) -> int:
        """About what it takes."""
        return 2048 + (self.full.size_bytes if self.full is not None else 0)

    def light(self) -> dict[str, Any]:
        """One line of the list of requests."""
        self.refresh()
        end_s = self.done_s or time.monotonic()
        first_s = self.first_token_s
        return {
            "id": self.id,
            "key": self.name,
            "endpoint": self.endpoint,
            "model": self.model,
            "created_s": self.created_s,
            "state": "done" if self.done_s else "running",
            "status": self.status,
            "error": self.error,
            "trace_id": self.trace_id,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "finish_reason": next(iter(self.finishes), None),
            "ttft_ms": self._ms(first_s),
            "e2e_ms": self._ms(end_s),
            "full": self.full is not None,
        }

    def _ms(self, at_s: float) -> float | None:
        """Milliseconds since it arrived; None: that has not come yet."""
        return round((at_s - self.arrived_s) * 1000, 3) if at_s else None

    def whole(self) -> dict[str, Any]:
        """All of a light record; `api.record_view` adds the full one's parts."""
        light = self.light()
        times = {
            "arrived": self.arrived_s,
            "parsed": self.parsed_s,
            "rendered": self.rendered_s,
            "tokenized": self.tokenized_s,
            "submitted": self.submitted_s,
            "scheduled": self.scheduled_s,
            "first_token": self.first_token_s,
            "last_token": self.last_token_s,
            "done": self.done_s,
        }
        cost = self.cost
        return light | {
            "note": self.note,
            "times_ms": {name: self._ms(at_s) for name, at_s in times.items()},
            "preempted_ms": [self._ms(at_s) for at_s in self.preempted_s],
            "params": finite(self.params),
            "usage": {
                "prompt_tokens": self.prompt_tokens,
                "cached_tokens": self.cached_tokens,
                "completion_tokens": self.output_tokens,
                "reasoning_tokens": self.reasoning_tokens,
            },
            "timing": {
                "queue_ms": self.queue_s * 1000,
                "prefill_ms": self.prefill_s * 1000,
                "decode_ms": (self.last_token_s - self.first_token_s) * 1000,
                "device_ms": self.device_s * 1000,
            },
            "cost": None if cost is None else {"amount": cost[0], "currency": cost[1]},
            "finish_reasons": self.finishes,
        }


def finite(values: dict[str, Any]) -> dict[str, Any]:
    """Plain values that JSON can carry."""
    plain: dict[str, Any] = msgspec.to_builtins(values)
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in plain.items()
    }
