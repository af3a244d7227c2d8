"""Paths that mean the same are one text, and what means something else stays another."""

from __future__ import annotations

import string
from urllib.parse import quote, unquote_to_bytes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import InvalidRequest
from headrace.request_path import one_spelling, parts_of


@pytest.mark.parametrize(
    ("path", "told"),
    [
        (b"/v1/chat/completions", "/v1/chat/completions"),
        (b"/v1/%63hat%2Fcompletions", "/v1/chat%2Fcompletions"),
        (b"/a%2fb%2Dc%7E%7e%5F%2e", "/a%2Fb-c~~_."),
        (b"/%2563", "/%2563"),  # decoded once, not twice
        (b"/%%63", "/%25c"),
        (b"/%%36%33", "/%2563"),
        (b"/%6", "/%256"),
        (b"/%zz%c3%A9%00%20", "/%25zz%C3%A9%00%20"),
    ],
)
def test_what_needs_no_encoding_has_none(path: bytes, told: str) -> None:
    assert one_spelling(path) == told


@given(st.binary(max_size=20), st.lists(st.booleans(), min_size=20, max_size=20))
def test_every_spelling_of_a_name_is_one(name: bytes, needless: list[bool]) -> None:
    free = (string.ascii_letters + string.digits + "-._~").encode()
    whole = b"".join(
        b"%%%02x" % byte if byte not in free or more else bytes((byte,))
        for byte, more in zip(name, needless, strict=False)
    )
    told = one_spelling(whole)
    assert told == quote(name, safe="")
    assert one_spelling(told.encode()) == told
    assert unquote_to_bytes(told) == name


@given(st.text("%c36/ ").map(str.encode))
def test_two_that_read_a_path_one_behind_the_other_read_the_same(path: bytes) -> None:
    """A gateway's text is what a worker gets."""
    told = one_spelling(path).encode()
    assert one_spelling(told).encode() == told
    assert unquote_to_bytes(told) == unquote_to_bytes(path)


@pytest.mark.parametrize(
    ("target", "told"),
    [
        (b"/a/%62?c=%64&e=?/", ("/a/b", b"c=%64&e=?/")),
        (b"HTTPS://u:p@h:1/%61?b", ("/a", b"b")),
        (b"/a#b?c", ("/a", b"")),
        (b"http://h", ("/", b"")),
        (b"http://h?/a", ("/", b"/a")),
        (b"//h/a", ("//h/a", b"")),
        (b"*", ("*", b"")),
    ],
)
def test_parts(target: bytes, told: tuple[str, bytes]) -> None:
    assert parts_of(target) == told


@pytest.mark.parametrize("target", [b"http:///a", b"a", b"", b"/\xc3"])
def test_what_is_no_target(target: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parts_of(target)
