"""What is read of a model: context, end ids from every place, BOS, template, sampling defaults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ModelError
from headrace.models.spec import from_hf
from headrace.sources.card import gguf_card, known_ids, read_card
from headrace.sources.files import ModelFiles
from headrace.sources.gguf import Header
from headrace.sources.resolve import FAKE

ADDED = [
    {"id": 0, "content": "<s>", "special": True},
    {"id": 1, "content": "</s>", "special": True},
    {"id": 7, "content": "<|im_end|>", "special": True},
]
CONFIG = {"model_type": "llama", "vocab_size": 10, "max_position_embeddings": 512}


def folder(path: Path, **files: Any) -> ModelFiles:
    """Writes each of `files`: name without .json -> content."""
    files = {"config": CONFIG, "tokenizer": {"added_tokens": ADDED}} | files
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return ModelFiles("test", "hf", path)


def gguf(**metadata: Any) -> Header:
    base = {
        "general.architecture": "llama",
        "llama.context_length": 2048,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": ["<s>", "a", "</s>", "<|im_end|>", "<|eot_id|>"],
        "tokenizer.ggml.token_type": [3, 1, 3, 3, 1],
    }
    return Header(3, base | {k.replace("__", "."): v for k, v in metadata.items()}, {})


def test_fake() -> None:
    card = read_card(FAKE)
    assert (card.vocab_size, card.eos_ids, card.add_bos) == (259, (256, 258), False)
    assert card.chat_template is not None


def test_end_ids_come_from_every_place(tmp_path: Path) -> None:
    """B013: turn end (generation_config), document end (config), tokenizer's eos."""
    files = folder(
        tmp_path,
        config=CONFIG | {"eos_token_id": 2},
        generation_config={"eos_token_id": [7, 3]},
        tokenizer_config={"eos_token": {"content": "</s>"}, "bos_token": "<s>"},
    )
    card = read_card(files)
    assert card.eos_ids == (1, 2, 3, 7)
    assert card.bos_id == 0
    assert card.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert card.add_bos is None


def test_added_tokens_decoder_spares_the_large_file(tmp_path: Path) -> None:
    decoder = {"5": {"content": "<s>"}, "6": {"content": "</s>"}}
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    files = folder(tmp_path, tokenizer_config=names | {"added_tokens_decoder": decoder})
    (tmp_path / "tokenizer.json").write_text("not read")
    card = read_card(files)
    assert (card.bos_id, card.eos_ids) == (5, (6,))


def test_ids_outside_the_vocabulary_are_dropped(tmp_path: Path) -> None:
    card = read_card(folder(tmp_path, generation_config={"eos_token_id": [-1, 9, 10]}))
    assert card.eos_ids == (9,)


def test_facts_of_a_folder(tmp_path: Path) -> None:
    generation = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0}
    card = read_card(folder(tmp_path, generation_config=generation))
    assert (card.temperature, card.top_k, card.top_p, card.min_p) == (0.6, 20, 0.95, 0)
    assert card.vocab_size == 10


def test_no_generation_config(tmp_path: Path) -> None:
    card = read_card(folder(tmp_path))
    assert [card.temperature, card.top_k, card.top_p, card.min_p] == [None] * 4
    assert (card.eos_ids, card.bos_id, card.chat_template) == ((), None, None)


def test_nested_text_config(tmp_path: Path) -> None:
    nested = {"model_type": "both", "eos_token_id": 4, "text_config": CONFIG | {"eos_token_id": 5}}
    card = read_card(folder(tmp_path, config=nested))
    assert (card.vocab_size, card.eos_ids) == (10, (4, 5))


