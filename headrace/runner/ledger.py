"""Where the memory goes, and what the runner's `auto` settings come to, each with a reason."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from headrace.backends.cpu import device
from headrace.config import Resolved, Settings, parse_bytes
from headrace.errors import ConfigError
from headrace.kv.room import longest, most_held, tokens_kept
from headrace.models.kv_layout import KvLayout, layout_of
from headrace.models.sizes import kv_layer_bytes
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


def host_lines(parameters: Iterable[torch.Tensor]) -> list[Line]:
    """A line of what a GPU's model leaves in the processor's memory, if it leaves anything."""
    size_bytes = sum(p.numel() * p.element_size() for p in parameters)
    note = "of this machine's memory, page-locked: rows are read over the link"
    return [Line("host rows", size_bytes, note)] if size_bytes else []


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


def _line_bytes(dtype: str) -> tuple[int, int]:
    """Of one element, and of the scale of a head's line."""
    return ITEM_BYTES[dtype], _SCALE_BYTES if dtype == "int8" else 0


def kv_block_bytes(spec: ModelSpec, layout: KvLayout, dtype: str, block_size: int) -> int:
    """K and V of `block_size` tokens in the layers of one group; int8 has a float32 scale for each
    token and head."""
    return layout.layers * kv_layer_bytes(spec, *_line_bytes(dtype)) * block_size


def kv_line(
    spec: ModelSpec, layout: KvLayout, dtype: str, size: int, blocks: Resolved[int]
) -> Line:
    """The line of a KV cache; size: tokens of a block."""
    block_bytes = kv_block_bytes(spec, layout, dtype, size)
    note = f"{blocks.value} blocks, {blocks.value * size} tokens of {block_bytes // size} bytes"
    if len(layout.windows) > 1:
        note = (
            f"{blocks.value} blocks of {size} tokens in {layout.layers} layers, "
            f"{len(layout.windows)} groups of them, "
            f"{tokens_kept(blocks.value, len(layout.windows), size)} tokens in all"
        )
    return Line("KV cache", blocks.value * block_bytes, f"{note}: {blocks.reason}")


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
    """Blocks of a processor's KV cache.

    Raises ConfigError if the memory given does not hold one block.
    """
    if settings.kv_blocks:
        return Resolved(settings.kv_blocks, "asked for")
    layout = layout_of(spec)
    block_bytes = kv_block_bytes(spec, layout, dtype, settings.block_size)
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
        size, windows = settings.block_size, layout.windows
        # One spare block a row: an overlapped step may run past the last token.
        usable = settings.max_num_seqs * most_held(windows, size, -(-longest // size) + 1)
        # Chunks of two steps are there whole before what is out of their windows goes back.
        chunks = -(-2 * settings.max_num_batched_tokens // size)
        usable += chunks * sum(window > 0 for window in windows)
        if usable < blocks:
            return Resolved(usable, f"all that {settings.max_num_seqs} sequences can fill")
    return Resolved(blocks, reason)


def fit_model_len(
    wanted: Resolved[int], kv_blocks: int, block_size: int, windows: Sequence[int] = (0,)
) -> Resolved[int]:
    """`wanted`, or less if the whole KV cache holds less; windows: of its groups.

    Raises ConfigError if it does not hold a block of each group.
    """
    held = functools.partial(most_held, windows, block_size)
    if held(-(-wanted.value // block_size)) <= kv_blocks:
        return wanted
    least = held(1)
    if kv_blocks < least:
        raise ConfigError(
            f"kv_blocks = {kv_blocks}: a sequence takes {least} at least, one of each KV group",
            param="kv_blocks",
        )
    return Resolved(longest(kv_blocks, held) * block_size, "the KV cache holds no more")


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
