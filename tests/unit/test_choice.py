"""One choice's text: tokens in, text out, and where it stops."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.text.choice import ChoiceText
from headrace.text.tokenizer import Tokenizer
from tests.unit.sample_tokenizers import KINDS
from tests.unit.test_stops import naive

BYTES = KINDS["byte_level"]


def run(choice: ChoiceText, calls: list[list[int]]) -> str:
    return "".join(choice.feed(call).text for call in calls) + choice.flush()


def cut(ids: list[int], sizes: list[int]) -> list[list[int]]:
    calls, at = [], 0
    for size in [*sizes, len(ids)]:
        calls.append(ids[at : at + size])
        at += size
    return calls


@given(
    text=st.text(alphabet="abé漢", max_size=20),
    sizes=st.lists(st.integers(0, 5), max_size=10),
    stops=st.lists(st.text(alphabet="abé", min_size=1, max_size=3), max_size=3),
)
def test_cuts_do_not_matter(text: str, sizes: list[int], stops: list[str]) -> None:
    """The text, and the token at which it stops, are those of one token at a time."""
    ids = list(text.encode())
    expected, stop = naive(text, stops)
    choice = ChoiceText(BYTES, stops)
    assert run(choice, cut(ids, sizes)) == expected
    assert choice.matched == stop
    if stop is None:
        assert choice.stop_at is None
        assert choice.n_tokens == len(ids)
    else:
        assert choice.stop_at == len((expected + stop).encode()) == choice.n_tokens


@given(ids=st.lists(st.integers(0, 258), max_size=30), skip=st.booleans())
def test_without_stops_it_is_decode(ids: list[int], skip: bool) -> None:
    choice = ChoiceText(BYTES, [], skip)
    assert run(choice, [ids]) == BYTES.decode(ids, skip_special=skip)


def test_tokens_after_the_stop_are_dropped() -> None:
    choice = ChoiceText(BYTES, ["b"])
    piece = choice.feed(list(b"abc"))
    assert (piece.text, piece.stop_at) == ("a", 2)
    again = choice.feed(list(b"def"))
    assert (again.text, again.stop_at) == ("", 2)
    assert choice.flush() == choice.end(258) == ""
    assert choice.n_tokens == 2


def test_include_stop() -> None:
    choice = ChoiceText(BYTES, ["bc"], include_stop=True)
    assert choice.feed(list(b"abcd")).text == "abc"


def test_stop_token_is_not_shown() -> None:
    """B011: a plain token as stop id; its text is shown only on demand. It counts as a token."""
    three = ord("3")
    for include, shown in ((False, "12"), (True, "123")):
        choice = ChoiceText(BYTES, [], include_stop=include)
        assert choice.feed(list(b"12")).text + choice.end(three) == shown
        assert choice.n_tokens == 3
    choice = ChoiceText(BYTES, ["2x"])
    assert [choice.feed(list(b"12")).text, choice.end(three)] == ["1", "2"]
    choice = ChoiceText(BYTES, ["2x"])
    assert [choice.feed(list(b"12")).text, choice.end(-1)] == ["1", "2"]
    assert choice.n_tokens == 2


def test_half_a_character_at_the_end() -> None:
    """B002, B006."""
    choice = ChoiceText(BYTES, ["zz"])
    assert choice.feed("a🐙".encode()[:3]).text == "a"
    assert choice.end(258) == "\ufffd"


def test_a_stop_across_half_characters() -> None:
    choice = ChoiceText(BYTES, ["漢字"])
    ids = list("in 漢字!".encode())
    assert run(choice, [[i] for i in ids]) == "in "
    assert choice.stop_at == 9


def test_space_at_the_start_is_kept_unless_nothing_came_before() -> None:
    tokenizer: Tokenizer = KINDS["sentencepiece"]
    ids = tokenizer.encode("hello", add_special=False)
    assert run(ChoiceText(tokenizer), [ids]) == " hello"
    assert run(ChoiceText(tokenizer, prompt_tail=[1]), [ids]) == "hello"
    assert run(ChoiceText(tokenizer, prompt_tail=[1, *ids]), [ids]) == " hello"


@given(
    text=st.text(alphabet="ab", max_size=20),
    sizes=st.lists(st.integers(0, 5), max_size=10),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=3), max_size=3),
    least=st.integers(0, 12),
)
def test_stop_strings_complete_before_min_tokens_are_text(
    text: str, sizes: list[int], stops: list[str], least: int
) -> None:
    """bugs B012. One that begins before and is complete after counts."""
    ends = [
        (end, stop)
        for end in range(max(1, least), len(text) + 1)
        for stop in sorted(stops, key=len, reverse=True)
        if text[:end].endswith(stop)
    ]
    choice = ChoiceText(BYTES, stops, min_tokens=least)
    got = run(choice, cut(list(text.encode()), sizes))
    if not ends:
        assert (got, choice.matched) == (text, None)
    else:
        end, stop = ends[0]
        assert (got, choice.matched, choice.n_tokens) == (text[: end - len(stop)], stop, end)
