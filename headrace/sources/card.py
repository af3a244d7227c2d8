"""What a model says about itself: read once, without its weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from headrace.errors import ModelError
from headrace.sources.files import ModelFiles
from headrace.sources.gguf import Header, Strings, read_header
from headrace.sources.labels import Problem, labels_of, problem_of
from headrace.sources.pooling import pooling_of

# Tokens that end a turn or a document wherever they occur as control tokens. GGUF files often name
# only one of them in their metadata, and a chat model that is not stopped writes the user's turn.
END_TOKENS = frozenset({
    "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>",
    "<end_of_turn>", "<turn|>", "<|return|>", "<|call|>", "<｜end▁of▁sentence｜>", "</s>",
})  # fmt: skip
_PRE_WITH_BOS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2", "tekken")
CONTROL = 3  # tokenizer.ggml.token_type
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_ROWS = {"gemma3": 262208, "gemma3n": 262400}  # where neither config nor tokenizer says them
_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


class ModelCard(msgspec.Struct, frozen=True):
    """Facts about a model. Sampling defaults are None where the model gives none."""

    vocab_size: int  # rows of the output layer: legal ids are below it
    bos_id: int | None
    eos_ids: tuple[int, ...]  # every id that ends a choice, ascending
    add_bos: bool | None  # None: whatever tokenizer.json's post-processor does
    chat_template: str | None
    special_tokens: dict[str, str]  # bos_token, eos_token, ...: text, for templates
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    pooling: str = ""  # of its embeddings: mean, last or one we do not know; "" = not said
    labels: tuple[str, ...] = ()  # names, by label; () = it has no classification head
    problem: Problem = "single_label_classification"


def read_card(files: ModelFiles) -> ModelCard:
    """The card of a resolved model. Raises ModelError for unreadable or contradictory files."""
    if files.kind == "fake":
        return _fake_card()
    if files.kind == "gguf":
        return card_of_header(files, read_header(files.path))
    return _well_formed(files, lambda: _hf_card(files.path))


def card_of_header(files: ModelFiles, header: Header) -> ModelCard:
    """The card of a GGUF file whose header has been read. Raises ModelError."""
    return _well_formed(files, lambda: gguf_card(header))


def _well_formed(files: ModelFiles, read: Callable[[], ModelCard]) -> ModelCard:
    try:
        return read()
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # a value of a wrong type
        raise ModelError(
            f"{files.path}: malformed metadata: {type(error).__name__}: {error}"
        ) from None


def _fake_card() -> ModelCard:
    names = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    labels = ("LABEL_0", "LABEL_1", "LABEL_2")
    return ModelCard(259, None, (256, 258), False, CHATML, names, labels=labels)


def gguf_card(header: Header) -> ModelCard:
    """The card in a GGUF header. Raises ModelError if it holds no vocabulary."""
    meta = header.metadata
    tokens, types = meta.get("tokenizer.ggml.tokens"), meta.get("tokenizer.ggml.token_type", [])
    if not isinstance(tokens, list | Strings) or not tokens or not isinstance(types, list):
        raise ModelError("the GGUF file holds no tokenizer (tokenizer.ggml.tokens)")

    def special(name: str) -> int | None:
        value = meta.get(f"tokenizer.ggml.{name}_token_id")
        if isinstance(value, int) and 0 <= value < len(tokens):
            return value
        return None

    ends = {i for i in map(special, ("eos", "eot", "eom")) if i is not None}
    ends |= {i for i, kind in enumerate(types) if kind == CONTROL and tokens[i] in END_TOKENS}
    named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: special(key) for name, key in named.items()}
    bos, add_bos = ids["bos_token"], meta.get("tokenizer.ggml.add_bos_token")
    if add_bos is None:  # llama.cpp's rule for files that do not say
        pre = meta.get("tokenizer.ggml.pre")
        add_bos = meta.get("tokenizer.ggml.model") == "llama" or pre in _PRE_WITH_BOS
    template = meta.get("tokenizer.chat_template")
    return ModelCard(
        vocab_size=len(tokens),
        bos_id=bos,
        eos_ids=tuple(sorted(ends)),
        add_bos=bool(add_bos) and bos is not None,
        chat_template=template if isinstance(template, str) else None,
        special_tokens={name: tokens[i] for name, i in ids.items() if i is not None},
    )


def _hf_card(folder: Path) -> ModelCard:
    config = read_json(folder / "config.json", required=True)
    text = config.get("text_config") or config
    generation = read_json(folder / "generation_config.json")
    tokenizer = read_json(folder / "tokenizer_config.json")
    texts = {name: t for name in _NAMES if (t := _token_text(tokenizer.get(name))) is not None}
    ids = _added_ids(folder, tokenizer, texts)
    bos = ids.get(texts.get("bos_token", ""), _first(config.get("bos_token_id")))
    ends = {i for c in (generation, config, text) for i in _ids(c.get("eos_token_id"))}
    ends |= {ids[t] for t in [texts.get("eos_token", "")] if t in ids}
    vocab_size = text.get("vocab_size")
    if vocab_size is None and text is not config:  # models that see pictures: a class's default
        rows = _ROWS.get(str(config.get("model_type")))
        vocab_size = known_ids(folder / "tokenizer.json") or rows
    if not isinstance(vocab_size, int) or vocab_size < 1:
        raise ModelError(f"{folder / 'config.json'}: no vocab_size")
    flag = tokenizer.get("add_bos_token")
    return ModelCard(
        vocab_size=vocab_size,
        bos_id=bos,
        eos_ids=tuple(sorted(i for i in ends if 0 <= i < vocab_size)),
        add_bos=flag if isinstance(flag, bool) else None,
        chat_template=_hf_template(folder, tokenizer),
        special_tokens=texts,
        temperature=_number(generation, "temperature"),
        top_k=None if (k := _number(generation, "top_k")) is None else int(k),
        top_p=_number(generation, "top_p"),
        min_p=_number(generation, "min_p"),
        typical_p=_number(generation, "typical_p"),
        repetition_penalty=_number(generation, "repetition_penalty"),
        pooling=pooling_of(folder),
        labels=labels_of(config),
        problem=problem_of(config),
    )


def read_json(path: Path, *, required: bool = False) -> dict[str, Any]:
    """The object in a JSON file; {} if the file is missing and not required."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if not required:
            return {}
        raise ModelError(f"{path} is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"cannot read {path}: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return value


class _Vocabulary(msgspec.Struct):
    vocab: dict[str, int] | list[Any] | None = None  # a list: [text, score] each


class _Added(msgspec.Struct):
    id: int


class _TokenizerFile(msgspec.Struct):
    """What is looked at of a tokenizer.json."""

    model: _Vocabulary = msgspec.field(default_factory=_Vocabulary)
    added_tokens: list[_Added] | None = None


def known_ids(path: Path) -> int:
    """One more than the highest id in a tokenizer.json, 0 if there is none. Such files are large,
    and msgspec reads them twice as fast. Raises ModelError if it cannot be read."""
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_TokenizerFile)
    except FileNotFoundError:
        return 0
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        raise ModelError(f"cannot read {path}: {error}") from None
    vocab = file.model.vocab or {}
    highest = len(vocab) - 1 if isinstance(vocab, list) else max(vocab.values(), default=-1)
    return max(highest, *(token.id for token in file.added_tokens or ()), -1) + 1