def test_template_places(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    files = folder(tmp_path, tokenizer_config={"chat_template": named})
    assert read_card(files).chat_template == "D"
    folder(tmp_path, tokenizer_config={"chat_template": "S"})
    assert read_card(files).chat_template == "S"
    (tmp_path / "chat_template.jinja").write_text("J")
    assert read_card(files).chat_template == "J"


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"config": {"model_type": "llama"}}, "no vocab_size"),
        ({"config": [1]}, "does not hold a JSON object"),
        ({"generation_config": "x"}, "does not hold a JSON object"),
    ],
)
def test_broken_folder(tmp_path: Path, files: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        read_card(folder(tmp_path, **files))


def test_a_vocabulary_that_the_config_leaves_out(tmp_path: Path) -> None:
    """As Gemma 3's that see pictures do: the tokenizer's ids are the legal ones."""
    files = folder(tmp_path, config={"text_config": {"model_type": "gemma3_text"}})
    tokenizer = {"model": {"vocab": {"a": 0, "b": 7}}, "added_tokens": [{"id": 9, "content": "c"}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert read_card(files).vocab_size == 10
    (tmp_path / "tokenizer.json").write_text("[")
    with pytest.raises(ModelError, match=r"cannot read .*tokenizer\.json"):
        known_ids(tmp_path / "tokenizer.json")


def test_a_vocabulary_that_only_the_class_says(tmp_path: Path) -> None:
    """Google's config.json of gemma-3-4b-it, in a folder without a tokenizer."""
    text = {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
        "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }  # fmt: skip
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
        "eos_token_id": [1, 106], "text_config": text,
    }  # fmt: skip
    card = read_card(folder(tmp_path, config=config, tokenizer={}))
    assert (card.vocab_size, card.eos_ids) == (from_hf(config).vocab_rows, (1, 106))


def test_missing_and_unreadable_config(tmp_path: Path) -> None:
    files = folder(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff{")
    with pytest.raises(ModelError, match=r"cannot read .*config\.json"):
        read_card(files)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ModelError, match="is missing"):
        read_card(files)


def test_gguf_end_ids() -> None:
    """The named ones, and control tokens that end a turn; plain tokens of such a text do not."""
    card = gguf_card(gguf(tokenizer__ggml__eos_token_id=0, tokenizer__ggml__eot_token_id=1))
    assert card.eos_ids == (0, 1, 2, 3)
    assert gguf_card(gguf(tokenizer__ggml__eos_token_id=99)).eos_ids == (2, 3)


@pytest.mark.parametrize(
    ("metadata", "add"),
    [
        ({}, False),
        ({"tokenizer__ggml__bos_token_id": 0}, False),
        ({"tokenizer__ggml__bos_token_id": 0, "tokenizer__ggml__pre": "llama-bpe"}, True),
        ({"tokenizer__ggml__bos_token_id": 0, "tokenizer__ggml__model": "llama"}, True),
        (
            {
                "tokenizer__ggml__bos_token_id": 0,
                "tokenizer__ggml__model": "llama",
                "tokenizer__ggml__add_bos_token": False,
            },
            False,
        ),
        ({"tokenizer__ggml__add_bos_token": True}, False),  # there is none to add
    ],
)
def test_gguf_bos(metadata: dict[str, Any], add: bool) -> None:
    assert gguf_card(gguf(**metadata)).add_bos is add


def test_gguf_facts() -> None:
    card = gguf_card(
        gguf(tokenizer__ggml__bos_token_id=0, tokenizer__chat_template="T", general__name="x")
    )
    assert card.vocab_size == 5
    assert (card.chat_template, card.special_tokens) == ("T", {"bos_token": "<s>"})


@pytest.mark.parametrize("tokens", [None, [], "abc"])
def test_gguf_without_vocabulary(tokens: Any) -> None:
    with pytest.raises(ModelError, match="no tokenizer"):
        gguf_card(gguf(tokenizer__ggml__tokens=tokens))


def test_default_model(default_model: ModelFiles) -> None:
    card = read_card(default_model)
    assert card.vocab_size == 49152
    assert (card.bos_id, card.eos_ids, card.add_bos) == (1, (0, 2), False)
    assert default_model.name == "smollm2-135m-instruct"
