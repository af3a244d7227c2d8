"""How to draw, as a caller says it: HTTP fields, SamplingParams and --default-sampling share it.

`docs/sampling.md` says what each one means. None: not given.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from headrace.errors import ConfigError, InvalidRequest

MAX_BIASES = 1024
MAX_IDS = 65_536  # of allowed_token_ids, of banned_token_ids
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 200
MAX_BREAKERS = 16
MAX_BREAKER_CHARS = 40

Unit = Annotated[float, Meta(ge=0, le=1)]
OpenAiPenalty = Annotated[float, Meta(ge=-2, le=2)]
Window = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
TokenIds = Annotated[list[int], Meta(max_length=MAX_IDS)]
BadWord = Annotated[str, Meta(min_length=1, max_length=MAX_BAD_WORD_CHARS)]
Breaker = Annotated[str, Meta(min_length=1, max_length=MAX_BREAKER_CHARS)]


class Draws(msgspec.Struct, frozen=True, kw_only=True):
    """Types and ranges. Ids, and what depends on the model, are checked in `asked`."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None  # 0 = greedy
    top_k: Annotated[int, Meta(ge=-1, le=2**63 - 1)] | None = None  # 0 and -1 = off
    top_p: Unit | None = None
    min_p: Unit | None = None
    typical_p: Unit | None = None
    top_n_sigma: Annotated[float, Meta(ge=-1, le=1000)] | None = None  # 0 and below = off
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    logit_bias: Annotated[dict[str | int, Bias], Meta(max_length=MAX_BIASES)] | None = None
    allowed_token_ids: TokenIds | None = None
    banned_token_ids: TokenIds | None = None
    bad_words: Annotated[list[BadWord], Meta(max_length=MAX_BAD_WORDS)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    frequency_penalty: OpenAiPenalty | None = None
    presence_penalty: OpenAiPenalty | None = None
    penalty_window: Window | None = None  # 0 = the whole sequence
    dry_multiplier: Annotated[float, Meta(ge=0, le=100)] | None = None  # 0 = off
    dry_base: Annotated[float, Meta(ge=1, le=100)] | None = None
    dry_allowed_length: Annotated[int, Meta(ge=1, le=255)] | None = None
    dry_window: Window | None = None  # 0 = the whole sequence
    dry_sequence_breakers: Annotated[list[Breaker], Meta(max_length=MAX_BREAKERS)] | None = None
    lz_penalty: Annotated[float, Meta(ge=0, le=100)] | None = None  # 0 = off
    lz_window: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None


# What a server may give defaults for: numbers that suit every request.
DEFAULTABLE = tuple(
    name
    for name in Draws.__struct_fields__
    if name not in {
        "seed", "logit_bias", "allowed_token_ids", "banned_token_ids", "bad_words", "min_tokens",
        "dry_sequence_breakers",
    }
)  # fmt: skip


@functools.cache
def hints(kind: type) -> Mapping[str, Any]:
    """Field -> annotation, with its ranges."""
    return typing.get_type_hints(kind, include_extras=True)


def check_types(params: msgspec.Struct) -> None:
    """What decoding checks by itself, for a struct that Python code has built.

    Raises InvalidRequest naming the field.
    """
    for name, hint in hints(type(params)).items():
        value = getattr(params, name)
        try:
            msgspec.convert(value, hint)
        except msgspec.ValidationError as error:
            why = str(error).split(" - at `")[0]
            raise InvalidRequest(f"{name} = {value!r}: {why}", param=name) from None


def parse_defaults(text: str) -> Draws:
    """`temperature=0.7,top_p=0.9` -> those fields. Raises ConfigError naming name and value."""
    values: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, _, number = (part.strip() for part in item.partition("="))
        where = f"default_sampling: {item}"
        if name not in DEFAULTABLE:
            raise ConfigError(f"{where}: one of {', '.join(DEFAULTABLE)}", param="default_sampling")
        if name in values:
            raise ConfigError(f"{where}: given twice", param="default_sampling")
        try:
            value = msgspec.json.decode(number.encode())
            values[name] = msgspec.convert(value, hints(Draws)[name])
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise ConfigError(f"{where}: {error}", param="default_sampling") from None
        if values[name] is None:
            raise ConfigError(f"{where}: a number", param="default_sampling")
    return Draws(**values)
