"""`tokenizer.ggml.pre` -> how text is cut into words before byte-pair merging.

A GGUF file names its pre-tokenizer and does not describe it, so the description lives here. Each
pattern cuts every piece that the one before it left; matches and what lies between them stay apart.
Patterns are those of the models' own tokenizer files. A name that is not here is refused: a wrong
cut gives ids that look right and a model that is quietly worse.
"""

from __future__ import annotations

import msgspec

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_EDGE = r"[^\r\n\p{L}\p{N}]?"  # one character that may lead a word: a space, a bracket, a quote


def _tiktoken(digits: str) -> str:
    """The pattern of cl100k and its heirs; they differ in how many digits make a piece."""
    return rf"{_CONTRACTION}|{_EDGE}\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"


def _cased(digits: str, contraction: str) -> str:
    """The pattern of o200k and its heirs, which also cuts between lower and upper case."""
    return (
        rf"{_EDGE}{_UPPER}*{_LOWER}+{contraction}|{_EDGE}{_UPPER}+{_LOWER}*{contraction}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
    )


class Pre(msgspec.Struct, frozen=True):
    """`whole_words`: a piece that is a token is taken as it is, whatever the merges say."""

    patterns: tuple[str, ...]
    whole_words: bool = False
    nfc: bool = False  # the model's own tokenizer composes characters first


_LLAMA3 = Pre((_tiktoken(r"\p{N}{1,3}"),), whole_words=True)
_CL100K = Pre((_tiktoken(r"\p{N}{1,3}"),))
_DIGITS_GPT2 = Pre((_DIGIT, _GPT2))
_O200K = Pre((_cased(r"\p{N}{1,3}", rf"{_CONTRACTION}?"),))
_ONE_DIGIT = Pre((_tiktoken(_DIGIT),))

PRE_TOKENIZERS: dict[str, Pre] = {
    "default": Pre((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": Pre((_GPT2,)),
    "phi-2": Pre((_GPT2,)),
    "olmo": Pre((_GPT2,)),
    "mpt": Pre((_GPT2,)),
    "exaone4": Pre((_GPT2,)),
    "smollm": _DIGITS_GPT2,
    "starcoder": _DIGITS_GPT2,
    "refact": _DIGITS_GPT2,
    "command-r": _DIGITS_GPT2,
    "codeshell": _DIGITS_GPT2,
    "exaone": _DIGITS_GPT2,
    "minerva-7b": _DIGITS_GPT2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "pixtral": _LLAMA3,
    "lfm2": _LLAMA3,
    "dbrx": _CL100K,
    "smaug-bpe": _CL100K,
    "chatglm-bpe": _CL100K,
    "glm4": _CL100K,
    "qwen2": Pre((_tiktoken(_DIGIT),), nfc=True),
    "deepseek-r1-qwen": _ONE_DIGIT,
    "megrez": _ONE_DIGIT,
    "stablelm2": _ONE_DIGIT,
    "deepseek-coder": Pre((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", _DIGIT)),
    "deepseek-v3": Pre(
        (
            r"\p{N}{1,3}",
            "[一-龥぀-ゟ゠-ヿ]+",
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
            r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _TAIL,
        )
    ),
    "falcon": Pre((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    "tekken": Pre((_cased(_DIGIT, ""),), whole_words=True),
    "gpt-4o": _O200K,
    "llama4": _O200K,
}
