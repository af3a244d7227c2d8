"""What encode and decode promise, for every kind of tokenizer and for model folders."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors

from headrace.errors import ModelError
from headrace.sources.card import ModelCard
from headrace.sources.files import ModelFiles
from headrace.sources.resolve import FAKE
from headrace.text import fake_tokenizer
from headrace.text.encoder import LibraryEncoder
from headrace.text.tokenizer import Tokenizer, load_tokenizer
from tests.unit.sample_tokenizers import KINDS, byte_level, card


def folder(path: Path, inner: tokenizers.Tokenizer, **tokenizer_config: Any) -> ModelFiles:
    """A Hugging Face folder with a tokenizer and the least config."""
    inner.save(str(path / "tokenizer.json"))
    config = {"model_type": "llama", "vocab_size": 300, "eos_token_id": 258}
    (path / "config.json").write_text(json.dumps(config))
    tokenizer_config = {"bos_token": "<|endoftext|>", **tokenizer_config}
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return ModelFiles("test", "hf", path)


def with_template(single: str) -> tokenizers.Tokenizer:
    inner = fake_tokenizer.build()
    special = [("<|endoftext|>", 256), ("<|im_start|>", 257), ("<|im_end|>", 258)]
    inner.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
    return inner


def test_fake() -> None:
    tokenizer = load_tokenizer(FAKE)
    assert tokenizer.vocab_size == 259
    assert tokenizer.bos_id is None
    assert tokenizer.special_ids == {256, 257, 258}
    assert tokenizer.encode("<|im_start|>é") == [257, 0xC3, 0xA9]
    assert tokenizer.encode("<|im_end|>", parse_special=False) == list(b"<|im_end|>")
    assert tokenizer.decode([257, 0xC3, 0xA9, 258]) == "é"
    assert tokenizer.decode([257, 97], skip_special=False) == "<|im_start|>a"
    assert [tokenizer.id_to_bytes(i) for i in (0, 255, 258, 259, -1)] == [
        *(b"\x00", b"\xff", b"<|im_end|>", b"", b"")
    ]


@given(text=st.text())
def test_fake_is_bytes(text: str) -> None:
    tokenizer = KINDS["byte_level"]
    ids = tokenizer.encode(text, add_special=False, parse_special=False)
    assert bytes(ids) == text.encode()
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("text", ["a", "", "<|endoftext|>a", "<|endoftext|><|endoftext|>a"])
def test_one_bos(text: str) -> None:
    """B056: one in front; a text that has one (a rendered template) gets no second."""
    tokenizer = byte_level()
    bare = tokenizer.encode(text, add_special=False)
    ids = tokenizer.encode(text)
    assert ids == (bare if bare[:1] == [256] else [256, *bare])
    assert tokenizer.encode_batch([text, text]) == [ids, ids]


def test_bos_spelled_out_is_text() -> None:
    ids = byte_level().encode("<|endoftext|>a", parse_special=False)
    assert ids == [256, *b"<|endoftext|>a"]


@pytest.mark.parametrize(
    ("single", "flag", "ids"),
    [
        ("$A", None, [97]),
        ("<|endoftext|> $A", None, [256, 97]),
        ("<|endoftext|> $A <|im_end|>", None, [256, 97]),  # a prompt to go on from is not ended
        ("<|endoftext|> <|im_start|> $A", None, [256, 257, 97]),
        ("<|endoftext|> $A", False, [97]),
        ("$A", True, [256, 97]),
    ],
)
def test_bos_of_a_folder(tmp_path: Path, single: str, flag: bool | None, ids: list[int]) -> None:
    """tokenizer_config.json's add_bos_token, else what the post-processor puts in front."""
    extra = {} if flag is None else {"add_bos_token": flag}
    tokenizer = load_tokenizer(folder(tmp_path, with_template(single), **extra))
    assert tokenizer.encode("a") == ids
    assert tokenizer.encode("a", add_special=False) == [97]
    assert tokenizer.encode(tokenizer.decode(ids, skip_special=False)) == ids


@pytest.mark.parametrize("content", [None, "{", '{"model": {"type": "Nothing"}}'])
def test_broken_tokenizer_json(tmp_path: Path, content: str | None) -> None:
    files = folder(tmp_path, fake_tokenizer.build())
    (tmp_path / "tokenizer.json").unlink()
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        load_tokenizer(files)


