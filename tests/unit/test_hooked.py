"""Hooks on the text of a choice: whatever the cut, the same parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.api.hooked import Hooked, hooked_parser
from headrace.api.messages import Head
from headrace.errors import UnfitAnswer
from headrace.hooks.contract import Citation, FilterStream, Piece
from headrace.hooks.load import Hooks
from headrace.hooks.phrases import Phrases
from headrace.hooks.words import WordStream
from headrace.text.parts import Arguments, Call, Parser, Part, Reasoning, Text, joined


class Words:
    """A filter of a few phrases."""

    def __init__(self, **words: str) -> None:
        self._words = {word.replace("_", " "): text for word, text in words.items()}

    def open(self) -> FilterStream:
        return WordStream(Phrases(self._words), self._words)


class Shout:
    """Holds everything until the end."""

    def open(self) -> FilterStream:
        return Late()


class Late:
    def __init__(self) -> None:
        self._text = ""

    def feed(self, text: str) -> Piece:
        self._text += text
        return Piece()

    def flush(self) -> Piece:
        return Piece(self._text.upper(), stop="STOP" in self._text.upper())


class Upper:
    """A check."""

    def applies(self, form: str) -> bool:
        return form == "json"

    def check(self, text: str) -> str:
        if "bad" in text:
            raise UnfitAnswer("bad")
        return text.upper()


class First:
    """Cites the first document for the first word."""

    def cite(self, text: str, documents: Sequence[Mapping[str, Any]]) -> Sequence[Citation]:
        return [Citation(0, len(text.split(" ")[0]), 0)]


class Marks:
    """Tells apart: <reasoning>, {name:arguments of a call}, text."""

    def __init__(self) -> None:
        self._mode, self._name, self.calls = "", "", 0

    thinking = may_think = False

    @property
    def called(self) -> bool:
        return bool(self.calls)

    def feed(self, text: str) -> list[Part]:
        out: list[Part] = []
        for char in text:
            if self._mode == "{":
                self._name += char if char != ":" else ""
                if char == ":":
                    out.append(Call(self.calls, f"id{self.calls}", self._name))
                    self._mode, self._name = ":", ""
                    self.calls += 1
            elif char in "<>{}":
                self._mode = char if char in "<{" else ""
            elif self._mode == "<":
                out.append(Reasoning(char))
            else:
                out.append(Arguments(self.calls - 1, char) if self._mode else Text(char))
        return out

    def flush(self) -> list[Part]:
        return []


def hooks(**kinds: Any) -> Hooks:
    made = Hooks()
    for kind, several in kinds.items():
        setattr(made, kind, several)
    return made


def run(make: Callable[[], Parser], pieces: Sequence[str]) -> tuple[list[Part], Hooked]:
    parser = make()
    assert isinstance(parser, Hooked)
    out: list[Part] = []
    for piece in pieces:
        out += parser.feed(piece)
        if parser.stopped:
            break
    return joined(out + parser.flush()), parser


FILTERS = [
    [Words(ab="x", a_b="", cab="!stop")],
    [Words(ab="cab"), Words(cab="y", x="!stop")],
    [Shout(), Words(a="!stop")],
    [Words(b="!stop"), Shout()],
]


@pytest.mark.parametrize("filters", FILTERS)
@settings(max_examples=25)
@given(text=st.text("ab c<>{}:", max_size=30), data=st.data())
def test_the_cut_never_matters(filters: list[Any], text: str, data: st.DataObject) -> None:
    for inner in (None, Marks):
        make = hooked_parser(hooks(filter=filters), inner, "", [])
        assert make is not None
        whole, ended = run(make, [text])
        cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        cut, also = run(make, pieces)
        assert cut == whole
        assert (also.stopped, also.citations) == (ended.stopped, ended.citations)


def test_kinds_are_filtered_apart() -> None:
    make = hooked_parser(hooks(filter=[Words(ab="*")]), Marks, "", [])
    assert make is not None
    parts, parser = run(make, ["a<b ab>b {fa:b ab}ab"])
    assert parts == [
        Text("a"), Reasoning("b *"), Text("b "),
        Call(0, "id0", "fa"), Arguments(0, "b *"), Text("*"),
    ]  # fmt: skip
    assert parser.called


@pytest.mark.parametrize(
    ("said", "parts", "stopped"),
    [
        ("{my ab:x}", [Call(0, "id0", "my *"), Arguments(0, "x")], False),
        ("{ab:x}{ab:ab}", [
            Call(0, "id0", "*"), Arguments(0, "x"), Call(1, "id1", "*"), Arguments(1, "*"),
        ], False),
        ("a{own ab:x}", [Text("a"), Call(0, "id0", "own ab"), Arguments(0, "x")], False),
        ("a{an end:x}b", [Text("a")], True),  # within a name: there is no call
        ("a{own ab:x}{no:x}b", [Text("a"), Call(0, "id0", "own ab"), Arguments(0, "x")], True),
    ],
)  # fmt: skip
def test_names_that_a_model_makes_up_are_filtered(
    said: str, parts: list[Part], stopped: bool
) -> None:
    """And the client's own are not."""
    filters = [Words(ab="*", end="!stop"), Words(no="")]
    make = hooked_parser(hooks(filter=filters), Marks, "", [], ["own ab"])
    assert make is not None
    for pieces in ([said], list(said)):
        told, parser = run(make, pieces)
        assert (told, parser.stopped) == (parts, stopped)


def test_a_stop_ends_it_with_what_came_before() -> None:
    make = hooked_parser(hooks(filter=[Words(end="!stop"), Shout()]), None, "", [])
    assert make is not None
    parts, parser = run(make, ["so far en", "d and more", "never"])
    assert (parts, parser.stopped) == ([Text("SO FAR ")], True)


def test_a_stop_that_shows_at_the_end() -> None:
    make = hooked_parser(hooks(filter=[Words(end="!stop")]), None, "", [])
    assert make is not None
    parts, parser = run(make, ["the end"])
    assert (parts, parser.stopped) == ([Text("the ")], True)


def test_a_check_holds_the_content_until_it_is_whole() -> None:
    both = hooks(check=[Upper()], cite=[First()])
    make = hooked_parser(both, Marks, "json", [{"text": "x"}])
    assert make is not None
    parser = make()
    assert parser.feed("<why>ok ") == [Reasoning(char) for char in "why"]
    assert parser.feed("fine") == []
    assert parser.flush() == [Text("OK FINE")]
    assert isinstance(parser, Hooked)
    assert parser.citations == [Citation(0, 2, 0)]
    bad = make()
    bad.feed("bad")
    with pytest.raises(UnfitAnswer):
        bad.flush()


def test_without_hooks_there_is_nothing() -> None:
    assert hooked_parser(Hooks(), None, "json", []) is None
    assert hooked_parser(Hooks(), Marks, "", [{"text": "x"}]) is Marks
    some = hooks(check=[Upper()], cite=[First()])
    assert hooked_parser(some, None, "", []) is None, "no JSON is asked for, nothing to cite"


def test_anthropics_word_for_an_answer_that_a_filter_ended() -> None:
    head = Head("msg_1", "m", False)
    assert head.stop("content_filter", None) == {"stop_reason": "refusal", "stop_sequence": None}
