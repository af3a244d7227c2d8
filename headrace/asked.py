"""What a caller asked for becomes what the engine gets: defaults filled in, limits checked.

The rules that the HTTP edge and `headrace.LLM` share.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from typing import Any

import msgspec

from headrace.draws import MAX_BREAKERS, Draws, hints
from headrace.errors import ContextTooLong, InvalidRequest
from headrace.messages import Dry, EngineInfo, Lz, Repetition, Rules, Sampling
from headrace.sources.card import ModelCard
from headrace.text.token_search import token_search
from headrace.text.tokenizer import Tokenizer

log = logging.getLogger("headrace.asked")

DRY_BREAKERS = ["\n", ":", '"', "*"]  # as in text-generation-webui and llama.cpp
assert len(DRY_BREAKERS) <= MAX_BREAKERS

_OPENAI = Draws(
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    typical_p=1.0,
    top_n_sigma=0.0,
    repetition_penalty=1.0,
    frequency_penalty=0.0,
    presence_penalty=0.0,
    penalty_window=0,
    dry_multiplier=0.0,
    dry_base=1.75,
    dry_allowed_length=2,
    dry_window=0,
    lz_penalty=0.0,
    lz_window=512,
)
_CARD_FIELDS = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")
_ID = re.compile(r"\d{1,18}", re.ASCII)


class Sampler:
    """One model's and one server's side of a request's sampling. Thread-safe."""

    def __init__(self, card: ModelCard, server: Draws, tokenizer: Tokenizer) -> None:
        given = (server, _model_defaults(card))
        self._defaults = {  # what holds for who asks for nothing
            name: next((v for one in given if (v := getattr(one, name)) is not None), default)
            for name in Draws.__struct_fields__
            if (default := getattr(_OPENAI, name)) is not None
        }
        self._tokenizer = tokenizer

    def sampling(self, asked: Draws, vocab_size: int, stop_ids: list[int], seed: int) -> Sampling:
        """The caller's values, else the server's, else the model's own, else OpenAI's.

        stop_ids: what ends a choice, end tokens among them. `seed`: any 64-bit integer, for a
        caller that gives none. Raises InvalidRequest naming the field: an id out of range, text
        without a tokenizer, rules that leave no token.
        """

        def first(name: str) -> Any:
            value = getattr(asked, name)
            return self._defaults[name] if value is None else value

        return Sampling(
            temperature=first("temperature"),
            top_k=max(0, int(first("top_k"))),
            top_p=first("top_p"),
            min_p=first("min_p"),
            typical_p=first("typical_p"),
            top_n_sigma=max(0.0, first("top_n_sigma")),
            seed=(seed if asked.seed is None else asked.seed) % 2**64,
            rules=self._rules(asked, vocab_size, stop_ids),
            repetition=_repetition(
                first("repetition_penalty"),
                first("frequency_penalty"),
                first("presence_penalty"),
                first("penalty_window"),
            ),
            dry=Dry(
                first("dry_multiplier"),
                first("dry_base"),
                first("dry_allowed_length"),
                first("dry_window"),
                self._breakers(asked.dry_sequence_breakers, vocab_size),
            )
            if first("dry_multiplier") > 0
            else None,
            lz=Lz(first("lz_penalty"), first("lz_window")) if first("lz_penalty") > 0 else None,
        )

    def _rules(self, asked: Draws, vocab_size: int, stop_ids: list[int]) -> Rules | None:
        """None where nothing is ruled, which costs nothing."""
        bias = _biases(asked.logit_bias or {}, vocab_size)
        allowed = _ids(asked.allowed_token_ids or (), "allowed_token_ids", vocab_size)
        banned = _ids(asked.banned_token_ids or (), "banned_token_ids", vocab_size)
        words = self._bad_words(asked.bad_words or [])
        min_tokens = asked.min_tokens or 0
        held = stop_ids if min_tokens else []
        if not (bias or allowed or banned or words or held):
            return None
        never = {*banned, *held, *(word[0] for word in words if len(word) == 1)}
        if all(token in never for token in allowed or range(vocab_size)):
            field = "allowed_token_ids" if allowed else "banned_token_ids"
            raise InvalidRequest(f"{field}: no token may be drawn", param=field)
        return Rules(bias, allowed, banned, words, min_tokens if held else 0, held)

    def _bad_words(self, words: list[str]) -> list[list[int]]:
        """Ids of each word as it stands at the start of a text and after a space."""
        if not words:
            return []
        self._tokenizer.need_text("bad_words")
        bare = [word.lstrip(" ") or word for word in words]
        encoded = self._tokenizer.encode_batch(
            [*bare, *(" " + word for word in bare)], add_special=False, parse_special=False
        )
        for word, ids in zip(words, encoded, strict=False):
            if not ids:
                raise InvalidRequest(f"bad_words: {word!r} has no tokens", param="bad_words")
        return [list(ids) for ids in dict.fromkeys(map(tuple, encoded))]

    def _breakers(self, asked: list[str] | None, vocab_size: int) -> list[int]:
        """Every token whose text holds a breaker."""
        if asked:
            self._tokenizer.need_text("dry_sequence_breakers")
        search = token_search(self._tokenizer)
        pieces = DRY_BREAKERS if asked is None else asked
        return sorted({t for piece in pieces for t in search.holding(piece) if t < vocab_size})


