"""Streamed text is the whole text, whatever the tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.sources.files import ModelFiles
from headrace.text.detokenizer import detokenizer
from headrace.text.encoder import LibraryEncoder
from headrace.text.tokenizer import Tokenizer, load_tokenizer
from tests.unit.sample_tokenizers import KINDS, WORDS

ids_of_any_kind = st.lists(st.integers(-2, 600), max_size=40)
TABLES = [name for name, tokenizer in KINDS.items() if tokenizer.table is not None]


def stream(
    tokenizer: Tokenizer, ids: list[int], skip: bool = True, tail: list[int] | None = None
) -> list[str]:
    machine = detokenizer(tokenizer, skip_special=skip, prompt_tail=[] if tail is None else tail)
    return [*(machine.feed(i) for i in ids), machine.flush()]


def test_which_kinds_have_a_table() -> None:
    assert sorted(set(KINDS) - set(TABLES)) == ["wordpiece"]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("skip", [True, False])
@given(ids=ids_of_any_kind)
def test_stream_is_decode(name: str, skip: bool, ids: list[int]) -> None:
    tokenizer = KINDS[name]
    assert "".join(stream(tokenizer, ids, skip)) == tokenizer.decode(ids, skip_special=skip)


@given(text=st.text(), data=st.data())
def test_any_text_through_bytes(text: str, data: st.DataObject) -> None:
    """Cut anywhere, no piece ends in half a character."""
    tokenizer = KINDS["byte_level"]
    ids = list(text.encode())
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == text
    assert all(piece in text for piece in pieces)
    end = data.draw(st.integers(0, len(ids)))  # B002: the token limit falls inside a character
    whole = ids[:end]
    shown = "".join(stream(tokenizer, whole))
    assert shown == bytes(whole).decode(errors="replace")
    assert shown.count("\ufffd") <= text.count("\ufffd") + 1


@pytest.mark.parametrize("name", TABLES)
@given(prompt=st.lists(st.integers(0, 280), max_size=8), ids=ids_of_any_kind)
def test_prompt_and_output_read_on(name: str, prompt: list[int], ids: list[int]) -> None:
    """B004: prompt text + streamed text is the text of all ids."""
    tokenizer = KINDS[name]
    before = tokenizer.decode(prompt)
    if "\ufffd" in before:
        return
    shown = "".join(stream(tokenizer, ids, tail=prompt))
    assert before + shown == tokenizer.decode(prompt + ids)


def test_leading_space() -> None:
    """B004, by hand: `zero` was the prompt, ` hello world` comes."""
    tokenizer = KINDS["sentencepiece"]
    ids = [259 + WORDS.index("▁hello"), 259 + WORDS.index("▁world")]
    assert stream(tokenizer, ids) == ["hello", " world", ""]
    assert stream(tokenizer, ids, tail=tokenizer.encode("zero")) == [" hello", " world", ""]
    assert stream(tokenizer, ids, tail=[1]) == ["hello", " world", ""]  # BOS alone is no text
    machine = detokenizer(tokenizer, prompt_tail=None)
    assert machine.feed(ids[0]) == " hello"


def test_last_character_is_not_lost() -> None:
    """B006."""
    tokenizer = KINDS["byte_level"]
    pieces = stream(tokenizer, [*"fin 🫠".encode(), 258])
    assert "".join(pieces) == "fin 🫠"
    assert pieces[-3:] == ["🫠", "", ""]
    assert stream(tokenizer, ["ď".encode()[0], *b" word"])[1] == "\ufffd "


def test_bytes_that_are_not_utf8() -> None:
    """B003: each is one U+FFFD, at once, and nothing raises."""
    assert stream(KINDS["byte_level"], [0xFF, 0xC3, 0xC3, 0x28, 0xF0, 0x9F]) == [
        *("\ufffd", "", "\ufffd", "\ufffd(", "", "", "\ufffd")
    ]


def test_changed_prefix_never_raises() -> None:
    """B005: a decoder that rewrites what it said. The text that follows is still shown."""
    tokenizer = KINDS["wordpiece"]
    encoder = tokenizer._encoder
    assert isinstance(encoder, LibraryEncoder)
    inner = encoder._inner
    saved = inner.decoder
    try:
        from tokenizers import decoders

        inner.decoder = decoders.WordPiece(cleanup=True)  # "hello ." becomes "hello."
        ids = [3, 4, 7, 3, 5, 7, 1, 9]
        shown = "".join(stream(tokenizer, ids))
        assert shown.replace(" ", "") == tokenizer.decode(ids).replace(" ", "")
    finally:
        inner.decoder = saved


def test_default_model(default_model: ModelFiles) -> None:
    tokenizer = load_tokenizer(default_model)
    encoder = tokenizer._encoder
    assert isinstance(encoder, LibraryEncoder)
    library = encoder._inner
    hyper = st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=60)

    @given(ids=hyper)
    def check(ids: list[int]) -> None:
        assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)
        inner = library.decode(ids, skip_special_tokens=True)
        assert inner == tokenizer.decode(ids)

    check()
