"""Tokenizers out of GGUF metadata: cut, merged and refused as the model's own would."""

from __future__ import annotations

import heapq
import json
import random
from pathlib import Path
from typing import Any

import pytest
import regex  # type: ignore[import-untyped]
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import ModelError
from headrace.native import pieces
from headrace.native.build import Unavailable
from headrace.sources.files import ModelFiles
from headrace.sources.gguf import read_header
from headrace.text import gguf_tokenizer
from headrace.text.byte_level import CHAR_OF
from headrace.text.encoder import LibraryEncoder
from headrace.text.pretokenizers import PRE_TOKENIZERS
from headrace.text.tokenizer import Tokenizer, load_tokenizer
from tests.unit.sample_tokenizers import card, packed, sentencepiece_metadata

# What the pre-tokenizers in the models' own tokenizer.json make of these texts.
CUTS = json.loads((Path(__file__).parent / "data" / "pre_cuts.json").read_text())
ALPHABET = "abcXYZ 0123  \n\t'.,!-_/\\()[]{}éñß漢字かな한글👍🏽\u200dالनम٣½\x00\x7f"


def byte_metadata(pre: str | None, merges: list[str] | None = None) -> dict[str, Any]:
    """A "gpt2" tokenizer of the 256 bytes and what `merges` make of them."""
    tokens = [CHAR_OF[b] for b in range(256)]
    tokens += [merge.replace(" ", "") for merge in merges or []]
    found: dict[str, Any] = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": tokens}
    found |= {"tokenizer.ggml.merges": merges or [], "tokenizer.ggml.pre": pre}
    return {key: value for key, value in found.items() if value is not None}


def texts(count: int) -> list[str]:
    """The same strings on every run."""
    rng = random.Random(7)
    out = list(CUTS["texts"])
    while len(out) < count:
        out.append("".join(rng.choice(ALPHABET) for _ in range(rng.randint(1, 60))))
    return out


@pytest.mark.parametrize("pre", CUTS["pieces"])
def test_cuts_of_the_models_own_tokenizers(pre: str) -> None:
    built = gguf_tokenizer.build(byte_metadata(pre))
    for text, expected in zip(CUTS["texts"], CUTS["pieces"][pre], strict=True):
        normal = built.normalizer.normalize_str(text) if built.normalizer else text
        cuts = built.pre_tokenizer.pre_tokenize_str(normal)
        assert [normal[a:b] for _, (a, b) in cuts] == expected


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_pre_tokenizer_keeps_every_byte(pre: str) -> None:
    built = gguf_tokenizer.build(byte_metadata(pre))
    nfc = PRE_TOKENIZERS[pre].nfc
    for text in texts(60):
        normal = built.normalizer.normalize_str(text) if nfc else text
        assert bytes(built.encode(text).ids) == normal.encode()


@pytest.mark.parametrize("pre", [None, "", "made-up", "smollm2"])
def test_unknown_pre_tokenizer_is_refused(pre: str | None) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.pre.*smollm") as caught:
        gguf_tokenizer.build(byte_metadata(pre))
    assert repr(pre) in caught.value.message


def test_whole_words_ignore_the_merges() -> None:
    merges = ["a b", "b c", "ab c", "a bc"]
    metadata = byte_metadata("llama-bpe", merges[:3])
    metadata["tokenizer.ggml.tokens"].append("cab")
    built = gguf_tokenizer.build(metadata)
    assert built.encode("cab").tokens == ["cab"]  # no merge leads there
    metadata["tokenizer.ggml.pre"] = "dbrx"
    assert gguf_tokenizer.build(metadata).encode("cab").tokens == ["c", "ab"]


def test_merge_with_a_part_that_begins_with_a_space_sign() -> None:
    built = gguf_tokenizer.build(byte_metadata("gpt-2", ["Ġ t", "Ġt o"]))
    assert built.encode(" to").tokens == ["Ġto"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokenizer.ggml.model": "bert"}, "'bert' is not supported"),
        ({"tokenizer.ggml.model": None}, "None is not supported"),
        ({"tokenizer.ggml.tokens": []}, "0 tokens"),
        ({"tokenizer.ggml.tokens": ["a", "b", "a"]}, "repeats 1"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "2 token types"),
        ({"tokenizer.ggml.merges": ["ab"]}, "without two parts"),
        ({"tokenizer.ggml.merges": ["zz yy"]}, "broken"),
    ],
)
def test_broken_metadata(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        gguf_tokenizer.build(byte_metadata("gpt-2") | change)


def test_broken_scores() -> None:
    with pytest.raises(ModelError, match="0 scores"):
        gguf_tokenizer.build(sentencepiece_metadata() | {"tokenizer.ggml.scores": []})
    with pytest.raises(ModelError, match="token 10000 as unknown"):
        gguf_tokenizer.build(sentencepiece_metadata() | {"tokenizer.ggml.unknown_token_id": 10_000})


def merge_by_score(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's BPE, written out: join the neighbours whose union scores highest."""
    parts = list(text)
    while True:
        pairs = [(scores.get(a + b), n) for n, (a, b) in enumerate(zip(parts, parts[1:]))]  # noqa: B905, RUF007
        best = max(((s, -n) for s, n in pairs if s is not None), default=None)
        if best is None:
            return parts
        at = -best[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@given(
    words=st.sets(st.text(alphabet="ab▁", min_size=2, max_size=4), max_size=12),
    text=st.text(alphabet="ab ", max_size=12),
    prefix=st.booleans(),
)
def test_sentencepiece_merges(words: set[str], text: str, prefix: bool) -> None:
    """Against the algorithm itself, for tokens whose scores all differ."""
    tokens = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), "a", "b", "▁", *sorted(words)]
    scores = [-float(n) for n in range(len(tokens))]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": packed(tokens),
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2] + [6] * 256 + [1] * (3 + len(words)),
        "tokenizer.ggml.add_space_prefix": prefix,
    }
    built = gguf_tokenizer.build(metadata)
    spaced = text.replace(" ", "▁")
    spaced = "▁" + spaced if prefix and text else spaced
    expected = merge_by_score(spaced, dict(zip(tokens, scores, strict=True)))
    assert built.encode(text).tokens == expected
    assert built.decode(built.encode(text).ids) == text
    made = Tokenizer(gguf_tokenizer.encoder(metadata), card(add_bos=False))
    assert made.encode(text) == built.encode(text).ids
    assert made.decode(made.encode(text)) == text


