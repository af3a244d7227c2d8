"""From what a caller says to `Sampling`: defaults, ids, text, and what is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from headrace.asked import DRY_BREAKERS, Sampler, output_tokens
from headrace.config import load
from headrace.draws import DEFAULTABLE, Draws, parse_defaults
from headrace.errors import ConfigError, ContextTooLong, InvalidRequest
from headrace.grammar.asked import StructuredOutputs
from headrace.messages import Dry, EngineInfo, Lz, Repetition, Rules, Sampling
from headrace.params import SamplingParams
from headrace.sources.card import ModelCard
from headrace.text.token_search import token_search
from headrace.text.tokenizer import NoTokenizer
from tests.unit.sample_tokenizers import KINDS, card

BYTES, VOCAB, ENDS = KINDS["byte_level"], 259, [256, 258]


def sampling(server: str = "", model: ModelCard | None = None, **fields: Any) -> Sampling:
    sampler = Sampler(model or card(), parse_defaults(server), BYTES)
    return sampler.sampling(SamplingParams(**fields), VOCAB, ENDS, 7)


def test_what_is_not_asked_for_costs_nothing() -> None:
    assert sampling() == Sampling(seed=7)
    nothing: dict[str, Any] = {
        "logit_bias": {},
        "allowed_token_ids": [],
        "banned_token_ids": [],
        "bad_words": [],
        "min_tokens": 0,
        "repetition_penalty": 1.0,
        "penalty_window": 50,
        "dry_multiplier": 0.0,
        "dry_base": 2.0,
        "lz_penalty": 0.0,
        "top_k": -1,
        "top_n_sigma": -1.0,
    }
    assert sampling(**nothing) == Sampling(seed=7)
    assert not sampling(**nothing).needs_history


def test_request_then_server_then_model_then_openai() -> None:
    model = msgspec.structs.replace(card(), temperature=0.6, top_p=0.8, repetition_penalty=1.1)
    assert sampling(model=model) == Sampling(
        temperature=0.6, top_p=0.8, seed=7, repetition=Repetition(1.1)
    )
    server = "temperature=0.7, top_k=40,repetition_penalty=1"
    assert sampling(server, model) == Sampling(temperature=0.7, top_k=40, top_p=0.8, seed=7)
    own = sampling(server, model, temperature=0, top_k=0, top_p=1, seed=-1)
    assert own == Sampling(temperature=0, seed=2**64 - 1)


def test_a_models_own_nonsense_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    model = msgspec.structs.replace(card(), temperature=9.0, repetition_penalty=0.0, top_p=0.5)
    assert sampling(model=model) == Sampling(top_p=0.5, seed=7)
    assert "temperature" in caplog.text
    assert "repetition_penalty" in caplog.text


def test_penalties() -> None:
    assert sampling(presence_penalty=-1, penalty_window=9).repetition == Repetition(1, 0, -1, 9)
    assert sampling(lz_penalty=0.15).lz == Lz(0.15, 512)
    breakers = sorted(ord(piece) for piece in DRY_BREAKERS)
    assert sampling(dry_multiplier=0.8).dry == Dry(0.8, 1.75, 2, 0, breakers)
    own = sampling(dry_multiplier=0.8, dry_sequence_breakers=["z", "zb"], dry_allowed_length=4)
    assert own.dry == Dry(0.8, 1.75, 4, 0, [ord("z")])
    assert sampling("dry_multiplier=0.5,dry_window=64").dry == Dry(0.5, 1.75, 2, 64, breakers)


def test_rules() -> None:
    assert sampling(logit_bias={"5": -100, 6: 2}).rules == Rules([(5, -100.0), (6, 2.0)])
    assert sampling(allowed_token_ids=[7, 3, 3]).rules == Rules(allowed=[3, 7])
    assert sampling(banned_token_ids=[258]).rules == Rules(banned=[258])
    assert sampling(min_tokens=3).rules == Rules(min_tokens=3, held=ENDS)
    words = sampling(bad_words=["ab", " ab", "c"]).rules
    assert words is not None
    assert sorted(words.bad_words) == [list(b" ab"), list(b" c"), list(b"ab"), list(b"c")]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", {"259": 1}),  # bugs B035
        ("logit_bias", {"191222": -100, "5": 5}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"abc": 1}),
        ("logit_bias", {"5.0": 1}),
        ("logit_bias", {"": 1}),
        ("logit_bias", {"٥": 1}),
        ("logit_bias", {"9" * 400: 1}),
        ("logit_bias", {"5": 1, "05": 2}),
        ("allowed_token_ids", [3, 259]),
        ("allowed_token_ids", [-1]),
        ("banned_token_ids", [2**70]),
    ],
)
def test_ids_that_no_token_has(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=field) as caught:
        sampling(**{field: value})
    assert caught.value.param == field
    assert len(caught.value.message) < 600


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": [5], "banned_token_ids": [5]},
        {"allowed_token_ids": [256, 258], "min_tokens": 1},
        {"banned_token_ids": list(range(VOCAB))},
        {"banned_token_ids": list(range(1, VOCAB)), "bad_words": ["\0"]},
    ],
)
def test_rules_that_leave_no_token(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="no token may be drawn"):
        sampling(**fields)


def test_text_needs_a_tokenizer() -> None:
    sampler = Sampler(card(), Draws(), NoTokenizer(card()))
    fields: list[dict[str, Any]] = [{"bad_words": ["a"]}, {"dry_sequence_breakers": ["a"]}]
    for given in fields:
        field = next(iter(given))
        asked = SamplingParams(dry_multiplier=1.0, **given)
        with pytest.raises(InvalidRequest, match=field):
            sampler.sampling(asked, VOCAB, [], 0)
    plain = sampler.sampling(SamplingParams(dry_multiplier=1.0), VOCAB, [], 0)
    assert plain.dry == Dry(1.0)


def test_min_tokens_over_max_tokens() -> None:
    info = EngineInfo(100, 4, VOCAB, 4, 100)
    assert output_tokens(info, 10, 5, "prompt", min_tokens=5) == 5
    for asked in (5, None):
        with pytest.raises(InvalidRequest, match="min_tokens = 91"):
            output_tokens(info, 10, asked, "prompt", min_tokens=91)


@pytest.mark.parametrize(
    ("prompt", "asked", "told"),
    [
        (100, 0, 0),
        (99, 1, 1),
        (99, None, 1),
        (101, 0, "the prompt has 101 tokens, but"),
        (100, 1, "100 tokens and 1 more are asked for, but"),
        (100, None, "100 tokens and an answer needs at least 1 more, but"),
        (50, 51, "50 tokens and 51 more are asked for, but"),
    ],
)
def test_a_prompt_needs_no_room_for_what_is_not_asked(
    prompt: int, asked: int | None, told: int | str
) -> None:
    info = EngineInfo(100, 4, VOCAB, 4, 100)
    if isinstance(told, int):
        assert output_tokens(info, prompt, asked, "prompt") == told
        return
    with pytest.raises(ContextTooLong, match=f"{told} this server holds 100 tokens in all"):
        output_tokens(info, prompt, asked, "prompt")


@pytest.mark.parametrize("kind", list(KINDS))
def test_tokens_that_hold_a_text(kind: str) -> None:
    tokenizer = KINDS[kind]
    for piece in ("l", "lo", " ", "é", "\n", "zzz", "\0"):
        found = token_search(tokenizer).holding(piece)
        want = [i for i, text in enumerate(tokenizer.texts) if text and piece in text]
        assert found == ([] if piece == "\0" else want)


@pytest.mark.parametrize(
    "text",
    [
        "temperature",
        "temperature=",
        "temperature=hot",
        "temperature=3",
        "temperature=null",
        "temperature=NaN",
        "temperature=0.5,temperature=0.6",
        "heat=1",
        "seed=1",
        "logit_bias={}",
        "repetition_penalty=0",
        "top_k=1.5",
    ],
)
def test_defaults_that_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="default_sampling"):
        load({"default_sampling": text}, {})


def test_defaults_of_every_kind() -> None:
    text = ",".join(f"{name}={2 if name.endswith(('k', 'window', 'length', 'base')) else 0.5}"
                    for name in DEFAULTABLE)  # fmt: skip
    settings, _ = load({}, {"HEADRACE_DEFAULT_SAMPLING": text})
    given = parse_defaults(settings.default_sampling)
    assert given.top_k == given.lz_window == given.dry_base == 2
    assert given.temperature == given.typical_p == given.presence_penalty == 0.5
    assert parse_defaults(" ") == Draws()


@pytest.mark.parametrize(
    "fields",
    [{"regex": ""}, {"regex": 5}, {"choice": []}, {"choice": "ab"}, {"json": 5}, {"grammar": ""}],
)
def test_structured_outputs_that_python_builds_are_checked_too(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        StructuredOutputs(**fields)
    assert caught.value.param in fields
