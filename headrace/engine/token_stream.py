"""The tokens of one HTTP request on their way from the engine's client to whoever answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

import msgspec

from headrace.errors import HeadraceError, RequestFailed, by_code
from headrace.messages import Done, End, Logprobs

if TYPE_CHECKING:
    from headrace.engine.client import EngineClient

BACKLOG_TOKENS = 65_536  # tokens a stream may hold that nobody takes


class Account(Protocol):
    """Who keeps count of what a stream costs."""

    def submitted(self, prompts: int, /) -> None:
        """So many were sent to the engine; for each, `told` follows, or `lost` for all."""

    def told(self, done: Done, first_s: float, last_s: float, /) -> None:
        """One was answered; time.monotonic() of the stream's tokens so far, 0 = there are none."""

    def lost(self) -> None:
        """The engine is gone, or forgot them."""


class Watcher(Protocol):
    """Who is told all that a recorded stream hears, as it comes."""

    def token(self, index: int, token: int, now_s: float, /) -> None:
        """One token of a choice; `index` as in `Delta`."""

    def hear(self, told: bytes, /) -> None:
        """A `messages.Recorded`, encoded, of the stream's first prompt."""


class Delta(msgspec.Struct):
    """What one choice got since the last take. `index` = prompt index * n + choice.

    logprobs: one for each of `tokens`; [] where the choice asked for none.
    """

    index: int
    tokens: list[int]
    end: End | None = None
    logprobs: list[Logprobs] = []


Taker = Callable[[Iterable[Delta]], bool]  # see `TokenStream.hand_to`


