"""SentencePiece's merging without a list of merges, against `tokenizers` with all of them."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.native import pieces
from headrace.native.build import Unavailable, build_pieces
from headrace.sources.gguf import Strings
from headrace.text import gguf_tokenizer, piece_encoder
from headrace.text.encoder import LibraryEncoder
from headrace.text.piece_encoder import PieceEncoder
from tests.unit.sample_tokenizers import packed, sentencepiece_metadata


@pytest.fixture(scope="module", autouse=True)
def library() -> Iterator[None]:
    """NATIVE_FLAGS: scripts/native_sanitize runs these tests under sanitizers."""
    built = build_pieces(extra_flags=os.environ.get("NATIVE_FLAGS", "").split())
    if isinstance(built, Unavailable):
        pytest.skip(f"no library: {built.reason}; {built.remedy}")
    made = pieces.Library(built)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "load", lambda: made)
        yield


@st.composite
def vocabularies(draw: st.DrawFn) -> dict[str, Any]:
    """Unknown, perhaps bytes, characters of one to four bytes, words of them; some added, equal
    scores among others."""
    characters = ["<", "a", "b", "é", "漢", "🐙", "▁", "\n"]
    words = draw(st.sets(st.text("<ab é漢🐙▁\n", min_size=2, max_size=5), max_size=24))
    some = draw(st.sets(st.sampled_from(characters)))
    missing = draw(st.sampled_from([256, 0, 128]))
    tokens = ["<unk>", *(f"<0x{b:02X}>" for b in range(missing)), *sorted(some), *sorted(words)]
    after = len(tokens) - 1 - missing
    kinds = draw(st.lists(st.sampled_from([1, 1, 1, 2, 3, 4, 5]), min_size=after, max_size=after))
    size = len(tokens)
    score = st.sampled_from([0.0, -1.0, -2.5, 3.0]) | st.floats(width=32, allow_nan=False)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": packed(tokens),
        "tokenizer.ggml.scores": draw(st.lists(score, min_size=size, max_size=size)),
        "tokenizer.ggml.token_type": [2] + [6] * missing + kinds,
        "tokenizer.ggml.add_space_prefix": draw(st.booleans()),
        "tokenizer.ggml.unknown_token_id": draw(st.integers(0, size - 1)),
    }


@settings(deadline=None, max_examples=50)
@given(metadata=vocabularies(), text=st.lists(st.text("<ab é漢🐙▁\n", max_size=30), max_size=4))
def test_ids_are_those_of_all_merges(metadata: dict[str, Any], text: list[str]) -> None:
    """Against `tokenizers` with every merge in it: ids, what ids stand for, both ways to read
    special tokens."""
    made, slow = gguf_tokenizer.encoder(metadata), LibraryEncoder(gguf_tokenizer.build(metadata))
    assert isinstance(made, PieceEncoder)
    for parse in (True, False):
        assert made.encode(text, parse_special=parse) == slow.encode(text, parse_special=parse)
    pairs = list(pairwise(text))
    assert made.encode_pairs(pairs, add_special=True) == slow.encode_pairs(pairs, add_special=True)
    assert (made.added, made.strip, made.ends()) == (slow.added, slow.strip, slow.ends())
    assert list(made.tokens) == list(slow.tokens)
    assert made.table is not None
    assert slow.table is not None
    assert (list(made.table), list(made.texts)) == (list(slow.table), list(slow.texts))
    assert [made.table[i] for i in range(len(made.table))] == list(slow.table)
    assert made.table[2:5] == slow.table[2:5]


def test_definitions_tell_vocabularies_apart() -> None:
    metadata = sentencepiece_metadata()
    metadata["tokenizer.ggml.tokens"] = packed(metadata["tokenizer.ggml.tokens"])
    changes: list[dict[str, Any]] = [
        {},
        {"tokenizer.ggml.add_space_prefix": False},
        {"tokenizer.ggml.unknown_token_id": 1},
        {"tokenizer.ggml.scores": [1.0, *metadata["tokenizer.ggml.scores"][1:]]},
        {"tokenizer.ggml.token_type": [2, 3, 4, *metadata["tokenizer.ggml.token_type"][3:]]},
        {"tokenizer.ggml.tokens": packed(["<x>", *metadata["tokenizer.ggml.tokens"][1:]])},
    ]
    made = [gguf_tokenizer.encoder(metadata | change).definition for change in changes]
    assert len(set(made)) == len(changes)
    assert gguf_tokenizer.encoder(dict(metadata)).definition == made[0]


@pytest.mark.parametrize(
    "change",
    [
        {"tokenizer.ggml.tokens": packed(["a", "b", "a"])},
        {"tokenizer.ggml.tokens": Strings(b"\1" + bytes(7) + b"\xff", array("Q", [9]))},
        {"tokenizer.ggml.scores": [0.0, float("nan"), 1.0]},
        {"tokenizer.ggml.scores": [0.0, 1e300, 1.0]},
        {"tokenizer.ggml.scores": [0.0]},
        {"tokenizer.ggml.token_type": [1, 2, 300]},
        {"tokenizer.ggml.token_type": [1, 2]},
        {"tokenizer.ggml.unknown_token_id": 3},
        {"tokenizer.ggml.unknown_token_id": None},
    ],
)
def test_a_vocabulary_that_is_no_plain_one_takes_the_long_way(change: dict[str, Any]) -> None:
    """Where its fault is named, if it is one."""
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": packed(["a", "b", "ab"]),
        "tokenizer.ggml.scores": [0.0, 0.0, 1.0],
        "tokenizer.ggml.token_type": [1, 1, 1],
        "tokenizer.ggml.unknown_token_id": 0,
    }
    assert isinstance(piece_encoder.encoder_of(metadata | change), Unavailable)


def test_long_texts_and_odd_bytes() -> None:
    """What Python never hands over does not reach past the text either."""
    metadata = sentencepiece_metadata(prefix=False)
    metadata["tokenizer.ggml.tokens"] = packed(metadata["tokenizer.ggml.tokens"])
    made = piece_encoder.encoder_of(metadata)
    assert isinstance(made, PieceEncoder)
    text = "hello<s> " * 30_000
    slow = LibraryEncoder(gguf_tokenizer.build(metadata))
    for parse in (True, False):
        found = made.encode([text], parse_special=parse)
        assert found == slow.encode([text], parse_special=parse)
    for raw in (b"\xff", b"\xf0\x9f", b"a\xe2\x96", b"\x80", b"\x00"):
        assert made._pieces.encode(raw, blind=False)