def _added_ids(folder: Path, tokenizer: dict[str, Any], texts: dict[str, str]) -> dict[str, int]:
    """Text -> id of the added tokens. tokenizer.json, which is large, is read only if needed."""
    decoder = tokenizer.get("added_tokens_decoder") or {}
    ids = {str(token["content"]): int(i) for i, token in decoder.items()}
    if set(texts.values()) <= set(ids):
        return ids
    added = read_json(folder / "tokenizer.json", required=True).get("added_tokens") or []
    return ids | {str(token["content"]): int(token["id"]) for token in added}


def _hf_template(folder: Path, tokenizer: dict[str, Any]) -> str | None:
    """chat_template.jinja, else tokenizer_config.json: one string, or a list of named ones."""
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    value = tokenizer.get("chat_template")
    if isinstance(value, list):
        named = {t["name"]: t["template"] for t in value}
        value = named.get("default")
    return value if isinstance(value, str) else None


def _token_text(value: Any) -> str | None:
    """Tokens are written as a string or as {"content": ...}."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _ids(value: Any) -> list[int]:
    """An id, a list of ids, or null."""
    return [int(i) for i in (value if isinstance(value, list) else [value]) if i is not None]


def _first(value: Any) -> int | None:
    found = _ids(value)
    return found[0] if found else None


def _number(config: dict[str, Any], key: str) -> float | None:
    value = config.get(key)
    return float(value) if isinstance(value, int | float) else None
