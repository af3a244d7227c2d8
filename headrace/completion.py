"""What `headrace.LLM` returns for a prompt, and the record of it while it runs."""

from __future__ import annotations

import math

import msgspec

from headrace.messages import Done, Logprobs, Reason, Submit
from headrace.params import SamplingParams
from headrace.text.choice import ChoiceText


class Completion(msgspec.Struct, kw_only=True):
    """One choice of one prompt."""

    prompt_index: int  # which prompt of the call
    index: int  # which choice of that prompt, 0 <= index < n
    text: str = ""
    token_ids: list[int] = []
    finish_reason: Reason = "abort"  # stop, length, or error: see `error`
    prompt_token_ids: list[int]
    cached_tokens: int = 0  # prompt tokens that the prefix cache held
    error: str = ""  # this prompt alone failed in the engine: why
    logprobs: list[Logprobs] | None = None  # one a token, where asked for
    cumulative_logprob: float | None = None  # their sum; also of the choices of best_of
    prompt_logprobs: list[Logprobs | None] | None = None  # None first, then one a token


class Choice:
    """A choice while it runs: its record, its text machine, and whether its text is complete."""

    def __init__(self, completion: Completion, text: ChoiceText) -> None:
        self.completion, self.text = completion, text
        self.ended = False  # later tokens are the overrun of a stop string
        self.said: list[Logprobs] = []  # of each of its tokens

    def conclude(self, reports: bool) -> None:
        """The last tokens came; those past a stop string do not count."""
        counted, completion = self.text.n_tokens, self.completion
        del completion.token_ids[counted:]
        if self.said:
            del self.said[counted:]
            completion.cumulative_logprob = math.fsum(one.logprob for one in self.said)
        completion.logprobs = self.said if reports else None


class Job:
    """One prompt: what is submitted for it, and its choices as they come."""

    def __init__(self, submit: Submit, choices: list[Choice], params: SamplingParams) -> None:
        self.submit, self.choices, self.params = submit, choices, params
        self.said: list[Logprobs | None] = [None]  # of the prompt's tokens
        self.vector: bytes | None = None  # what came of a submit with `pooling`
        self.done: Done | None = None  # its terminal message
        self.tokens = 0  # received so far, all choices
        self.fresh: list[str] = []  # text of choice 0 that `stream` has not handed on

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the prefix cache held, once it is done."""
        return self.done.cached_tokens if self.done is not None else 0

    @property
    def error(self) -> str:
        """Why it failed in the engine; "" if it did not."""
        if self.done is None or not self.done.error:
            return ""
        return f"{self.done.error}: {self.done.message}"

    def shown(self) -> list[Completion]:
        """The n choices that the caller gets; of more, those likeliest a token, best first."""
        found = [choice.completion for choice in self.choices]
        if len(found) > self.params.n:
            found.sort(key=_mean_logprob, reverse=True)
            found = found[: self.params.n]
            for index, completion in enumerate(found):
                completion.index = index
        return found

    def __lt__(self, other: Job) -> bool:
        return self.submit.handle < other.submit.handle


def _mean_logprob(completion: Completion) -> float:
    if completion.cumulative_logprob is None:
        return -math.inf  # it failed
    return completion.cumulative_logprob / max(1, len(completion.token_ids))