def test_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`tokenizers` does it, and the log says so."""
    monkeypatch.setattr(pieces, "load", lambda: Unavailable("none here", "install one"))
    metadata = sentencepiece_metadata(prefix=False)
    metadata["tokenizer.ggml.tokens"] = packed(metadata["tokenizer.ggml.tokens"])
    made = gguf_tokenizer.encoder(metadata)
    assert isinstance(made, LibraryEncoder)
    assert made.encode(["hello"], parse_special=True) == [[266, 268, 262]]
    assert "none here; install one" in caplog.text


def test_sentencepiece_bytes() -> None:
    built = gguf_tokenizer.build(sentencepiece_metadata(prefix=False))
    assert built.encode("🐙").tokens == ["<0xF0>", "<0x9F>", "<0x90>", "<0x99>"]


# ------------------------------------------------------------------ the default model

_SMOLLM_WORDS = regex.compile(
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
)
_DIGIT = regex.compile(r"(\p{N})")


class PlainBPE:
    """Byte-level BPE written out, for SmolLM2's metadata: digits apart, GPT-2's words, merges."""

    def __init__(self, metadata: dict[str, Any]) -> None:
        tokens = metadata["tokenizer.ggml.tokens"]
        self.ids = {token: i for i, token in enumerate(tokens)}
        merges = metadata["tokenizer.ggml.merges"]
        self.rank = {tuple(merge.split(" ")): n for n, merge in enumerate(merges)}
        types = metadata["tokenizer.ggml.token_type"]
        special = [t for t, kind in zip(tokens, types, strict=True) if kind == 3]
        special.sort(key=len, reverse=True)
        self.special = regex.compile("(" + "|".join(map(regex.escape, special)) + ")")

    def encode(self, text: str, parse_special: bool) -> list[int]:
        out: list[int] = []
        parts = self.special.split(text) if parse_special else [text]
        for n, part in enumerate(parts):
            if n % 2:
                out.append(self.ids[part])
                continue
            for piece in _DIGIT.split(part):
                for word in _SMOLLM_WORDS.findall(piece):
                    out += self.merge([CHAR_OF[b] for b in word.encode()])
        return out

    def merge(self, parts: list[str]) -> list[int]:
        while True:
            pairs = [(self.rank.get((a, b)), n) for n, (a, b) in enumerate(zip(parts, parts[1:]))]  # noqa: B905, RUF007
            found = heapq.nsmallest(1, [(r, n) for r, n in pairs if r is not None])
            if not found:
                return [self.ids[part] for part in parts]
            at = found[0][1]
            parts[at : at + 2] = [parts[at] + parts[at + 1]]


@pytest.fixture(scope="module")
def smollm2(default_model: ModelFiles) -> Tokenizer:
    return load_tokenizer(default_model)


def test_default_model_against_plain_bpe(smollm2: Tokenizer, default_model: ModelFiles) -> None:
    plain = PlainBPE(read_header(default_model.path).metadata)
    marks = ["<|im_start|>user\nHi 7<|im_end|>", "<|endoftext|><repo_name>", "a <|im_end|> b"]
    for text in [*texts(300), *marks]:
        for parse in (True, False):
            ids = smollm2.encode(text, parse_special=parse)
            assert ids == plain.encode(text, parse), text
            assert smollm2.decode(ids, skip_special=False) == text


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello, world!", [19556, 28, 905, 17]),
        (
            "né 🐙 漢字 12345 end",
            [94, 2756, 15107, 234, 243, 17097, 137, 112, 36518, 216, 33, 34, 35, 36, 37, 1112],
        ),
        ("<|im_start|>user\nhi<|im_end|>", [1, 4093, 198, 6004, 2]),
    ],
)
def test_default_model_ids(smollm2: Tokenizer, text: str, ids: list[int]) -> None:
    assert smollm2.encode(text) == ids
    assert smollm2.encode_batch([text, "", text]) == [ids, [], ids]


def test_default_model_special_text_spelled_out(smollm2: Tokenizer) -> None:
    ids = [44, 108, 306, 79, 3738, 108, 46]
    assert smollm2.encode("<|im_start|>", parse_special=False) == ids
    assert smollm2.encode("<|im_start|>") == [1]  # asking for one does not change the other