def _model_defaults(card: ModelCard) -> Draws:
    """What the model's generation_config says; a value that no request could ask for is none."""
    said: dict[str, Any] = {}
    for name in _CARD_FIELDS:
        try:
            said[name] = msgspec.convert(getattr(card, name), hints(Draws)[name])
        except msgspec.ValidationError as error:
            log.warning("the model's own %s is not used: %s", name, error)
    return Draws(**said)


def _repetition(
    repetition: float, frequency: float, presence: float, window: int
) -> Repetition | None:
    if repetition == 1.0 and not frequency and not presence:
        return None
    return Repetition(repetition, frequency, presence, window)


def _ids(ids: Iterable[int], field: str, vocab_size: int) -> list[int]:
    """Distinct ids, ascending. Raises InvalidRequest for one that no token has."""
    distinct = sorted(set(ids))
    for token in distinct[:1] + distinct[-1:]:
        if not 0 <= token < vocab_size:
            raise InvalidRequest(
                f"{field}: {token} is not a token id in [0, {vocab_size})", param=field
            )
    return distinct


def _biases(biases: dict[str | int, float], vocab_size: int) -> list[tuple[int, float]]:
    """JSON has the ids as strings."""
    out: dict[int, float] = {}
    for key, bias in biases.items():
        token = int(key) if isinstance(key, int) or _ID.fullmatch(key) else -1
        if not 0 <= token < vocab_size or token in out:
            why = "twice" if token in out else f"not a token id in [0, {vocab_size})"
            raise InvalidRequest(f"logit_bias: {key!r} is {why}", param="logit_bias")
        out[token] = float(bias)
    return [(token, bias) for token, bias in out.items() if bias]


def output_tokens(
    info: EngineInfo,
    prompt_tokens: int,
    asked: int | None,
    param: str,
    *,
    what: str = "the prompt",
    min_tokens: int | None = None,
) -> int:
    """max_tokens of one prompt: what was asked, which may be 0, or the rest of the context, which
    must hold a token.

    Raises ContextTooLong with all numbers when they do not fit, InvalidRequest if it is below
    min_tokens.
    """
    room = info.max_model_len - prompt_tokens
    if room < (1 if asked is None else asked):
        more = {None: " and an answer needs at least 1 more", 0: ""}.get(
            asked, f" and {asked} more are asked for"
        )
        raise ContextTooLong(
            f"{what} has {prompt_tokens} tokens{more}, but this server holds "
            f"{info.max_model_len} tokens in all",
            param=param,
        )
    most = room if asked is None else asked
    if min_tokens is not None and min_tokens > most:
        raise InvalidRequest(
            f"min_tokens = {min_tokens} is over the {most} tokens that an answer may have",
            param="min_tokens",
        )
    return most
