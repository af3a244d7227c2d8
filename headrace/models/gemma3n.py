"""Gemma 3n (text): several streams (AltUp), a learned residual (LAuReL), a vector of its own for
each token and layer, K and V shared by the upper layers, sparse activations in the lower ones.

The table of those vectors is most of the model and little of its arithmetic: it stays in slower
memory, the checkpoint's map where that serves, and a step gathers the rows of its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.errors import ModelError
from headrace.models import hf
from headrace.models.gemma import local_kinds, ropes_of, text_of
from headrace.models.llama import decoder_slots, matrix, norm_slot
from headrace.models.need import Need, refuse
from headrace.models.slots import Slot
from headrace.models.spec import AltUp, LayerSpec, ModelSpec
from headrace.sources.gguf import Header

if TYPE_CHECKING:
    import torch

    from headrace.models.layers import Decoder

# What configs leave out, for it is their class's default.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262400, "hidden_size": 2048, "num_hidden_layers": 35, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 256, "intermediate_size": 16384,
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "sliding_window": 512,
    "final_logit_softcapping": 30.0, "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256, "altup_active_idx": 0, "altup_num_inputs": 4,
    "num_kv_shared_layers": 15, "laurel_rank": 64, "rope_theta": 1e6, "tie_word_embeddings": True,
}  # fmt: skip
_SPARSE_LAYERS, _SPARSITY = 10, 0.95  # where the config does not say


def from_hf(config: hf.Config) -> ModelSpec:
    """See `registry.ModelModule`."""
    text = text_of(config, _DEFAULTS)
    layers = Need(text, "config.json").count("num_hidden_layers")
    rope, local = ropes_of(text)
    widths = text["intermediate_size"]
    widths = [widths] * layers if isinstance(widths, int) else widths
    _refuse_others(text, layers, widths)
    refuse(hf.architecture(text), {"attention_bias": bool(text.get("attention_bias"))})
    act = hf.act_of(text, "hidden_activation", "gelu_pytorch_tanh")
    fields = hf.decoder_fields(text | {"rope_scaling": rope, "intermediate_size": widths[0]})
    sliding = hf.sliding_layers(text, [bool((i + 1) % 5) for i in range(layers)])
    windows = hf.windows(text, sliding, text["sliding_window"], fields["max_positions"])
    kinds = local_kinds(sliding, windows, 1.0)
    kinds = tuple(
        msgspec.structs.replace(kind, ffn=width, sparsity=share)
        for kind, width, share in zip(kinds, widths, _sparsity(text, layers), strict=True)
    )
    more = {
        "norm": "rms_wide", "act": act, "post_norms": True, "qk_norm": True, "v_norm": True,
        "embed_scale": fields["hidden"] ** 0.5, "local_rope": local,
        "logit_softcap": float(text.get("final_logit_softcapping") or 0.0),
        "kinds": _shared(kinds, sliding, int(text["num_kv_shared_layers"])),
        "altup": _altup(text),
    }  # fmt: skip
    return ModelSpec(**fields | more)


def _refuse_others(text: dict[str, Any], layers: int, widths: Any) -> None:
    """Raises ModelError for lists that are not of all layers."""
    sparsity = text.get("activation_sparsity_pattern")
    for key, found in (("intermediate_size", widths), ("activation_sparsity_pattern", sparsity)):
        if isinstance(found, list) and len(found) != layers:
            raise ModelError(f"{key} of {len(found)} layers and num_hidden_layers = {layers}")


def _sparsity(text: dict[str, Any], layers: int) -> list[float]:
    sparsity = text.get("activation_sparsity_pattern")
    if sparsity is None:
        sparse = _SPARSE_LAYERS if layers > _SPARSE_LAYERS else 0
        sparsity = [_SPARSITY] * sparse + [0.0] * (layers - sparse)
    if isinstance(sparsity, int | float):
        sparsity = [sparsity] * layers
    return list(map(float, sparsity))


def _altup(text: dict[str, Any]) -> AltUp:
    need, active = Need(text, "config.json"), int(text["altup_active_idx"])
    streams = need.count("altup_num_inputs")
    if active >= streams:
        raise ModelError(f"altup_active_idx = {active} of altup_num_inputs = {streams}")
    return AltUp(
        streams=streams,
        active=active,
        scaled=bool(text.get("altup_correct_scale", True)),
        laurel_rank=need.count("laurel_rank"),
        layer_width=need.count("hidden_size_per_layer_input"),
        layer_rows=need.count("vocab_size_per_layer_input"),
    )


def _shared(
    kinds: tuple[LayerSpec, ...], sliding: Sequence[bool], shared: int
) -> tuple[LayerSpec, ...]:
    """The last `shared` layers read K and V of the last one before them of their kind."""
    first = len(kinds) - shared
    found = []
    for i, kind in enumerate(kinds):
        owners = [j for j in range(first) if sliding[j] == sliding[i]]
        if i >= first and not owners:
            raise ModelError(f"layer {i} shares K and V, and no layer of its kind has any")
        kv_from = owners[-1] if i >= first else -1
        found.append(msgspec.structs.replace(kind, kv_from=kv_from))
    return tuple(found)


def from_gguf(header: Header) -> ModelSpec:
    """See `registry.ModelModule`. Raises ModelError: such files are not read yet."""
    raise ModelError(f"{header.architecture} is not read from GGUF files; Hugging Face folders are")


def slots(spec: ModelSpec) -> list[Slot]:
    """Every tensor of a Hugging Face checkpoint."""
    altup, hidden = spec.altup, spec.hidden
    assert altup is not None, "a spec of this family"
    width = spec.layers * altup.layer_width
    table = "model.embed_tokens_per_layer.weight"
    found = decoder_slots(spec)
    found.append(Slot("layer_table.weight", table, "", (altup.layer_rows, width), mapped=True))
    found += matrix("layer_projection", "model.per_layer_model_projection", "", (width, hidden))
    name = "model.per_layer_projection_norm"
    found.append(norm_slot("layer_norm", name, "", altup.layer_width))
    for i in range(altup.streams - 1):
        for ours, theirs in (("spread", "projections"), ("gather", "unembed_projections")):
            square = (hidden, hidden)
            found += matrix(f"{ours}.{i}", f"model.altup_{theirs}.{i}", "", square)
    for i in range(spec.layers):
        found += _layer_slots(spec, altup, i)
    return found


def _layer_slots(spec: ModelSpec, altup: AltUp, layer: int) -> list[Slot]:
    ours, theirs = f"blocks.{layer}.", f"model.layers.{layer}."
    hidden, streams = spec.hidden, altup.streams
    scale = Slot(f"{ours}scale", f"{theirs}altup.correct_output_scale", "", (hidden,), dummy="ones")
    found = [scale]
    for our, their, shape in (
        ("corrections", "altup.correction_coefs", (streams, streams)),
        ("predictions", "altup.prediction_coefs", (streams**2, streams)),
        ("router", "altup.modality_router", (streams, hidden)),
        ("laurel_left", "laurel.linear_left", (altup.laurel_rank, hidden)),
        ("laurel_right", "laurel.linear_right", (hidden, altup.laurel_rank)),
        ("layer_gate", "per_layer_input_gate", (altup.layer_width, hidden)),
        ("layer_out", "per_layer_projection", (hidden, altup.layer_width)),
    ):
        found += matrix(ours + our, theirs + their, "", shape)
    for our, their in (
        ("router_norm", "altup.router_norm"),
        ("laurel_norm", "laurel.post_laurel_norm"),
        ("layer_norm", "post_per_layer_input_norm"),
    ):
        found.append(norm_slot(ours + our, theirs + their, "", hidden))
    if spec.layer(layer).kv_from >= 0:  # stored for nobody
        for name in ("k_proj", "v_proj", "k_norm"):
            found.append(Slot("", f"{theirs}self_attn.{name}.weight", "", ()))
    return found


def build(spec: ModelSpec, dtype: torch.dtype) -> Decoder:
    """The model with unset parameters."""
    from headrace.models.altup import AltUpDecoder

    return AltUpDecoder(spec, dtype)