@pytest.mark.parametrize("name", KINDS)
@given(ids=st.lists(st.integers(-5, 700), max_size=20), skip=st.booleans())
def test_decode_never_raises(name: str, ids: list[int], skip: bool) -> None:
    KINDS[name].decode(ids, skip_special=skip)


PIECES = [name for name in KINDS if name.startswith("merged_pieces")]


@pytest.mark.parametrize(
    "name", ["byte_level", "sentencepiece_no_prefix", "sentencepiece", *PIECES]
)
@given(text=st.text(st.characters(exclude_characters="▁", exclude_categories=["Cs"])))
def test_round_trip(name: str, text: str) -> None:
    tokenizer = KINDS[name]
    assert tokenizer.decode(tokenizer.encode(text, parse_special=False)) == text


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    inner = fake_tokenizer.build()
    inner.enable_truncation(4)
    inner.enable_padding(length=8)
    tokenizer = load_tokenizer(folder(tmp_path, inner))
    assert tokenizer.encode_batch(["abcdef", "a"]) == [list(b"abcdef"), [97]]


def test_lone_surrogates_do_not_raise() -> None:
    assert KINDS["byte_level"].encode("a\ud800b", add_special=False) == list(b"a?b")


@pytest.mark.parametrize("name", ["sentencepiece", "sentencepiece_no_prefix", "metaspace"])
@given(ids=st.lists(st.integers(259, 274), max_size=12))
def test_tables_decode_as_tokenizers_does(name: str, ids: list[int]) -> None:
    """Word pieces only: of broken byte runs `tokenizers` makes another number of U+FFFD."""
    tokenizer = KINDS[name]
    if name == "metaspace":
        ids = [i - 256 for i in ids]
    assert tokenizer.decode(ids) == tokenizer._encoder.decode(ids)


def test_long_texts_leave_other_threads_alone() -> None:
    """A thread that encodes 4 MB does not hold the interpreter."""
    tokenizer = Tokenizer(LibraryEncoder(fake_tokenizer.build()), card(add_bos=False))
    text = "The quick brown fox. " * 200_000
    done: list[list[int]] = []
    worker = threading.Thread(target=lambda: done.append(tokenizer.encode(text)))
    worker.start()
    turns = 0
    while worker.is_alive():
        time.sleep(0.001)
        turns += 1
    assert len(done[0]) == len(text)
    assert turns > 10


def test_threads_share_one_tokenizer() -> None:
    tokenizer = byte_level()
    wrong: list[str] = []

    def work(parse: bool) -> None:
        expected = [256, 257] if parse else [256, *b"<|im_start|>"]
        for _ in range(200):
            if tokenizer.encode("<|im_start|>", parse_special=parse) != expected:
                wrong.append(f"parse_special={parse}")

    workers = [threading.Thread(target=work, args=(n % 2 == 0,)) for n in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert wrong == []


def test_bos_without_an_id_is_no_bos() -> None:
    silent = ModelCard(300, None, (), True, None, {})
    assert Tokenizer(LibraryEncoder(fake_tokenizer.build()), silent).encode("a") == [97]


def test_what_goes_behind_a_whole_text_and_between_two() -> None:
    """As tokenizer.json says it: behind texts that are embedded, never behind a prompt."""
    inner = fake_tokenizer.build()
    inner.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>",
        pair="<|im_start|> $A <|im_end|> $B <|im_end|>",
        special_tokens=[("<|im_start|>", 257), ("<|im_end|>", 258)],
    )
    made = Tokenizer(LibraryEncoder(inner), card(add_bos=None))
    assert made.encode_batch(["ab"], add_end=True) == [inner.encode("ab").ids]
    assert made.encode("ab") == [257, *b"ab"]
    assert made.encode_batch(["ab"], add_special=False, add_end=True) == [[*b"ab"]]
    assert made.encode_pairs([("a", "b"), ("", "c")]) == [
        inner.encode("a", "b").ids,
        inner.encode("", "c").ids,
    ]
    assert made.encode_pairs([("a", "b")], add_special=False) == [[*b"ab"]]
