"""What Hugging Face configs say of the rotary embedding. No torch.

Both spellings are read: `rope_theta` + `rope_scaling`, and the newer `rope_parameters`. Where a
config has both, `rope_scaling` counts, as in transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.errors import ModelError
from headrace.models.need import Need
from headrace.models.spec import Rope

_ORIGINAL = "original_max_position_embeddings"


def scaling_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The mapping that says how positions are scaled, without its nulls. Raises ModelError for one
    for each type of layers."""
    found = config.get("rope_scaling") or config.get("rope_parameters") or {}
    nested = [key for key, value in found.items() if isinstance(value, Mapping)]
    if nested:
        raise ModelError(f"config.json: rope_parameters for {', '.join(nested)} each")
    return {key: value for key, value in found.items() if value is not None}


def kind_of(scaling: Mapping[str, Any]) -> str:
    """The name of the kind, in either spelling."""
    return str(scaling.get("rope_type", scaling.get("type", "default")))


def rope_of(config: Mapping[str, Any], head_dim: int) -> tuple[Rope, int]:
    """The rotary embedding, and the positions that it makes of `max_position_embeddings`.

    Raises ModelError for what `Rope` has no kind for, and for numbers that make none.
    """
    scaling = scaling_of(config)
    need = Need(scaling, "rope_scaling")
    positions = Need(config, "config.json").count("max_position_embeddings")
    theta = need.number("rope_theta", config.get("rope_theta", 10000.0))
    if theta <= 1:
        raise ModelError(f"rope_theta = {theta:g}: a number above 1 is needed")
    kind, dims = kind_of(scaling), _dims(config, need, head_dim)
    plain = Rope(theta, dims=dims if dims < head_dim else 0)
    if kind == "default":
        return plain, positions
    if kind == "linear":
        return _changed(plain, kind="linear", factor=need.above_0("factor")), positions
    if kind == "dynamic":
        if dims < 4:
            raise ModelError(f"rope scaling 'dynamic' of {dims} numbers of a head")
        factor = need.above_0("factor")
        rope = _changed(plain, kind="dynamic", factor=factor, original_positions=positions)
        return rope, int(positions * factor)
    original = _original(config, scaling, positions)
    if kind == "llama3":
        return _llama3(plain, need, original), positions
    if kind == "yarn":
        return _yarn(plain, need, original, positions)
    if kind == "longrope":
        return _longrope(plain, need, original, positions, dims), positions
    raise ModelError(
        f"rope scaling {kind!r} is not supported "
        "(default, linear, dynamic, llama3, yarn and longrope are)"
    )


def _changed(rope: Rope, **fields: Any) -> Rope:
    return msgspec.structs.replace(rope, **fields)


def _dims(config: Mapping[str, Any], need: Need, head_dim: int) -> int:
    """How many numbers of a head turn."""
    part = need.number("partial_rotary_factor", config.get("partial_rotary_factor") or 1.0)
    dims = int(head_dim * part)
    if part == 1 and dims % 2:
        raise ModelError(f"head_dim = {head_dim}: rotary embedding needs an even number")
    if not 0 < dims <= head_dim or dims % 2:
        raise ModelError(f"partial_rotary_factor = {part:g} of head_dim = {head_dim}")
    return dims


def _original(config: Mapping[str, Any], scaling: Mapping[str, Any], positions: int) -> int:
    """Positions of the training before the context was extended; Phi-3 says it outside."""
    if config.get(_ORIGINAL) is not None:
        return Need(config, "config.json").count(_ORIGINAL)
    return Need(scaling, "rope_scaling").count(_ORIGINAL) if _ORIGINAL in scaling else positions


def _llama3(plain: Rope, need: Need, original: int) -> Rope:
    low, high = need.number("low_freq_factor"), need.number("high_freq_factor")
    if not 0 < low < high:
        raise ModelError(f"rope_scaling: low_freq_factor = {low:g}, high_freq_factor = {high:g}")
    return _changed(
        plain,
        kind="llama3",
        factor=need.above_0("factor"),
        low_freq=low,
        high_freq=high,
        original_positions=original,
    )


def _yarn(plain: Rope, need: Need, original: int, positions: int) -> tuple[Rope, int]:
    """https://arxiv.org/abs/2309.00071; the magnitude is its equation 22, or DeepSeek's quotient
    of two."""
    factor = need.above_0("factor", positions / original)
    mscale, mscale_all = need.number("mscale", 0.0), need.number("mscale_all_dim", 0.0)
    usual = magnitude_of(factor, 1.0)
    if mscale and mscale_all:
        usual = magnitude_of(factor, mscale) / magnitude_of(factor, mscale_all)
    rope = _changed(
        plain,
        kind="yarn",
        factor=factor,
        original_positions=original,
        magnitude=need.number("attention_factor", usual),
        fast=need.number("beta_fast", 0.0) or 32.0,
        slow=need.number("beta_slow", 0.0) or 1.0,
        truncate=bool(need.data.get("truncate", True)),
    )
    return rope, max(positions, int(original * factor))


def magnitude_of(factor: float, mscale: float) -> float:
    """What YaRN multiplies cos and sin by."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope(plain: Rope, need: Need, original: int, positions: int, dims: int) -> Rope:
    """https://arxiv.org/abs/2402.13753; the magnitude as Phi-3's code has it."""
    factor = need.above_0("factor", positions / original)
    grown = factor > 1 and original > 1
    usual = math.sqrt(1 + math.log(factor) / math.log(original)) if grown else 1.0
    lists = {key: need.numbers(key) for key in ("short_factor", "long_factor")}
    for key, numbers in lists.items():
        if len(numbers) != dims // 2 or min(numbers) <= 0:
            raise ModelError(
                f"rope_scaling: {key} has {len(numbers)} numbers, {dims // 2} above 0 are needed"
            )
    return _changed(
        plain,
        kind="longrope",
        factor=factor,
        original_positions=original,
        magnitude=need.number("attention_factor", usual),
        short=lists["short_factor"],
        long=lists["long_factor"],
    )
