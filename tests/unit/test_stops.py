"""Stop strings against the plain search over the whole text."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from headrace.text.stops import StopStrings

letters = st.text(alphabet="ab", min_size=1, max_size=5)


def naive(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The text before the stop that is complete first, the longer of two; all if there is none."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(
    pieces=st.lists(st.text(alphabet="abc", max_size=6), max_size=12),
    stops=st.lists(letters, min_size=1, max_size=4),
)
@example(pieces=["aab"], stops=["ab", "aab"])
@example(pieces=["a", "b", "c", "d"], stops=["bc", "abcd"])
@example(pieces=["aaa", "b"], stops=["aab"])
def test_as_the_plain_search(pieces: list[str], stops: list[str]) -> None:
    text, stop = naive("".join(pieces), stops)
    for include in (False, True):
        machine = StopStrings(stops, include=include)
        sent = ""
        for piece in pieces:
            sent += machine.feed(piece)
            assert text.startswith(sent) or include  # B009: nothing of the stop was sent
            if machine.matched is None:
                held = "".join(pieces)[len(sent) :]
                assert len(held) < len("".join(pieces)) + 1
        sent += machine.flush()
        assert machine.matched == stop
        assert sent == text + (stop if include and stop else "")


@given(text=st.text(alphabet="abx", max_size=30), stops=st.lists(letters, min_size=1, max_size=3))
def test_holds_back_no_more_than_needed(text: str, stops: list[str]) -> None:
    """What is held is the longest end of the text that begins a stop."""
    machine = StopStrings(stops)
    sent = ""
    for at, char in enumerate(text):
        sent += machine.feed(char)
        if machine.matched is not None:
            return
        so_far = text[: at + 1]
        begun = [n for stop in stops for n in range(len(stop)) if so_far.endswith(stop[:n])]
        assert sent == so_far[: len(so_far) - max(begun)]


def test_letters() -> None:
    """B009: the parts of DEFGHIJ are not sent one by one."""
    machine = StopStrings(["DEFGHIJ"])
    assert [machine.feed(piece) for piece in (" ", "DEF", "G", "HI", "J", "K")] == [" "] + [""] * 5
    assert machine.matched == "DEFGHIJ"
    assert machine.flush() == ""


def test_across_pieces_and_four_lengths() -> None:
    """B010."""
    machine = StopStrings(["ta gam"])
    assert "".join(machine.feed(p) for p in ("alpha", " beta", " gamma")) == "alpha be"
    machine = StopStrings(["~", "ee", "delta", "the longest of the stop strings"])
    assert machine.feed("alpha beta delt") == "alpha beta "
    assert machine.feed("a three") == ""
    assert machine.matched == "delta"


def test_begun_and_not_finished() -> None:
    machine = StopStrings(["stop!"])
    assert [machine.feed("sto"), machine.feed("p"), machine.flush()] == ["", "", "stop"]
