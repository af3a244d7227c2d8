"""Phrases in text that comes in pieces: the pieces never matter."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import ConfigError
from headrace.hooks.phrases import MAX_CHARS, Phrases, fold, read_phrases
from headrace.hooks.words import STOP, WordStream

LETTERS = "aAbB ßςΣ漢é'"
TEXT = st.text(LETTERS, max_size=40)


def edge(char: str) -> bool:
    return bool(char) and (char == "_" or (char.isascii() and char.isalnum()) or char in "ßςσΣé")


def plain(words: dict[str, str], text: str) -> str:
    """By the definition, a position at a time."""
    folded, out, at = fold(text), "", 0
    while at < len(text):
        fits = [
            word
            for word in words
            if folded.startswith(word, at)
            and not (edge(word[0]) and edge(text[at - 1 : at] if at else ""))
            and not (edge(word[-1]) and edge(text[at + len(word) : at + len(word) + 1]))
        ]
        if not fits:
            out, at = out + text[at], at + 1
            continue
        word = max(fits, key=len)
        if words[word] == STOP:
            return out
        out, at = out + words[word], at + len(word)
    return out


def streamed(words: dict[str, str], pieces: list[str]) -> str:
    stream, out = WordStream(Phrases(words), words), ""
    for text in pieces:
        piece = stream.feed(text)
        out += piece.text
        if piece.stop:
            return out
    return out + stream.flush().text


WORDS = st.dictionaries(
    st.text(LETTERS, min_size=1, max_size=5).map(fold),
    st.sampled_from(["*", "", STOP, "aa"]),
    min_size=1,
    max_size=6,
)


@given(WORDS, st.lists(TEXT, max_size=6))
def test_however_text_is_cut(words: dict[str, str], pieces: list[str]) -> None:
    whole = "".join(pieces)
    wanted = plain(words, whole)
    assert streamed(words, pieces) == wanted
    assert streamed(words, list(whole)) == wanted
    assert streamed(words, [whole]) == wanted


def test_what_is_sent_is_right_at_any_moment_and_little_is_held() -> None:
    words = {"new york city": "#", "york": "%"}
    stream = WordStream(Phrases(words), words)
    sent = [stream.feed(char).text for char in "a new york time in york."]
    assert "".join(sent) + stream.flush().text == "a new % time in %."
    assert sent[:3] == ["a", " ", ""]
    assert "".join(sent[:12]) == "a new % t"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("class", None), ("an ass", (3, 6)), ("ASS!", (0, 3)), ("ass_1", None), ("漢ass字", (1, 4)),
        ("ass漢", (0, 3)), ("的坏词了", (1, 3)), ("éass", None),
    ],
)  # fmt: skip
def test_words_stand_alone_where_a_script_has_blanks(
    text: str, found: tuple[int, int] | None
) -> None:
    assert Phrases(["ass", "坏词"]).search(fold(text), 0) == found


def test_folding_keeps_every_place() -> None:
    text = "İSTANBUL ΣΊΣΥΦΟΣ ß K"
    assert len(fold(text)) == len(text)
    assert fold(text) == "".join(fold(char) for char in text)


def test_a_large_list_is_searched_in_one_pass() -> None:
    words = [f"word{i}x" for i in range(5000)]
    phrases, text = Phrases(words), "word1 word2y " * 2000 + "word4999x"
    assert phrases.search(text, 0) == (len(text) - 9, len(text))


def test_files(tmp_path: Path) -> None:
    file = tmp_path / "list"
    file.write_text("# comment\n\n Big  \nred => BLUE\n#=>x\nstop here=>!stop\n", encoding="utf-8")
    assert read_phrases(str(file), "filter") == {"big": "", "red": "BLUE", "stop here": "!stop"}
    for bad in ("", "# nothing\n", "x" * (MAX_CHARS + 1)):
        file.write_text(bad, encoding="utf-8")
        with pytest.raises(ConfigError):
            read_phrases(str(file), "filter")
    with pytest.raises(ConfigError, match="nowhere"):
        read_phrases(str(tmp_path / "nowhere"), "filter")
