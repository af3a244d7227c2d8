"""What `headrace inspect` tells of a model: its shape, its sizes, what fits where, its tokenizer.

Nothing of it reads weights: a folder with config.json alone will do.
"""

from __future__ import annotations

import msgspec

from headrace.models.features import features
from headrace.models.kv_layout import layout_of
from headrace.models.sizes import (
    WEIGHT_BYTES,
    KvGroup,
    Parameters,
    kv_groups,
    kv_layer_bytes,
    parameters,
)
from headrace.models.spec import ModelSpec, read_spec
from headrace.sources.files import ModelFiles
from headrace.text.survey import Survey, survey
from headrace.text.tokenizer import load_tokenizer

_KV_ELEMENT_BYTES = 2  # bfloat16


class Fit(msgspec.Struct, frozen=True):
    """Weights of one kind in some memory, and what is left for K and V in bfloat16.

    Activations are not counted: they depend on the largest step, and `serve` prints them.
    """

    weights: str  # a key of WEIGHT_BYTES, or `as stored`
    weight_bytes: int
    kv_bytes: int  # left for the KV cache; negative = the weights alone are too large
    tokens: int  # kept in every layer
    sequences: int  # of `context` tokens each; layers with a window keep that alone


class Inspection(msgspec.Struct, frozen=True):
    """Sizes in bytes and tokens; a KV cache in bfloat16."""

    name: str
    path: str
    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    positions: int
    features: list[str]  # beyond a plain decoder
    parameters: Parameters
    stored_bytes: int  # of the weight files; 0 = there are none here
    kv_bytes_per_token: int
    kv_groups: list[KvGroup]
    context: int  # tokens of one sequence, for `fits`
    fits: list[Fit]
    tokenizer: Survey | None  # None: the model has none


def inspect(files: ModelFiles, memory_bytes: int = 0, context: int = 0) -> Inspection:
    """`memory_bytes`: 0 = no `fits`. `context`: tokens of a sequence, 0 = the model's positions.

    Raises ModelError for a model that cannot be read or run.
    """
    spec = read_spec(files)
    counts, stored = parameters(spec), stored_bytes(files)
    groups = kv_groups(spec, _KV_ELEMENT_BYTES)
    per_token = sum(group.bytes_per_token for group in groups)
    context = context or spec.max_positions
    sizes = {kind: counts.weight_bytes(kind) for kind in WEIGHT_BYTES}
    if stored:
        sizes = {"as stored": stored, **sizes}
    return Inspection(
        name=files.name,
        path=str(files.path),
        architecture=spec.architecture,
        layers=spec.layers,
        hidden=spec.hidden,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        positions=spec.max_positions,
        features=list(features(spec)),
        parameters=counts,
        stored_bytes=stored,
        kv_bytes_per_token=per_token,
        kv_groups=groups,
        context=context,
        fits=[_fit(spec, kind, size, memory_bytes, context) for kind, size in sizes.items()]
        if memory_bytes
        else [],
        tokenizer=_survey(files),
    )


def _fit(spec: ModelSpec, kind: str, weight_bytes: int, memory_bytes: int, context: int) -> Fit:
    left = memory_bytes - weight_bytes
    room, layout = max(0, left), layout_of(spec)
    layer_bytes = kv_layer_bytes(spec, _KV_ELEMENT_BYTES)
    tokens, sequences = (room // layout.kept_bytes(layer_bytes, n) for n in (1, context))
    return Fit(kind, weight_bytes, left, tokens, sequences)


def stored_bytes(files: ModelFiles) -> int:
    """Of the files that hold weights, headers included."""
    if files.kind == "gguf":
        return files.path.stat().st_size
    return sum(path.stat().st_size for path in files.path.glob("*.safetensors"))


def _survey(files: ModelFiles) -> Survey | None:
    tokenizer = load_tokenizer(files, optional=True)
    return survey(tokenizer) if tokenizer.vocab_size else None
