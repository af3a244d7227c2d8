"""gpt-oss: sinks, a window in every second layer, a mixture whose experts have biases.

Checkpoints hold the experts in MXFP4 or in bfloat16; either way gate and up are neighbouring rows.
"""

from __future__ import annotations

from typing import Any

from headrace.models import hf
from headrace.models.llama import decoder_slots, matrix
from headrace.models.need import Need, refuse
from headrace.models.qwen3_moe import build, from_gguf
from headrace.models.slots import Derived, Slot
from headrace.models.spec import CLAMP, CLAMP_SLOPE, Experts, LayerSpec, ModelSpec

__all__ = ["build", "derived", "from_gguf", "from_hf", "slots"]

# What configs leave out, for it is their class's default.
_DEFAULTS: dict[str, Any] = {
    "sliding_window": 128, "rope_theta": 150000.0, "head_dim": 64, "num_key_value_heads": 8,
}  # fmt: skip
_YARN: dict[str, Any] = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def from_hf(config: hf.Config) -> ModelSpec:
    """See `registry.ModelModule`."""
    name, need = hf.architecture(config), Need(config, "config.json")
    packed = config.get("quantization_config") or {}
    limit, alpha = config.get("swiglu_limit", CLAMP), config.get("swiglu_alpha", CLAMP_SLOPE)
    refuse(
        name,
        {
            f"quantization {packed.get('quant_method')}": packed.get("quant_method", "mxfp4")
            != "mxfp4",
            f"swiglu_limit = {limit}": limit != CLAMP,
            f"swiglu_alpha = {alpha}": alpha != CLAMP_SLOPE,
        },
    )
    config = _DEFAULTS | dict(config) | {"quantization_config": None}
    if not config.get("rope_scaling") and not config.get("rope_parameters"):
        config["rope_scaling"] = _YARN
    fields = hf.decoder_fields(config)
    sliding = [i % 2 == 0 for i in range(fields["layers"])]
    windows = hf.windows(config, sliding, config.get("sliding_window"), fields["max_positions"])
    kinds = windows or (LayerSpec(),) * fields["layers"]
    experts = Experts(
        count=need.count("num_local_experts"),
        chosen=need.count("num_experts_per_tok"),
        ffn=fields["ffn"],
        biases=True,
    )
    more = {
        "experts": experts,
        "kinds": tuple(LayerSpec(mlp="experts", window=kind.window) for kind in kinds),
        "act": "clamped",
        "sinks": True,
        "qkv_bias": bool(config.get("attention_bias", True)),
        "out_bias": bool(config.get("attention_bias", True)),
    }
    return ModelSpec(**fields | more)


def slots(spec: ModelSpec) -> list[Slot]:
    """Every tensor of the checkpoint; those of `derived` are made of others."""
    experts = spec.experts
    assert experts is not None, "read by from_hf"
    found = [slot for slot in decoder_slots(spec) if ".ffn." not in slot.parameter]
    rows, hidden = 2 * experts.ffn, spec.hidden
    order = (*range(0, rows, 2), *range(1, rows, 2))  # stored as gate, up, gate, up, ...
    for layer in range(spec.layers):
        ours, theirs = f"blocks.{layer}.routed.", f"model.layers.{layer}.mlp."
        found += matrix(f"{ours}router", f"{theirs}router", "", (experts.count, hidden), bias=True)
        theirs += "experts."
        up, down = (experts.count * rows, hidden), (experts.count * hidden, experts.ffn)
        heads = (0, experts.count, order)
        found += [
            Slot(f"{ours}gate_up", f"{theirs}gate_up_proj", "", up, *heads),
            Slot(f"{ours}gate_up_bias", f"{theirs}gate_up_proj_bias", "", up[:1], *heads),
            Slot(f"{ours}down", f"{theirs}down_proj", "", down),
            Slot(f"{ours}down_bias", f"{theirs}down_proj_bias", "", down[:1]),
        ]
        sinks = f"model.layers.{layer}.self_attn.sinks"
        found.append(Slot(f"blocks.{layer}.attention.sinks", sinks, "", (spec.heads,)))
    return found


def derived(spec: ModelSpec) -> list[Derived]:
    """Experts one after another, as rows."""
    experts = spec.experts
    assert experts is not None, "read by from_hf"
    found = []
    for layer in range(spec.layers):
        theirs = f"model.layers.{layer}.mlp.experts."
        for name, rows, columns in (
            ("gate_up_proj", 2 * experts.ffn, spec.hidden),
            ("down_proj", spec.hidden, experts.ffn),
        ):
            whole = theirs + name
            shape = (experts.count * rows, columns)
            found.append(Derived(whole, whole, shape, "mxfp4"))
            found.append(Derived(f"{whole}_bias", f"{whole}_bias", shape[:1], "flat"))
    return found
