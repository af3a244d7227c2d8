"""Tokenising in pieces gives the tokens of the whole, and what is shared is tokenised once."""

from __future__ import annotations

from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.sources.card import gguf_card
from headrace.sources.files import ModelFiles
from headrace.sources.gguf import read_header
from headrace.sources.resolve import FAKE, resolve
from headrace.text import gguf_tokenizer, pieces
from headrace.text.pieces import PIECE_CHARS, PieceCache
from headrace.text.samples import SAMPLES
from headrace.text.tokenizer import Tokenizer, load_tokenizer
from tests.unit.sample_tokenizers import KINDS

# One of each family of patterns that cut a text into words; the vocabulary is the same.
PRE = ("smollm", "llama-bpe", "qwen2", "deepseek-v3", "gpt-4o")
WORDS = [
    *("a", "word", "Mill", "'s", " ", "  ", "\n", "\n\n", "\r\n", "\t", ".", "!!", "/", "_", "7"),
    *("1234", "é", "e\u0301", "水", "ー", "🐙", "<|im_start|>", "<|im_end|>", "<|im_", "((", "#"),
]


@lru_cache
def of(pre: str) -> PieceCache:
    header = read_header(resolve("", say=print).path)
    metadata = {**header.metadata, "tokenizer.ggml.pre": pre}
    return PieceCache(Tokenizer(gguf_tokenizer.encoder(metadata), gguf_card(header)), 2**20)


@lru_cache
def of_kind(kind: str) -> PieceCache:
    return PieceCache(KINDS[kind], 2**20)


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that short texts have many cuts."""
    monkeypatch.setattr(pieces, "PIECE_CHARS", 4)


@pytest.mark.parametrize("pre", PRE)
def test_byte_pair_tokenizers_are_cut_between_words(pre: str) -> None:
    made = of(pre)
    assert made.cuts == "words"
    for text in SAMPLES.values():
        ids = made.encode(text * 3, add_special=False)
        assert ids.tolist() == made._tokenizer.encode(text * 3, add_special=False)


@pytest.mark.parametrize("pre", PRE)
@settings(max_examples=25, deadline=None)
@given(words=st.lists(st.sampled_from(WORDS) | st.characters(), max_size=40))
def test_the_tokens_of_the_whole(pre: str, words: list[str]) -> None:
    made, text = of(pre), "".join(words)
    whole = made._tokenizer.encode(text, add_special=True)
    assert made.encode(text, add_special=True).tolist() == whole
    assert made.encode(text, add_special=True).tolist() == whole, "the second time from the cache"


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(words=st.lists(st.sampled_from([*WORDS, "hello world", "<s>", "lo"]), max_size=30))
def test_every_kind_of_tokenizer_has_the_tokens_of_the_whole(kind: str, words: list[str]) -> None:
    made, text = of_kind(kind), "".join(words)
    for special in (True, False):
        whole = KINDS[kind].encode(text, add_special=special)
        assert made.encode(text, add_special=special).tolist() == whole


def test_a_shared_beginning_is_tokenised_once(
    default_model: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "PIECE_CHARS", PIECE_CHARS)
    made = PieceCache(load_tokenizer(default_model), 2**22)
    document = SAMPLES["prose"] * 40
    made.encode(f"<|im_start|>user\n{document} What is it?<|im_end|>", add_special=False)
    before = made.misses
    made.encode(f"<|im_start|>user\n{document} Who wrote it?<|im_end|>", add_special=False)
    assert made.misses - before < 3 * PIECE_CHARS
    assert made.hits > len(document) - 3 * PIECE_CHARS


def test_memory_is_bounded() -> None:
    made = PieceCache(load_tokenizer(FAKE), 20_000)
    for n in range(200):
        text = f"{n} " * 100
        assert made.encode(text, add_special=False).tolist() == list(text.encode())
    assert 10_000 < made.used_bytes <= 20_000
    none = PieceCache(load_tokenizer(FAKE), 0)
    assert none.encode("ab", add_special=False).tolist() == [97, 98]
    assert none.used_bytes == 0
