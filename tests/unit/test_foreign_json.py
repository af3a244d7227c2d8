"""JSON of others: a value, or one exception."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import InvalidRequest
from headrace.foreign_json import Malformed, read_json, refusal


@given(st.binary(max_size=40), st.sampled_from([b"", b'{"a":"', b'["\\ud8', b"[" * 3000]))
def test_any_bytes_are_a_value_or_malformed(data: bytes, start: bytes) -> None:
    told: InvalidRequest | None = None
    try:
        value = read_json(start + data, object)
    except Malformed as error:
        told = refusal(start + data, error)
    else:
        assert value == json.loads(start + data)
    assert told is None or told.status == 400


@pytest.mark.parametrize(
    ("body", "said", "field"),
    [
        (b'{"a":"\xff"}', "the body is not JSON: 'utf-8' codec", None),
        (b'{"a":' + b"[" * 5000, "the body nests too deeply", None),
        (b'{"a":1,"b":"\\ud800"}', "b: half of a surrogate pair is no text", "b"),
        (b'{"t":NaN}', "t: a number is NaN or out of range", "t"),
        (b"3", "the body is not as it should be: Expected `object`, got `int`", None),
    ],
)
def test_what_a_client_is_told(body: bytes, said: str, field: str | None) -> None:
    with pytest.raises(Malformed) as caught:
        read_json(body, dict)
    error = refusal(body, caught.value)
    assert error.message.startswith(said)
    assert error.param == field
