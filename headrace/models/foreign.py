"""Decoders that have no file here: the layers are those of transformers (an optional package), the
paged KV cache, the batches and the attention are ours; see `models.foreign_decoder`.

Slower than a family of our own: nothing is fused, and every step goes through transformers' Python.
What its attention interface does not say is refused, by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from headrace.errors import HeadraceError, ModelError
from headrace.models.need import refuse
from headrace.models.slots import Slot
from headrace.models.spec import LayerSpec, ModelSpec, Rope
from headrace.sources.gguf import Header

if TYPE_CHECKING:
    import torch

    from headrace.models.layers import Decoder

_NEEDED = (
    "num_attention_heads", "hidden_size", "vocab_size", "num_hidden_layers",
    "max_position_embeddings",
)  # fmt: skip
_NO_JSON = ("Infinity", "-Infinity", "NaN")
_BY_LENGTH = {"dynamic", "longrope"}  # rotary frequencies that one step's sequences cannot share


def from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """See `registry.ModelModule`."""
    from transformers import CONFIG_MAPPING

    config = _floats(config)
    name = str(config["architectures"][0])
    kind = config.get("model_type")
    if kind not in CONFIG_MAPPING:
        raise ModelError(f"{name}: transformers knows no model_type {kind!r}")
    with theirs(name):
        known = CONFIG_MAPPING[kind].from_dict(dict(config))
    layer_types = list(getattr(known, "layer_types", None) or [])
    other = sorted(set(layer_types) - {"full_attention", "sliding_attention"})
    encodes = _encodes(str(kind), type(known))
    window = int(getattr(known, "sliding_window", None) or 0)
    sliding = [kind == "sliding_attention" for kind in layer_types]
    rotary = sorted(set(_values(config, ("rope_type", "type"))) & _BY_LENGTH)
    refuse(
        name,
        {
            "quantization_config": bool(config.get("quantization_config")),
            "an encoder": bool(getattr(known, "is_encoder_decoder", False)) or encodes,
            f"layers of type {', '.join(other)}": bool(other),
            f"rotary frequencies of type {', '.join(rotary)}": bool(rotary),
            "sliding layers and no sliding_window": any(sliding) and not window,
            "attention in chunks": bool(getattr(known, "attention_chunk_size", None)),
        },
    )
    need: dict[str, Any] = {key: getattr(known, key, None) for key in _NEEDED}
    if lacks := [key for key, value in need.items() if type(value) is not int]:
        raise ModelError(f"{name}: its config has no {', '.join(lacks)}")
    heads, hidden, rows = (need[key] for key in _NEEDED[:3])
    return ModelSpec(
        architecture=name,
        layers=need["num_hidden_layers"],
        hidden=hidden,
        heads=heads,
        kv_heads=int(getattr(known, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(known, "head_dim", None) or hidden // heads),
        ffn=int(getattr(known, "intermediate_size", None) or 4 * hidden),
        vocab_rows=rows,
        vocab_size=rows,
        rope=Rope(),
        norm_eps=0.0,
        tied=bool(known.tie_word_embeddings),
        qkv_bias=False,
        max_positions=need["max_position_embeddings"],
        dtype=str(config.get("dtype") or config.get("torch_dtype") or ""),
        kinds=tuple(LayerSpec(window=window if one else 0) for one in sliding),
        foreign=json.dumps(dict(config)),
    )


def _floats(value: Any) -> Any:
    """transformers 5 writes numbers that JSON has not as {"__float__": "Infinity"}."""
    if isinstance(value, Mapping):
        if value.keys() == {"__float__"} and value["__float__"] in _NO_JSON:
            return float(value["__float__"])
        return {key: _floats(one) for key, one in value.items()}
    return [_floats(one) for one in value] if isinstance(value, list) else value


def _encodes(kind: str, config: type) -> bool:
    """BERT and its like look both ways or count positions from elsewhere. What the config's text
    says does not count: transformers 4 writes is_decoder and add_cross_attention of any model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    asked = hasattr(config, "is_decoder") and hasattr(config, "add_cross_attention")
    return asked or kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES


@contextmanager
def theirs(name: str) -> Iterator[None]:
    """Around code of transformers: what it raises becomes a ModelError that says so."""
    try:
        yield
    except HeadraceError:
        raise
    except Exception as error:
        said = " ".join(str(error).split())
        raise ModelError(f"{name}: transformers says {type(error).__name__}: {said}") from error


def _values(config: Mapping[str, Any], keys: tuple[str, ...]) -> Iterator[str]:
    """Texts under one of `keys`, however deep."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _values(value, keys)
        elif key in keys and isinstance(value, str):
            yield value


def from_gguf(header: Header) -> ModelSpec:
    """See `registry.ModelModule`."""
    raise AssertionError(f"{header.architecture}: transformers' names are no names of GGUF files")


def slots(spec: ModelSpec) -> list[Slot]:
    """A slot for each parameter; checkpoints name them as transformers does."""
    import torch

    from headrace.models.foreign_decoder import ForeignDecoder

    with torch.device("meta"):
        decoder = ForeignDecoder(spec, torch.float32)
    return [
        Slot(name, decoder.stored_name(name), "", tuple(parameter.shape), dummy=_dummy(name))
        for name, parameter in decoder.named_parameters()
    ]


def _dummy(name: str) -> Any:
    return "ones" if "norm" in name and name.endswith(".weight") else "normal"


def build(spec: ModelSpec, dtype: torch.dtype) -> Decoder:
    """See `registry.ModelModule`."""
    from headrace.models.foreign_decoder import ForeignDecoder

    return ForeignDecoder(spec, dtype)
