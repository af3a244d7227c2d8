"""Citations by what an answer repeats of its documents."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import ConfigError
from headrace.hooks.contract import Citation
from headrace.hooks.overlap import Overlap

DOCUMENTS: list[dict[str, Any]] = [
    {"id": "a", "text": "A headrace leads water from the river, down to the wheel of a mill."},
    {"title": "empty"},
    {"content": "Tailraces carry the water away after it has turned the wheel."},
]


def cited(text: str, run: str = "") -> list[tuple[str, int, str]]:
    found = Overlap(run).cite(text, DOCUMENTS)
    return [(text[one.start : one.end], one.document, one.quote) for one in found]


def test_words_in_a_row_are_cited_whatever_stands_between_them() -> None:
    text = "I think the HEADRACE leads - water from the river; the water away after it has gone."
    assert cited(text) == [
        ("HEADRACE leads - water from the river", 0, "headrace leads water from the river"),
        ("the water away after it has", 2, "the water away after it has"),
    ]
    assert cited(text, "7") == []
    assert len(cited(text, "2")) >= 2


def test_the_longest_run_wins() -> None:
    whole = DOCUMENTS[0]["text"]
    assert cited(f"So: {whole}") == [(whole[:-1], 0, whole[:-1])]


def test_marks_cite_their_sentence() -> None:
    text = "Mills had one [1]. It was long! Then the water left [3], and [9] or [0] say nothing."
    assert cited(text) == [
        ("Mills had one [1]", 0, ""), ("Then the water left [3]", 2, ""),
    ]  # fmt: skip


def test_nothing_to_cite() -> None:
    assert cited("") == cited("no word of it here at all") == []
    assert Overlap("").cite("one two three four five six", []) == []


@settings(max_examples=50)
@given(
    st.lists(st.sampled_from("abcdefgh"), max_size=8, unique=True),
    st.lists(st.sampled_from("abcdefgh"), max_size=30),
)
def test_what_is_cited_is_there(answer: list[str], document: list[str]) -> None:
    text, there = " ".join(answer), " ".join(document)
    last = 0
    for one in Overlap("2").cite(text, [{"text": there}]):
        assert text[one.start : one.end] == one.quote
        assert f" {one.quote} " in f" {there} "
        assert one.start >= last
        last = one.end
    if len(answer) >= 2 and f" {text} " in f" {there} ":
        assert Overlap("2").cite(text, [{"text": there}])[0] == Citation(0, len(text), 0, text)


def test_much_of_the_same() -> None:
    """With the square of the places this would take minutes."""
    found = Overlap("").cite("again " * 4000, [{"text": "again " * 200_000}])
    assert found[0].start == 0


@pytest.mark.parametrize("run", ["1", "0", "x", "101", "-2"])
def test_a_length_that_is_none(run: str) -> None:
    with pytest.raises(ConfigError):
        Overlap(run)
