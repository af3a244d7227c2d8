"""What a body may hold: types, ranges, harmless, unsupported and unknown fields."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.api.body import decode
from headrace.api.message_blocks import Messages
from headrace.api.schemas import MAX_N, NOT_YET, Chat, Completion, parse
from headrace.draws import MAX_BIASES
from headrace.errors import InvalidRequest

USER = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> tuple[Chat, list[str]]:
    return parse(Chat, {"messages": USER, **fields})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", 999999),
        ("temperature", "1"),
        ("temperature", True),
        ("top_p", -1),
        ("top_p", 1.5),
        ("min_p", 2),
        ("top_k", -2),
        ("top_k", 1.5),
        ("typical_p", 1.01),
        ("top_n_sigma", -2),
        ("top_n_sigma", 1e9),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1),
        ("repetition_penalty", 101),
        ("frequency_penalty", 2.1),
        ("presence_penalty", -2.1),
        ("penalty_window", -1),
        ("min_tokens", -1),
        ("min_tokens", 1.5),
        ("logit_bias", {"5": 100.5}),
        ("logit_bias", {"5": -101}),
        ("logit_bias", {"5": None}),
        ("logit_bias", {"5": "1"}),
        ("logit_bias", [5]),
        ("logit_bias", {str(i): 1 for i in range(MAX_BIASES + 1)}),
        ("allowed_token_ids", "5"),
        ("allowed_token_ids", [1.5]),
        ("banned_token_ids", [True]),
        ("bad_words", "word"),
        ("bad_words", [""]),
        ("bad_words", ["w"] * 257),
        ("dry_multiplier", -1),
        ("dry_base", 0.5),
        ("dry_allowed_length", 0),
        ("dry_window", -1),
        ("dry_sequence_breakers", [""]),
        ("dry_sequence_breakers", ["a"] * 17),
        ("lz_penalty", -0.1),
        ("lz_window", 0),
        ("n", 0),
        ("n", -1),
        ("n", MAX_N + 1),
        ("n", 5_000_000),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", "5"),
        ("max_tokens", 1.5),
        ("max_completion_tokens", 0),
        ("seed", 2**63),
        ("seed", "7"),
        ("stop", [""]),
        ("stop", ""),
        ("stop", ["a"] * 17),
        ("stop", [1]),
        ("stop_token_ids", ["a"]),
        ("stream", "yes"),
        ("ignore_eos", 1),
        ("cache_salt", ""),
        ("cache_salt", 5),
        ("priority", "high"),
        ("messages", []),
        ("messages", None),
        ("messages", "hi"),
        ("messages", [{"content": "no role"}]),
        ("messages", [{"role": "user", "content": 5}]),
        ("chat_template_kwargs", []),
        ("model", 5),
        ("stream_options", {"include_usage": "yes"}),
    ],
)
def test_a_bad_value_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(**{field: value})
    assert (caught.value.param or "").split("[")[0].split(".")[0] == field
    assert caught.value.message
    assert field in caught.value.message


@pytest.mark.parametrize("field", sorted(NOT_YET))
def test_fields_that_cannot_be_honoured_are_refused_unless_they_ask_for_nothing(field: str) -> None:
    for harmless in NOT_YET[field]:
        assert chat(**{field: harmless})[1] == []
    with pytest.raises(InvalidRequest, match="not supported yet") as caught:
        chat(**{field: {"some": "thing"}})
    assert caught.value.param == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logprobs", 0),  # completions: the log-probability of each token
        ("top_logprobs", 1),  # without logprobs
        ("tools", [{"type": "function"}]),
        ("functions", [{"name": "f"}]),
    ],
)
def test_unsupported_values(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(**{field: value})
    assert (caught.value.param or "").startswith(field)


def test_harmless_fields_of_the_reference_never_matter() -> None:
    _, unknown = chat(
        user="u",
        metadata={"a": "b"},
        service_tier="auto",
        store=False,
        parallel_tool_calls=True,
        tool_choice="auto",
        tools=[],
        documents=[],
        response_format={"type": "text"},
        frequency_penalty=0.0,
        presence_penalty=0,
        logprobs=False,
        n=1,
        best_of=1,
        stop=None,
        seed=None,
        logit_bias={},
        temperature=None,
    )
    assert unknown == []


def test_unknown_fields_are_accepted_and_named() -> None:
    _, unknown = chat(banana=1, bootstrap_host="10.0.0.1", stream=True, stream_options={"sauce": 1})
    assert unknown == ["banana", "bootstrap_host", "stream_options.sauce"]
    schema = {"name": "x", "schema": {"anything": 1}, "peel": 1}
    _, unknown = chat(response_format={"type": "json_schema", "json_schema": schema, "stalk": 1})
    assert unknown == ["response_format.json_schema.peel", "response_format.stalk"]
    body = {"messages": USER, "max_tokens": 1, "metadata": {"user_id": "u", "seed": 1}}
    assert parse(Messages, body)[1] == ["metadata.seed"]
    with pytest.raises(InvalidRequest, match=r"unknown: metadata\.seed"):
        parse(Messages, body, strict=True)


def test_token_limits() -> None:
    assert chat()[0].limit_tokens is None
    assert chat(max_tokens=5)[0].limit_tokens == 5
    assert chat(max_completion_tokens=6)[0].limit_tokens == 6
    assert chat(max_tokens=7, max_completion_tokens=7)[0].limit_tokens == 7
    with pytest.raises(InvalidRequest, match="disagree"):
        _ = chat(max_tokens=5, max_completion_tokens=6)[0].limit_tokens


def test_edges_that_are_legal() -> None:
    request, _ = chat(
        temperature=0, top_p=0, top_k=9_999_999, min_p=1, seed=-(2**63), stop="five", n=MAX_N
    )
    assert (request.top_p, request.stop) == (0, "five")
    assert chat(top_k=-1)[0].top_k == -1
    assert chat(temperature=1e-30)[0].temperature == 1e-30


def test_stream_options_need_a_stream() -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(stream_options={"include_usage": True})
    assert caught.value.param == "stream_options"


def test_a_missing_field_is_named() -> None:
    with pytest.raises(InvalidRequest, match="prompt is required") as caught:
        parse(Completion, {"model": "x"})
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b'"text"',
        b'{"temperature": NaN}',
        b'{"temperature": Infinity}',
        b'{"temperature": 1e999}',
        b'{"a": "\\ud800"}',
        b'{"a": "\xff"}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
    ],
)
def test_what_is_not_a_json_object(raw: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode(raw)
    assert caught.value.message


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
FIELDS = sorted({*Chat.__struct_fields__, *NOT_YET, "prompt", "banana"})


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4), st.booleans())
def test_any_json_is_taken_or_refused_with_a_message(body: dict[str, Any], fill: bool) -> None:
    body = decode(json.dumps(body).encode())
    if fill:
        body = {"messages": USER, "prompt": "p", **body}
    for kind in (Chat, Completion):
        outcome = attempt(kind, body)
        assert outcome, "a refusal without a message"
        if isinstance(outcome, list):
            assert set(outcome) <= {"banana", "prompt", "messages", "echo"} | {
                name for name in outcome if name.startswith("stream_options.")
            } | set(FIELDS), "only fields that were sent can be unknown"


def attempt(kind: type[Chat] | type[Completion], body: dict[str, Any]) -> list[str] | str:
    """The unknown fields (at least a mark), or the message of the refusal."""
    try:
        return [*parse(kind, body)[1], "banana"]
    except InvalidRequest as error:
        return error.message


@pytest.mark.parametrize(
    ("where", "field", "value", "limit"),
    [
        ("chat", "top_logprobs", 21, "20"),
        ("chat", "top_logprobs", 10**9, "20"),
        ("chat", "top_logprobs", -1, "0"),
        ("chat", "prompt_logprobs", 21, "20"),
        ("chat", "prompt_logprobs", -1, "0"),
        ("chat", "n", 5_000_000, "128"),
        ("chat", "best_of", 5_000_000, "128"),
        ("chat", "beam_width", 11, "10"),
        ("text", "logprobs", 6, "5"),
        ("text", "logprobs", -1, "0"),
        ("text", "logprobs", True, "5"),
        ("text", "top_logprobs", 3, "5"),
        ("text", "prompt_logprobs", 21, "20"),
        ("text", "best_of", 129, "128"),
    ],
)
def test_bounds_are_named(where: str, field: str, value: Any, limit: str) -> None:  # B090
    message = {"role": "user", "content": "x"}
    body: dict[str, Any] = {"messages": [message], "logprobs": True, field: value}
    schema: type[Chat | Completion] = Chat
    if where == "text":
        schema, body = Completion, {"prompt": "x", field: value}
    with pytest.raises(InvalidRequest, match=limit) as caught:
        parse(schema, body)
    assert caught.value.param == field


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 3, "n": 2, "stream": True}, "best_of"),
        ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "echo": True, "best_of": 2}, "max_tokens"),
        ({"beam_width": 2}, "beam_width"),
        ({"early_stopping": True}, "early_stopping"),
        ({"length_penalty": 2.0}, "length_penalty"),
        ({"use_beam_search": True, "stream": True}, "stream"),
        ({"use_beam_search": True, "temperature": 0.7}, "temperature"),
        ({"use_beam_search": True, "stop": "x"}, "stop"),
        ({"use_beam_search": True, "n": 4, "beam_width": 3}, "beam_width"),
        ({"use_beam_search": True, "n": 11}, "beam_width"),
        ({"use_beam_search": True, "best_of": 4, "beam_width": 3}, "best_of"),
    ],
)
def test_fields_that_do_not_go_together(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(Completion, {"prompt": "x", **fields})
    assert caught.value.param == param


@pytest.mark.parametrize(
    "fields",
    [
        {"best_of": 2, "n": 2, "stream": True},
        {"logprobs": False},
        {"max_tokens": 0, "echo": True, "logprobs": 0},
        {"max_tokens": 0, "prompt_logprobs": 0},
        {"use_beam_search": False, "length_penalty": 1.0, "early_stopping": False},
        {"use_beam_search": True, "n": 4, "temperature": 0.0, "early_stopping": "never"},
        {"use_beam_search": True, "n": 2, "best_of": 4, "stop": []},
        {"spaces_between_special_tokens": True, "user": "me"},
    ],
)
def test_fields_that_do(fields: dict[str, Any]) -> None:
    assert parse(Completion, {"prompt": "x", **fields})[1] == []
