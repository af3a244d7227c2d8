"""SamplingParams: what a Python caller asks of one prompt. The HTTP fields, by the same names."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from headrace.draws import Draws, check_types
from headrace.errors import InvalidRequest
from headrace.grammar.asked import StructuredOutputs

Report = Annotated[int, Meta(ge=0, le=20)]


class SamplingParams(Draws, frozen=True, kw_only=True):
    """How to draw (the fields of `Draws`), and when to stop.

    None: what LLM(default_sampling=...) says, then the model's own default, then OpenAI's. A seed
    of None: a new one each time.

    Raises InvalidRequest naming the field for a value of the wrong type or out of range.
    """

    max_tokens: Annotated[int, Meta(ge=1)] | None = None  # generate: 16; chat: what still fits
    n: Annotated[int, Meta(ge=1)] = 1  # choices a prompt
    stop: str | list[Annotated[str, Meta(min_length=1)]] = msgspec.field(default_factory=list)
    stop_token_ids: list[Annotated[int, Meta(ge=0)]] = msgspec.field(default_factory=list)
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    priority: int = 0  # needs scheduling_policy="priority"
    cache_salt: str = ""
    structured_outputs: StructuredOutputs | None = None  # what the output must match
    logprobs: Report | None = None  # beside each token, how many of the likeliest; None = nothing
    prompt_logprobs: Report | None = None  # the same of the prompt, from its second token on
    best_of: Annotated[int, Meta(ge=1)] | None = None  # draw as many, keep the n likeliest a token

    def __post_init__(self) -> None:
        check_types(self)
        if self.stop == "":
            raise InvalidRequest("stop = '': a stop string cannot be empty", param="stop")
        if self.best_of is not None and self.best_of < self.n:
            raise InvalidRequest(f"best_of = {self.best_of} is under n = {self.n}", param="best_of")

    @property
    def width(self) -> int:
        """Choices that are drawn for each prompt."""
        return max(self.n, self.best_of or 1)

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop


class BeamParams(msgspec.Struct, frozen=True, kw_only=True):
    """How `LLM.beam_search` searches; `headrace.beams` says what each means.

    Raises InvalidRequest naming the field for a value of the wrong type or out of range.
    """

    beam_width: Annotated[int, Meta(ge=1, le=10)]
    max_tokens: Annotated[int, Meta(ge=1)] = 16
    n: Annotated[int, Meta(ge=1)] | None = None  # beams returned; None = all
    length_penalty: Annotated[float, Meta(ge=-10, le=10)] = 1.0
    early_stopping: bool | Literal["never"] = False
    stop_token_ids: list[Annotated[int, Meta(ge=0)]] = msgspec.field(default_factory=list)
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: Report | None = None
    cache_salt: str = ""

    def __post_init__(self) -> None:
        check_types(self)
        if self.n is not None and self.n > self.beam_width:
            raise InvalidRequest(f"n = {self.n} is over the {self.beam_width} beams", param="n")
