"""What a checkpoint's config says, in our names. No torch.

A feature that changes the numbers and that headrace does not compute raises ModelError naming it:
a dropped feature gives fluent text at first and rubbish later.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from headrace.errors import ModelError
from headrace.models.registry import family_of
from headrace.sources.files import ModelFiles
from headrace.sources.gguf import Header, read_header

_UNUSED_TOKEN = 5  # tokenizer.ggml.token_type of entries that only pad the vocabulary


class Rope(msgspec.Struct, frozen=True):
    """Rotary embedding. `kind`:

    default  theta ** (-2i / head_dim)
    linear   the same, divided by `factor`
    llama3   divided by `factor` below `low_freq`, unchanged above `high_freq`, blended between
    factors  divided by a stored tensor [head_dim / 2] (GGUF `rope_freqs.weight`)
    """

    theta: float = 10000.0
    kind: Literal["default", "linear", "llama3", "factors"] = "default"
    factor: float = 1.0
    low_freq: float = 1.0
    high_freq: float = 4.0
    original_positions: int = 8192


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of one model. Sizes are counts of elements, heads, layers or tokens."""

    architecture: str  # as the checkpoint says: LlamaForCausalLM, llama, ...
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab_rows: int  # rows of the embedding and of the output layer
    vocab_size: int  # ids that the tokenizer knows; <= vocab_rows
    rope: Rope
    norm_eps: float
    tied: bool  # the output layer is the embedding
    qkv_bias: bool
    max_positions: int
    dtype: str = ""  # what the config claims the weights to be; "" = it does not say

    def __post_init__(self) -> None:
        for key in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab_rows"):
            if getattr(self, key) < 1:
                raise ModelError(f"{self.architecture}: {key} = {getattr(self, key)}")
        if self.heads % self.kv_heads:
            raise ModelError(f"{self.heads} heads do not divide into {self.kv_heads} KV heads")
        if self.head_dim % 2:
            raise ModelError(f"head_dim = {self.head_dim}: rotary embedding needs an even number")
        if not 0 < self.vocab_size <= self.vocab_rows:
            raise ModelError(
                f"the tokenizer has {self.vocab_size} ids, the embedding {self.vocab_rows} rows"
            )


def read_spec(files: ModelFiles) -> ModelSpec:
    """The spec of a model on disk. Raises ModelError if it cannot be read or run."""
    if files.kind == "gguf":
        return from_gguf(read_header(files.path, strings=False))
    if files.kind != "hf":
        raise ModelError(f"{files.name}: a model of kind {files.kind!r} has no weights")
    config = _read_json(files.path / "config.json")
    return from_hf(config, _tokenizer_size(files.path / "tokenizer.json"))


# ---------------------------------------------------------------- Hugging Face


def from_hf(config: Mapping[str, Any], known_ids: int = 0) -> ModelSpec:
    """The spec in a config.json. `known_ids`: ids the tokenizer has, 0 = take the config's word.

    Raises ModelError naming an unknown architecture, a missing key or an unsupported feature.
    """
    names = config.get("architectures") or ["(none)"]
    architecture = str(names[0])
    family = family_of(architecture)
    _refuse_hf(config, architecture)
    need = _Need(config, "config.json")
    heads, hidden = need.count("num_attention_heads"), need.count("hidden_size")
    head_dim = config.get("head_dim") or hidden // heads
    rows = need.count("vocab_size")
    return ModelSpec(
        architecture=architecture,
        layers=need.count("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        ffn=need.count("intermediate_size"),
        vocab_rows=rows,
        vocab_size=min(known_ids or rows, rows),
        rope=_rope_hf(config),
        norm_eps=need.number("rms_norm_eps"),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family.qkv_bias,
        max_positions=need.count("max_position_embeddings"),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or ""),
    )


def _refuse_hf(config: Mapping[str, Any], architecture: str) -> None:
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    layers = set(config.get("layer_types") or ()) - {"full_attention", "sliding_attention"}
    reasons = {
        # A window as long as the model's positions hides nothing.
        f"sliding_window = {window}": (window or math.inf)
        < (config.get("max_position_embeddings") or 0),
        f"layers of type {', '.join(sorted(layers))}": bool(layers),
        "attention_bias": bool(config.get("attention_bias")),
        "mlp_bias": bool(config.get("mlp_bias")),
        f"hidden_act = {config.get('hidden_act')!r}": config.get("hidden_act", "silu") != "silu",
        "partial_rotary_factor": (config.get("partial_rotary_factor") or 1) != 1,
        "quantization_config": bool(config.get("quantization_config")),
        "experts": bool(config.get("num_local_experts") or config.get("num_experts")),
    }
    _refuse(architecture, reasons)


def _rope_hf(config: Mapping[str, Any]) -> Rope:
    """Both spellings: `rope_theta` + `rope_scaling`, and the newer `rope_parameters`."""
    scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(scaling.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if (scaling.get("partial_rotary_factor") or 1) != 1:
        raise ModelError("partial_rotary_factor is not supported")
    need = _Need(scaling, "rope_scaling")
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, "linear", need.number("factor"))
    if kind == "llama3":
        return Rope(
            theta,
            "llama3",
            need.number("factor"),
            need.number("low_freq_factor"),
            need.number("high_freq_factor"),
            need.count("original_max_position_embeddings"),
        )
    raise ModelError(f"rope scaling {kind!r} is not supported (default, linear, llama3 are)")


def _tokenizer_size(path: Path) -> int:
    """One more than the highest id in a tokenizer.json; 0 if there is none."""
    if not path.exists():
        return 0
    data = _read_json(path)
    vocab = data.get("model", {}).get("vocab") or {}
    highest = len(vocab) - 1 if isinstance(vocab, list) else max(vocab.values(), default=-1)
    added = [int(token["id"]) for token in data.get("added_tokens") or ()]
    return int(max(highest, *added, -1)) + 1


# ---------------------------------------------------------------- GGUF


def from_gguf(header: Header) -> ModelSpec:
    """The spec in a GGUF header. Raises ModelError as `from_hf` does."""
    family = family_of(header.architecture)
    _refuse_gguf(header)
    need = _Need(header.metadata, "GGUF metadata", header.architecture + ".")
    if "token_embd.weight" not in header.tensors:
        raise ModelError("the GGUF file has no tensor token_embd.weight")
    rows = header.tensors["token_embd.weight"].shape[0]
    heads, hidden = need.count("attention.head_count"), need.count("embedding_length")
    return ModelSpec(
        architecture=header.architecture,
        layers=need.count("block_count"),
        hidden=hidden,
        heads=heads,
        kv_heads=header.get("attention.head_count_kv") or heads,
        head_dim=header.get("attention.key_length") or hidden // heads,
        ffn=need.count("feed_forward_length"),
        vocab_rows=rows,
        vocab_size=min(_gguf_ids(header) or rows, rows),
        rope=_rope_gguf(header),
        norm_eps=need.number("attention.layer_norm_rms_epsilon"),
        tied="output.weight" not in header.tensors,
        qkv_bias=family.qkv_bias,
        max_positions=need.count("context_length"),
    )


def _refuse_gguf(header: Header) -> None:
    get = header.get
    per_layer = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
    lists = [key for key in per_layer if isinstance(get(key), list)]
    _refuse(header.architecture, {f"{key} for each layer": True for key in lists})
    heads = get("attention.head_count") or 1
    head_dim = get("attention.key_length") or (get("embedding_length") or 0) // heads
    window = get("attention.sliding_window") or 0
    _refuse(
        header.architecture,
        {
            f"sliding_window = {window}": 0 < window < (get("context_length") or 0),
            "experts": bool(get("expert_count")),
            "rotary embedding of a part of the head": (get("rope.dimension_count") or head_dim)
            != head_dim,
            "values shorter than keys": (get("attention.value_length") or head_dim) != head_dim,
        },
    )


def _rope_gguf(header: Header) -> Rope:
    theta = float(header.get("rope.freq_base") or 10000.0)
    kind = header.get("rope.scaling.type", "linear")  # llama.cpp's rule for files that do not say
    factor = header.get("rope.scaling.factor") or header.get("rope.scale_linear") or 1.0
    if kind not in ("none", "linear"):
        raise ModelError(f"rope scaling {kind!r} is not supported (none and linear are)")
    scaled = kind == "linear" and factor != 1.0
    if "rope_freqs.weight" in header.tensors:
        if scaled:
            raise ModelError("rope_freqs.weight together with linear rope scaling")
        return Rope(theta, "factors")
    return Rope(theta, "linear", float(factor)) if scaled else Rope(theta)


def _gguf_ids(header: Header) -> int:
    """Ids up to the last that is not padding; 0 if the file has no vocabulary."""
    kinds = header.metadata.get("tokenizer.ggml.token_type")
    size = len(header.metadata.get("tokenizer.ggml.tokens") or ())
    if kinds is None or len(kinds) != size:
        return size
    while size and kinds[size - 1] == _UNUSED_TOKEN:
        size -= 1
    return size


# ---------------------------------------------------------------- shared


class _Need:
    """Reads keys that must be there, of a sane type."""

    def __init__(self, data: Mapping[str, Any], where: str, prefix: str = "") -> None:
        self.data, self.where, self.prefix = data, where, prefix

    def number(self, key: str) -> float:
        value = self.data.get(self.prefix + key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelError(f"{self.where}: {self.prefix}{key} = {value!r}, a number is needed")
        return float(value)

    def count(self, key: str) -> int:
        value = self.number(key)
        if value != int(value) or value < 1:
            raise ModelError(f"{self.where}: {self.prefix}{key} = {value!r}, a count is needed")
        return int(value)


def _refuse(architecture: str, reasons: Mapping[str, bool]) -> None:
    found = [name for name, present in reasons.items() if present]
    if found:
        raise ModelError(f"{architecture} with {', '.join(found)} is not supported")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise ModelError(f"{path} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return data
