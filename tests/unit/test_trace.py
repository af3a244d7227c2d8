"""Bytes and offsets of tokens add up to the text, however it is cut, held back or stopped."""

from __future__ import annotations

import codecs

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.messages import End
from headrace.text.choice import ChoiceText
from headrace.text.trace import Span, label, prompt_spans
from tests.unit.sample_tokenizers import KINDS

NAMES = sorted(KINDS)


def complete(raw: bytes) -> str:
    """The whole characters at the start of `raw`."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(raw)


def check(text: str, spans: list[Span]) -> None:
    """What the module promises of an ended choice."""
    assert b"".join(span.raw or b"" for span in spans).decode("utf-8", "replace") == text
    starts = [span.start for span in spans]
    assert starts == sorted(starts)
    assert all(start <= len(text) for start in starts)
    if spans:
        assert starts[0] == 0


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_spans_add_up_to_the_text(name: str, data: st.DataObject) -> None:
    tokenizer = KINDS[name]
    size = tokenizer.vocab_size
    some = st.integers(0, size) | st.sampled_from(sorted(tokenizer.special_ids) or [0])
    bytes_of_text = st.text(alphabet="aé漢😀 b", max_size=8).map(
        lambda text: tokenizer.encode(text, add_special=False)
    )
    ids = data.draw(st.lists(some, max_size=12) | bytes_of_text)
    stops = data.draw(
        st.lists(st.text(alphabet="aé漢 b\ufffd", min_size=1, max_size=2), max_size=2)
    )
    skip, include = data.draw(st.booleans()), data.draw(st.booleans())
    ending = data.draw(st.sampled_from(["length", "stop"]))
    tail = data.draw(st.sampled_from([None, (), (ids[0],) if ids else ()]))
    plain, traced = (
        ChoiceText(tokenizer, stops, skip, include, prompt_tail=tail, traced=on)
        for on in (False, True)
    )
    text, spans, fed, at = "", list[Span](), 0, 0
    while True:
        at = min(len(ids), at + data.draw(st.integers(0, 4)))
        last = at == len(ids)
        end = None
        if last:
            stop_id = ids[-1] if ending == "stop" and ids else -1
            end = End(1, 0, "stop" if stop_id >= 0 else "length", stop_id)
        want, heard = plain.hear(ids[fed:at], end), traced.hear(ids[fed:at], end)
        assert (want.text, want.finish, want.overrun) == (heard.text, heard.finish, heard.overrun)
        fed = at
        text += heard.text
        spans += heard.spans
        assert text.startswith(complete(b"".join(span.raw or b"" for span in spans)))
        if heard.finish is not None:
            break
    check(text, spans)
    assert len(spans) == traced.n_tokens
    assert [span.token for span in spans] == ids[: len(spans)]


def test_tokens_leave_with_the_text_of_their_last_byte() -> None:
    tokenizer = KINDS["byte_level"]
    choice = ChoiceText(tokenizer, ["bc"], traced=True)
    face = list("😀".encode())
    left: list[tuple[str, int]] = []
    for token in [*face, ord("b"), ord("x"), ord("b")]:
        heard = choice.hear([token], None)
        left.append((heard.text, len(heard.spans)))
    last = choice.hear([ord("c")], None)
    assert left == [("", 0), ("", 0), ("", 0), ("😀", 4), ("", 0), ("bx", 2), ("", 0)]
    assert (last.text, last.finish) == ("", "stop")
    assert [(span.raw, span.start) for span in last.spans] == [(b"", 3), (b"", 3)]


def test_a_stop_string_inside_a_token_cuts_its_bytes() -> None:
    tokenizer = KINDS["metaspace"]
    ids = tokenizer.encode("hello", add_special=False)
    assert len(ids) == 1, "one token"
    choice = ChoiceText(tokenizer, ["ll"], prompt_tail=(), traced=True)
    heard = choice.hear(ids, None)
    assert heard.text == "he"
    assert [(span.raw, span.start) for span in heard.spans] == [(b"he", 0)]
    assert [label(tokenizer, ids[0], first=first) for first in (True, False)] == ["hello", " hello"]


def test_names_of_tokens() -> None:
    tokenizer = KINDS["byte_level"]
    assert label(tokenizer, ord("a")) == "a"
    assert label(tokenizer, 0xE6) == "\\xe6"
    assert label(tokenizer, 258) == "<|im_end|>"
    assert label(tokenizer, 100_000) == "token_id:100000"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "text", ["", "\n7. Dana owns 30", "hello hello", " ", "é漢😀", "<s> hello"]
)
def test_prompts_add_up_to_what_was_given(name: str, text: str) -> None:  # B021
    """Tokens of an echoed prompt, without what the tokenizer puts before every text."""
    tokenizer = KINDS[name]
    ids = tokenizer.encode(text)
    spans, shown = prompt_spans(tokenizer, ids, text)
    check(shown, spans)
    assert [span.token for span in spans] == ids
    if tokenizer.table is not None:  # others change texts
        unknown = shown != text
        assert not unknown or tokenizer.decode(ids) != text
    spans, shown = prompt_spans(tokenizer, ids, None)
    check(shown, spans)
    assert shown == tokenizer.decode(ids, skip_special=False)
