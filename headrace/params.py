"""SamplingParams: what a Python caller asks of one prompt. The HTTP fields, by the same names."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from headrace.draws import Draws, hints
from headrace.errors import InvalidRequest
from headrace.grammar.asked import StructuredOutputs


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

    def __post_init__(self) -> None:
        for name, hint in hints(SamplingParams).items():
            value = getattr(self, name)
            try:
                msgspec.convert(value, hint)
            except msgspec.ValidationError as error:
                why = str(error).split(" - at `")[0]
                raise InvalidRequest(f"{name} = {value!r}: {why}", param=name) from None
        if self.stop == "":
            raise InvalidRequest("stop = '': a stop string cannot be empty", param="stop")

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop
