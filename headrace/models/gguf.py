"""What the families' configs share in GGUF files. No torch."""

from __future__ import annotations

import math
from typing import Any

from headrace.errors import ModelError
from headrace.models.need import Need, refuse
from headrace.models.spec import Rope
from headrace.sources.gguf import Header

_UNUSED_TOKEN = 5  # tokenizer.ggml.token_type of entries that only pad the vocabulary


def decoder_fields(header: Header) -> dict[str, Any]:
    """Fields of ModelSpec under the keys that most families use. Raises ModelError for keys that
    are missing, and for what no family here computes."""
    _refuse(header)
    need = need_of(header)
    if "token_embd.weight" not in header.tensors:
        raise ModelError("the GGUF file has no tensor token_embd.weight")
    rows = header.tensors["token_embd.weight"].shape[0]
    heads, hidden = need.count("attention.head_count"), need.count("embedding_length")
    head_dim = header.get("attention.key_length") or hidden // heads
    return {
        "architecture": header.architecture,
        "layers": need.count("block_count"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": header.get("attention.head_count_kv") or heads,
        "head_dim": head_dim,
        "ffn": need.count("feed_forward_length"),
        "vocab_rows": rows,
        "vocab_size": min(known_ids(header) or rows, rows),
        "rope": rope_of(header, head_dim),
        "norm_eps": need.number("attention.layer_norm_rms_epsilon"),
        "tied": "output.weight" not in header.tensors,
        "qkv_bias": False,
        "max_positions": need.count("context_length"),
    }


def need_of(header: Header) -> Need:
    """Metadata `<architecture>.<key>` that must be there."""
    return Need(header.metadata, "GGUF metadata", header.architecture + ".")


def _refuse(header: Header) -> None:
    get = header.get
    per_layer = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
    lists = [key for key in per_layer if isinstance(get(key), list)]
    refuse(header.architecture, {f"{key} for each layer": True for key in lists})
    heads = get("attention.head_count") or 1
    head_dim = get("attention.key_length") or (get("embedding_length") or 0) // heads
    refuse(
        header.architecture,
        {"values shorter than keys": (get("attention.value_length") or head_dim) != head_dim},
    )


def rope_of(header: Header, head_dim: int) -> Rope:
    """The rotary embedding; llama.cpp's rules for files that do not say."""
    theta = float(header.get("rope.freq_base") or 10000.0)
    dims = header.get("rope.dimension_count") or head_dim
    if not 0 < dims <= head_dim or dims % 2:
        raise ModelError(f"rope.dimension_count = {dims} of a head of {head_dim}")
    part_dims = dims if dims < head_dim else 0
    kind = header.get("rope.scaling.type", "linear")
    factor = float(header.get("rope.scaling.factor") or header.get("rope.scale_linear") or 1.0)
    if kind not in ("none", "linear", "yarn"):
        raise ModelError(f"rope scaling {kind!r} is not supported (none, linear and yarn are)")
    scaled = kind != "none" and factor != 1.0
    if "rope_freqs.weight" in header.tensors:
        if scaled:
            raise ModelError(f"rope_freqs.weight together with {kind} rope scaling")
        return Rope(theta, "factors", dims=part_dims)
    if not scaled:
        return Rope(theta, dims=part_dims)
    if kind == "linear":
        return Rope(theta, "linear", factor, dims=part_dims)
    refuse(header.architecture, {"rope.scaling.yarn_ext_factor": _set(header, "yarn_ext_factor")})
    refuse(header.architecture, {"rope.scaling.yarn_attn_factor": _set(header, "yarn_attn_factor")})
    magnitude = float(header.get("rope.scaling.attn_factor") or 1.0)
    return Rope(
        theta,
        "yarn",
        factor,
        original_positions=int(
            header.get("rope.scaling.original_context_length")
            or need_of(header).count("context_length")
        ),
        magnitude=magnitude * (1.0 + 0.1 * math.log(factor)),
        fast=float(header.get("rope.scaling.yarn_beta_fast") or 32.0),
        slow=float(header.get("rope.scaling.yarn_beta_slow") or 1.0),
        dims=part_dims,
    )


def _set(header: Header, key: str) -> bool:
    """Whether a factor that files rarely have is there and changes something."""
    return bool(header.get(f"rope.scaling.{key}", 1.0) != 1.0)


def known_ids(header: Header) -> int:
    """Ids up to the last that is not padding; 0 if the file has no vocabulary."""
    kinds = header.metadata.get("tokenizer.ggml.token_type")
    size = len(header.metadata.get("tokenizer.ggml.tokens") or ())
    if kinds is None or len(kinds) != size:
        return size
    while size and kinds[size - 1] == _UNUSED_TOKEN:
        size -= 1
    return size
