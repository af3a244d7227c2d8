"""A `tokenizers` tokenizer from the metadata of a GGUF file."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from headrace.errors import ModelError
from headrace.native.build import Unavailable
from headrace.text import piece_encoder
from headrace.text.encoder import SPACE, Encoder, LibraryEncoder
from headrace.text.piece_encoder import CONTROL, UNKNOWN, USER_DEFINED
from headrace.text.pretokenizers import PRE_TOKENIZERS

log = logging.getLogger("headrace.text")


def encoder(metadata: dict[str, Any]) -> Encoder:
    """What makes ids as `metadata` says; of SentencePiece's kind in C++, if there is a compiler.

    Raises ModelError as `build` does.
    """
    if metadata.get("tokenizer.ggml.model") == "llama":
        made = piece_encoder.encoder_of(metadata)
        if not isinstance(made, Unavailable):
            return made
        log.warning(
            "pieces of text are merged by `tokenizers`, which takes seconds to start with a large "
            "vocabulary: %s; %s",
            made.reason,
            made.remedy,
        )
    return LibraryEncoder(build(metadata))


def build(metadata: dict[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer that `metadata` describes. Raises ModelError for a kind that is not known.

    Adds no BOS by itself: `ModelCard.add_bos` says whether the model wants one.
    """
    kind = metadata.get("tokenizer.ggml.model")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if kind not in builders:
        known = ", ".join(builders)
        raise ModelError(f"GGUF tokenizer model {kind!r} is not supported (known: {known})")
    try:
        return _build(metadata, builders[kind])
    except ModelError:
        raise
    except Exception as error:  # tokenizers raises bare Exception for merges outside the vocabulary
        raise ModelError(f"the GGUF file's tokenizer is broken: {error}") from None


def _build(
    metadata: dict[str, Any],
    builder: Callable[[dict[str, Any], dict[str, int]], tokenizers.Tokenizer],
) -> tokenizers.Tokenizer:
    tokens: list[str] = list(metadata.get("tokenizer.ggml.tokens") or ())
    types: list[int] = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    vocab = {token: i for i, token in enumerate(tokens)}
    if not tokens or len(types) != len(tokens):
        raise ModelError(f"the GGUF file has {len(tokens)} tokens and {len(types)} token types")
    if len(vocab) != len(tokens):
        raise ModelError(f"the GGUF file repeats {len(tokens) - len(vocab)} of its tokens")
    built = builder(metadata, vocab)
    typed = list(zip(tokens, types, strict=True))
    special = [token for token, kind in typed if kind in (CONTROL, UNKNOWN)]
    plain = [token for token, kind in typed if kind == USER_DEFINED]
    built.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    built.add_tokens([AddedToken(t, special=False, normalized=False) for t in plain])
    return built


def _byte_level(metadata: dict[str, Any], vocab: dict[str, int]) -> tokenizers.Tokenizer:
    """GPT-2's byte-level BPE: merges are given, the cut into words is `tokenizer.ggml.pre`."""
    name = metadata.get("tokenizer.ggml.pre")
    if name not in PRE_TOKENIZERS:
        raise ModelError(
            f"GGUF pre-tokenizer {name!r} (tokenizer.ggml.pre) is not known; known: "
            + ", ".join(PRE_TOKENIZERS)
        )
    pre = PRE_TOKENIZERS[name]
    lines: Sequence[str] = metadata.get("tokenizer.ggml.merges") or ()
    merges = [_pair(line) for line in lines]
    built = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.whole_words)
    )
    cuts: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns
    ]
    cuts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    built.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    built.decoder = decoders.ByteLevel()
    if pre.nfc:
        built.normalizer = normalizers.NFC()
    return built


def _pair(line: str) -> tuple[str, str]:
    """`left right` -> (left, right); a part never starts at the separator."""
    at = line.find(" ", 1)
    if at < 0:
        raise ModelError(f"the GGUF file holds a merge without two parts: {line!r}")
    return line[:at], line[at + 1 :]


def _sentencepiece(metadata: dict[str, Any], vocab: dict[str, int]) -> tokenizers.Tokenizer:
    """SentencePiece BPE: of all pairs, the one whose union scores highest is merged first."""
    scores: list[float] = metadata.get("tokenizer.ggml.scores") or []
    if len(scores) != len(vocab):
        raise ModelError(f"the GGUF file has {len(vocab)} tokens and {len(scores)} scores")
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    tokens = list(vocab)
    if not isinstance(unknown, int) or not 0 <= unknown < len(tokens):
        raise ModelError(f"the GGUF file names token {unknown} as unknown, of {len(tokens)}")
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    built = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges_from_scores(vocab, scores),
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    escape = normalizers.Replace(" ", SPACE)
    built.normalizer = (
        normalizers.Sequence([normalizers.Prepend(SPACE), escape]) if prefix else escape
    )
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    built.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    return built


def _merges_from_scores(vocab: dict[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to make a token of two tokens, best score first."""
    found: list[tuple[float, int, int, str, str]] = []
    for token, i in vocab.items():
        for at in range(1, len(token)):
            left, right = token[:at], token[at:]
            if left in vocab and right in vocab:
                found.append((-scores[i], vocab[left], vocab[right], left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]