class TokenStream:
    """The answers to the prompts of one HTTP request, merged per choice until taken.

    Use as `async with`: leaving it aborts whatever still runs. `take` until `done`.
    """

    __slots__ = (
        "_backlog",
        "_client",
        "_deltas",
        "_error",
        "_handles",
        "_live",
        "_nudged",
        "_said",
        "_taker",
        "_waiter",
        "account",
        "arrived_s",
        "cached_tokens",
        "closed",
        "first_token_s",
        "last_token_s",
        "limits",
        "n",
        "prompt_logprobs",
        "said_s",
        "vectors",
        "watcher",
        "whole",
    )

    def __init__(self, client: EngineClient, n: int, arrived_s: float) -> None:
        self._client = client
        self.n = n
        self._handles: list[int] = []  # by prompt index
        self._live = 0  # handles whose Done has not come
        self._deltas: dict[int, Delta] = {}
        self._backlog = 0
        self._error: HeadraceError | None = None
        self._said: HeadraceError | None = None  # by the engine, in a Done
        self._waiter: asyncio.Future[None] | None = None
        self._taker: Taker | None = None
        self._nudged = False
        self.closed = False  # tokens that still come are dropped
        # Whoever takes has all that it wants, so that it is no matter how what the engine drew past
        # the stop strings ended: see `take`.
        self.whole = False
        self.account: Account | None = None
        self.watcher: Watcher | None = None
        self.arrived_s = arrived_s
        # time.monotonic(); 0 = none yet. What draws nothing gives a vector, or its end, instead.
        self.first_token_s = 0.0
        self.last_token_s = 0.0
        self.said_s: dict[int, float] = {}  # index -> when its newest token came
        self.limits: dict[int, int] = {}  # handle -> max_tokens of its choices
        self.cached_tokens = 0
        # prompt index -> of its tokens 1, 2, ... as far as they came; complete before any token or
        # end
        self.prompt_logprobs: dict[int, list[Logprobs]] = {}
        self.vectors: dict[int, bytes] = {}  # prompt index -> `messages.Vector.values`

    @property
    def done(self) -> bool:
        """Nothing more will come: every prompt has its Done and everything was taken."""
        return not self._live and not self._deltas and self._error is None

    async def __aenter__(self) -> TokenStream:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.abort()

    async def take(self) -> list[Delta]:
        """Wait for news and return all of it; empty after a nudge or with the last Done.

        Raises whatever ended the stream early, after the tokens that came before it; but not what
        the engine says of a stream that is `whole` by then.
        """
        self._forgive()
        while not self._deltas and self._error is None and self._live and not self._nudged:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._nudged = False
        self._forgive()
        if self._deltas:
            deltas = list(self._deltas.values())
            self._deltas, self._backlog = {}, 0
            return deltas
        if self._error is not None:
            raise self._error
        return []

    def _forgive(self) -> None:
        if self.whole and self._said is not None and self._error is self._said:
            self._error = None

    def hand_to(self, taker: Taker | None) -> None:
        """While somebody waits in `take`, give news to `taker` instead, at once: that costs less
        than to wake a task. It says whether it took all of them; else, and where nothing more will
        come, `take` returns as ever.
        """
        self._taker = taker

    async def pooled(self) -> list[bytes]:
        """Wait for the vectors of jobs with `pooling`, by prompt: float32, little-endian.

        Raises whatever ended one of them early.
        """
        while not self.done:
            await self.take()
        return [self.vectors[prompt] for prompt in range(len(self._handles))]

    def finish(self, index: int, n_tokens: int) -> None:
        """The text of choice `index` matched a stop string after its first `n_tokens` tokens."""
        prompt, choice = divmod(index, self.n)
        self._client.send_finish(self._handles[prompt], choice, n_tokens)

    def abort(self) -> None:
        """End every choice that still runs; harmless when none does."""
        if self.closed:
            return
        self.closed = True
        for handle in self._handles:
            self._client.send_abort(handle)

    def fail(self, error: HeadraceError) -> None:
        """End the stream at once with `error`: what was not taken is dropped."""
        self._deltas = {}
        self._error = error
        self.abort()
        self.wake()

    def nudge(self) -> None:
        """Make `take` return now, empty if there is nothing: time for a keep-alive."""
        self._nudged = True
        self.wake()

    def wake(self) -> None:
        """Let a waiting `take` look again."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # ------------------------------------------------------------ called by EngineClient

    def news(self) -> None:
        """All that one message has for this stream was pushed."""
        waiter, taker = self._waiter, self._taker
        if waiter is None or waiter.done():
            return  # whoever takes has work, and will find it
        if taker is None or not (self._live and self._deltas) or self._nudged or self._error:
            waiter.set_result(None)
        elif taker(self._deltas.values()):
            self._deltas, self._backlog = {}, 0
        elif not waiter.done():
            waiter.set_result(None)

    def opened(self, handle: int) -> None:
        """One more request of this stream runs."""
        self._handles.append(handle)
        self._live += 1

    def push(self, index: int, token: int) -> None:
        """A token of choice `index`. Beyond BACKLOG_TOKENS that nobody took the stream fails."""
        delta = self._deltas.get(index)
        if delta is None:
            self._deltas[index] = Delta(index, [token])
        else:
            delta.tokens.append(token)
        self._backlog += 1
        if self._backlog > BACKLOG_TOKENS:
            self.fail(RequestFailed(f"nobody took {BACKLOG_TOKENS} tokens: the client is too slow"))

    def push_logprobs(self, index: int, entry: Logprobs) -> None:
        """Of the token pushed last."""
        if (delta := self._deltas.get(index)) is not None:  # else the backlog was dropped
            delta.logprobs.append(entry)

    def push_prompt(self, prompt: int, entries: list[Logprobs]) -> None:
        """More log-probabilities of a prompt's tokens, in their order."""
        self.prompt_logprobs.setdefault(prompt, []).extend(entries)

    def push_end(self, index: int, end: End) -> None:
        """Choice `index` has no more tokens."""
        self._deltas.setdefault(index, Delta(index, [])).end = end

    def push_done(self, done: Done) -> None:
        """One of its requests is over."""
        self._live -= 1
        self.cached_tokens += done.cached_tokens
        if self.account is not None:
            self.account.told(done, self.first_token_s, self.last_token_s)
        if done.error and self._error is None:
            self._error = self._said = by_code(done.error, done.message)
            self.abort()
