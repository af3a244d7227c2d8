"""What a caller asked for becomes what the engine gets: defaults filled in, limits checked.

The rules that the HTTP edge and `headrace.LLM` share.
"""

from __future__ import annotations

from typing import Protocol

from headrace.errors import ContextTooLong
from headrace.messages import EngineInfo, Sampling
from headrace.sources.card import ModelCard


class Draws(Protocol):
    """How to draw, as asked. None: not given."""

    @property
    def temperature(self) -> float | None: ...
    @property
    def top_k(self) -> int | None: ...
    @property
    def top_p(self) -> float | None: ...
    @property
    def min_p(self) -> float | None: ...


def sampling(asked: Draws, card: ModelCard, seed: int) -> Sampling:
    """The caller's values, else the model's own, else OpenAI's. `seed`: any 64-bit integer."""

    def first(*values: float | None) -> float:
        return next(value for value in values if value is not None)

    return Sampling(
        temperature=first(asked.temperature, card.temperature, 1.0),
        top_k=max(0, int(first(asked.top_k, card.top_k, 0))),
        top_p=first(asked.top_p, card.top_p, 1.0),
        min_p=first(asked.min_p, card.min_p, 0.0),
        seed=seed % 2**64,
    )


def output_tokens(
    info: EngineInfo, prompt_tokens: int, asked: int | None, param: str, *, what: str = "the prompt"
) -> int:
    """max_tokens of one prompt: what was asked, or the rest of the context.

    Raises ContextTooLong with all three numbers when they do not fit.
    """
    room = info.max_model_len - prompt_tokens
    if room < 1 or (asked or 1) > room:
        raise ContextTooLong(
            f"{what} has {prompt_tokens} tokens and {asked or 1} more are asked for, but this "
            f"server holds {info.max_model_len} tokens in all",
            param=param,
        )
    return asked or room
