"""Where the memory goes, and what the runner's `auto` settings come to, each with a reason."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

import msgspec

from headrace.backends.cpu import device
from headrace.config import Resolved, Settings, parse_bytes
from headrace.errors import ConfigError
from headrace.models.sizes import kv_groups
from headrace.models.spec import ModelSpec

if TYPE_CHECKING:
    import torch

_SAMPLER_COPIES = 4  # float64 copies of the logits while stages run
_SCALE_BYTES = 4
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
_GIB, _MIB = 2**30, 2**20


class Line(msgspec.Struct, frozen=True):
    """One line of the ledger, for the start-up print."""

    what: str
    size_bytes: int
    note: str

    def __str__(self) -> str:
        return f"{self.what:13} {show_bytes(self.size_bytes):>10}  {self.note}"


def show_bytes(n: int) -> str:
    """`1.50 GiB` or `12.3 MiB`."""
    return f"{n / _GIB:.2f} GiB" if n >= _GIB else f"{n / _MIB:.1f} MiB"


def weights_line(parameters: Iterable[torch.Tensor]) -> Line:
    """The line of a model whose parameters are tensors."""
    sizes = [(p.numel(), p.element_size()) for p in parameters]
    count = sum(numel for numel, _ in sizes)
    size_bytes = sum(numel * element for numel, element in sizes)
    return Line("weights", size_bytes, f"{count / 1e6:.1f} M parameters")


def resolve_dtype(
    settings: Settings, stored: Collection[str], flags: frozenset[str]
) -> Resolved[str]:
    """The type of weights, activations and KV, by torch's name.

    `stored`: types of the checkpoint's matrices; `flags`: of the processor. Nothing is measured.
    """
    native = device.native_bfloat16(flags)
    if settings.dtype == "bfloat16" and not native:
        return Resolved("bfloat16", "asked for; this processor emulates it, expect it slow")
    if settings.dtype != "auto":
        return Resolved(settings.dtype, "asked for")
    if not native:
        return Resolved("float32", "the processor has no native bfloat16")
    if set(stored) == {"float32"}:
        return Resolved("float32", "the checkpoint is float32")
    return Resolved("bfloat16", f"the processor has {native}")


def resolve_gpu_dtype(settings: Settings, stored: Collection[str]) -> Resolved[str]:
    """The same on a GPU: half the bytes is half the time."""
    if settings.dtype != "auto":
        return Resolved(settings.dtype, "asked for")
    if set(stored) == {"float16"}:
        return Resolved("float16", "the checkpoint is float16")
    if set(stored) <= {"bfloat16"}:
        return Resolved("bfloat16", "the checkpoint is bfloat16")
    kinds = ", ".join(sorted(stored))
    return Resolved("bfloat16", f"the checkpoint is {kinds}; a step reads half of float32's bytes")


def kv_bytes_per_token(spec: ModelSpec, dtype: str) -> int:
    """K and V of one token in every layer; int8 has a float32 scale for each token and head."""
    scale_bytes = _SCALE_BYTES if dtype == "int8" else 0
    return sum(group.bytes_per_token for group in kv_groups(spec, ITEM_BYTES[dtype], scale_bytes))


def wanted_model_len(settings: Settings, spec: ModelSpec) -> Resolved[int]:
    """Tokens of one sequence before the KV cache has its say.

    Raises ConfigError if the setting exceeds the model's positions.
    """
    if settings.max_model_len > spec.max_positions:
        raise ConfigError(
            f"max_model_len = {settings.max_model_len}: the model has {spec.max_positions} "
            "positions",
            param="max_model_len",
        )
    if settings.max_model_len:
        return Resolved(settings.max_model_len, "asked for")
    return Resolved(spec.max_positions, "the model's positions")


def size_kv(settings: Settings, spec: ModelSpec, dtype: str, free_bytes: int) -> Resolved[int]:
    """Blocks of the KV cache.

    Raises ConfigError if the memory given does not hold one block.
    """
    if settings.kv_blocks:
        return Resolved(settings.kv_blocks, "asked for")
    block_bytes = kv_bytes_per_token(spec, dtype) * settings.block_size
    if settings.kv_memory:
        key, budget = "kv_memory", parse_bytes(settings.kv_memory, "kv_memory")
        reason = f"kv_memory = {settings.kv_memory}"
    else:
        key, budget = "kv_blocks", free_bytes // device.KV_SHARE
        reason = f"a quarter of {show_bytes(free_bytes)} free"
    blocks = budget // block_bytes
    if blocks < 1:
        raise ConfigError(
            f"{reason} holds no KV block of {show_bytes(block_bytes)} ({settings.block_size} "
            "tokens)",
            param=key,
        )
    if not settings.kv_memory:
        longest = wanted_model_len(settings, spec).value
        # One spare block a row: an overlapped step may run past the last token.
        usable = settings.max_num_seqs * (-(-longest // settings.block_size) + 1)
        if usable < blocks:
            return Resolved(usable, f"all that {settings.max_num_seqs} sequences can fill")
    return Resolved(blocks, reason)


def fit_model_len(wanted: Resolved[int], kv_blocks: int, block_size: int) -> Resolved[int]:
    """`wanted`, or less if the whole KV cache holds less."""
    room = kv_blocks * block_size
    return wanted if wanted.value <= room else Resolved(room, "the KV cache holds no more")


def activation_bytes(settings: Settings, spec: ModelSpec, dtype: str, longest: int) -> int:
    """An estimate of what one step needs at its peak beside weights and KV cache.

    One layer's activations, gathered K and V, a prefill mask, and the logits in the sampler.
    """
    tokens = settings.max_num_batched_tokens
    qkv = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
    item_bytes = ITEM_BYTES[dtype]
    layer = tokens * (4 * spec.hidden + 3 * qkv + 4 * spec.ffn) * item_bytes
    gathered = 2 * longest * spec.kv_heads * spec.head_dim * item_bytes
    mask = tokens * longest * item_bytes
    logits = settings.max_num_seqs * spec.vocab_size * (4 + 8 * _SAMPLER_COPIES)
    return layer + gathered + mask + logits
