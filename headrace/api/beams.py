"""A beam search behind the same face as a stream of tokens: its answers come all at the end."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from headrace.beams import BeamRules, BeamSearch
from headrace.engine.client import EngineClient, Job
from headrace.engine.token_stream import Account, Delta, TokenStream
from headrace.errors import HeadraceError, RequestFailed
from headrace.messages import Done, End, Logprobs


class StepAccount:
    """The account of one step. Its draws are no output yet; and only the first step's prompt is the
    caller's: what later ones find in the cache are blocks that the search itself put there.
    """

    def __init__(self, account: Account, *, first: bool) -> None:
        self._account, self._first = account, first

    def submitted(self, prompts: int, /) -> None:
        """See `Account`."""
        self._account.submitted(prompts)

    def told(self, done: Done, first_s: float, last_s: float, /) -> None:
        """See `Account`."""
        cached_tokens = done.cached_tokens if self._first else 0
        done = msgspec.structs.replace(done, cached_tokens=cached_tokens, output_tokens=0)
        self._account.told(done, first_s, last_s)

    def lost(self) -> None:
        """See `Account`."""
        self._account.lost()


class BeamStream(TokenStream):
    """See `TokenStream`. `jobs`: one a prompt, as they would be submitted; n: beams shown of each.

    A step of all prompts is one stream of one-token jobs, for the engine like any other.
    """

    __slots__ = ("_jobs", "_now", "_rules", "_steps")

    def __init__(
        self, client: EngineClient, jobs: Sequence[Job], rules: BeamRules, n: int, arrived_s: float
    ) -> None:
        super().__init__(client, n, arrived_s or time.monotonic())
        self._jobs, self._rules = jobs, rules
        self._now: TokenStream | None = None  # the step that runs
        self._live = 1  # until the answers were taken

    async def take(self) -> list[Delta]:
        """Search, and return the answers. Raises what ended it early."""
        searches = [
            BeamSearch(job.prompt, self._rules, job.max_tokens, job.stop_ids) for job in self._jobs
        ]
        while open_ones := [i for i, search in enumerate(searches) if not search.done]:
            reports = await self._step(open_ones, searches)
            for i in open_ones:
                count = len(searches[i].prompts)
                searches[i].feed(reports[:count])
                del reports[:count]
        self._live = 0
        return [
            Delta(
                position * self.n + at,
                beam.tokens,
                End(0, at, beam.reason, beam.stop_id),
                beam.said,
            )
            for position, search in enumerate(searches)
            for at, beam in enumerate(search.best(self.n))
        ]

    async def _step(self, places: list[int], searches: list[BeamSearch]) -> list[Logprobs]:
        """One token after each prompt of these searches: what is said of it."""
        first = self._now is None
        jobs = [
            msgspec.structs.replace(
                self._jobs[i],
                prompt=prompt,
                max_tokens=1,
                n=1,
                sampling=self._rules.sampling,
                stop_ids=[],
                prompt_logprobs=self._jobs[i].prompt_logprobs if first else -1,
            )
            for i in places
            for prompt in searches[i].prompts
        ]
        reports: list[Logprobs | None] = [None] * len(jobs)
        arrived_s = self.arrived_s if first else 0.0
        account = self.account and StepAccount(self.account, first=first)
        async with self._client.submit(jobs, arrived_s, account) as step:
            self._now = step
            if self._error is not None:
                raise self._error
            while not step.done:
                for delta in await step.take():
                    for report in delta.logprobs:
                        reports[delta.index] = report
        if first:
            self.cached_tokens, self.prompt_logprobs = step.cached_tokens, step.prompt_logprobs
            self.first_token_s = step.first_token_s
        self.last_token_s = step.last_token_s
        found = [report for report in reports if report is not None]
        if len(found) < len(jobs):
            raise RequestFailed("the engine ended a step of the search early")
        return found

    def finish(self, index: int, n_tokens: int) -> None:
        """Nothing runs any more when a text is read."""

    def abort(self) -> None:
        """End the step that runs."""
        self.closed = True
        if self._now is not None:
            self._now.abort()

    def fail(self, error: HeadraceError) -> None:
        """End the search with `error`."""
        self._error = error
        if self._now is not None:
            self._now.fail(error)
