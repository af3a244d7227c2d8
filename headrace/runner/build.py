"""From settings and files to a runner that can be launched."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from headrace.backends.cpu import device
from headrace.backends.cpu.kv_memory import KvMemory
from headrace.config import Resolved, Settings
from headrace.engine.protocol import Capacity, Runner
from headrace.errors import ConfigError
from headrace.models.kv_layout import layout_of
from headrace.models.registry import derived_of, slots_of
from headrace.models.spec import ModelSpec, read_spec
from headrace.runner import ledger
from headrace.runner.build_cpu import (
    kernels_info,
    kv_dtype,
    load_model,
    make_pool,
    make_runner,
    resolve_kernels,
)
from headrace.runner.checkpoint import (
    PLAIN_DTYPES,
    PickledFolder,
    RawCheckpoint,
    SafetensorsFolder,
    dtypes_of,
    open_checkpoint,
)
from headrace.runner.phase import Report, phase
from headrace.runner.progress import Progress
from headrace.sources.files import ModelFiles


class LoadInfo(msgspec.Struct, frozen=True):
    """What was loaded, and why it is as it is."""

    capacity: Capacity
    spec: ModelSpec
    dtype: Resolved[str]  # torch's name: float32, ...
    max_model_len: Resolved[int]
    kv_blocks: Resolved[int]
    ledger: list[str]  # lines to print
    sizes: list[tuple[str, int]]  # what takes memory, bytes


class Facts(msgspec.Struct, frozen=True):
    """What is known of a model before its weights are read."""

    spec: ModelSpec
    checkpoint: RawCheckpoint | None  # None: the weights are random
    dtype: Resolved[str]  # torch's name
    wanted_model_len: Resolved[int]  # before the KV cache has its say


def load_runner(
    settings: Settings,
    files: ModelFiles,
    report: Report,
    progress: Progress | None = None,
) -> tuple[Runner, LoadInfo]:
    """Load the model and make its KV cache. Needs settled settings.

    `report` hears of each phase, `progress` of every piece of the weights.

    Raises ConfigError (a setting that cannot be met) or ModelError (files that cannot be run).
    """
    assert min(settings.max_num_seqs, settings.max_num_batched_tokens) > 0, "not settled"
    if settings.backend == "cuda":
        from headrace.runner.load_cuda import load_cuda

        return load_cuda(settings, files, report, progress)
    if settings.backend not in ("auto", "cpu"):
        raise ConfigError(f"backend = {settings.backend} runs no model", param="backend")
    return _load_cpu(settings, files, report, progress)


def _load_cpu(
    settings: Settings, files: ModelFiles, report: Report, progress: Progress | None
) -> tuple[Runner, LoadInfo]:
    with phase("read the model's config", report):
        facts = read_facts(settings, files)
    spec = facts.spec
    check_weights(settings, facts, report)
    with phase("find kernels, or build them", report):
        kernels = resolve_kernels(settings, spec)
    with phase("load weights", report):
        loaded = load_model(settings, kernels, spec, facts.checkpoint, facts.dtype.value, progress)
    dtype = kv_dtype(settings, loaded.kernels, facts.dtype.value)
    with phase("make the KV cache", report):
        free_bytes = device.free_memory_bytes()
        blocks = ledger.size_kv(settings, spec, dtype, free_bytes)
        layout = layout_of(spec)
        length = ledger.fit_model_len(
            facts.wanted_model_len, blocks.value, settings.block_size, layout.windows
        )
        memory = KvMemory(
            layers=layout.layers,
            places=layout.places,
            blocks=blocks.value,
            kv_heads=spec.kv_heads,
            block_size=settings.block_size,
            head_dim=spec.head_dim,
            dtype=dtype,
            keys_are_values=spec.keys_are_values,
        )
    pool = make_pool(settings, loaded.kernels)
    capacity = Capacity(
        kv_blocks=[blocks.value],
        block_size=settings.block_size,
        max_rows=settings.max_num_seqs,
        max_model_len=length.value,
        vocab_size=spec.vocab_size,
        kernels=kernels_info(loaded.kernels, pool),
        width=spec.hidden,
        labels=spec.labels,
        generates=spec.generates,
        long_from=spec.long_from,
        each_length=spec.each_length,
        windows=layout.windows,
    )
    activations = ledger.Line(
        "activations",
        ledger.activation_bytes(settings, spec, facts.dtype.value, length.value),
        f"estimate for a step of {settings.max_num_batched_tokens} tokens",
    )
    with phase("measure the parts of a step", report):
        runner = make_runner(settings, spec, loaded, memory, capacity, pool)
    kv = ledger.kv_line(spec, layout, dtype, settings.block_size, blocks)
    info = info_of(runner.capacity, facts, blocks, length, [loaded.weights, kv, activations])
    info.ledger.insert(0, f"{'kernels':13} {loaded.kernels}")
    return runner, info


def info_of(
    capacity: Capacity,
    facts: Facts,
    blocks: Resolved[int],
    length: Resolved[int],
    lines: list[ledger.Line],
) -> LoadInfo:
    """What was loaded; `lines`: of the ledger."""
    dtype = facts.dtype
    return LoadInfo(
        capacity,
        facts.spec,
        dtype,
        length,
        blocks,
        [
            *_foreign(facts.spec),
            f"{'dtype':13} {dtype.value}: {dtype.reason}",
            *map(str, lines),
            f"{'max_model_len':13} {length.value} tokens: {length.reason}",
        ],
        [(line.what, line.size_bytes) for line in lines],
    )


def _foreign(spec: ModelSpec) -> list[str]:
    """A line about a model that no file of ours computes."""
    if not spec.foreign:
        return []
    how = "transformers' own layers around our attention and KV cache, which is slower"
    return [f"{'model':13} {spec.architecture} has no file here: {how}"]


def read_facts(settings: Settings, files: ModelFiles) -> Facts:
    """What headers and configs tell. Raises as `load_runner` does."""
    spec = read_spec(files)
    wanted = ledger.wanted_model_len(settings, spec)
    checkpoint = None if settings.load_format == "dummy" else arranged(files, spec, settings)
    stored = {spec.dtype} if checkpoint is None else dtypes_of(checkpoint)
    packed = [] if checkpoint is None else sorted(stored - PLAIN_DTYPES)
    if settings.quantization != "none" and packed:
        raise ConfigError(
            f"quantization = {settings.quantization}: {files.path.name} is packed already "
            f"({', '.join(packed)})",
            param="quantization",
        )
    if settings.backend == "cuda":
        dtype = ledger.resolve_gpu_dtype(settings, stored)
    else:
        dtype = ledger.resolve_dtype(settings, stored, device.flags())
    return Facts(spec, checkpoint, dtype, wanted)


def check_weights(settings: Settings, facts: Facts, report: Report) -> None:
    """Refuse weights that are not finite, if the settings ask for that."""
    if settings.check_weights and facts.checkpoint is not None:
        with phase("check weights", report):
            from headrace.runner import weights  # torch looks at them

            dtype = facts.dtype.value
            weights.check(facts.spec, slots_of(facts.spec), facts.checkpoint, dtype)


def arranged(files: ModelFiles, spec: ModelSpec, settings: Settings) -> RawCheckpoint:
    """The checkpoint as the family's slots name its tensors. Raises as `open_checkpoint` does."""
    checkpoint, derived = open_checkpoint(files, settings.allow_pickle), derived_of(spec)
    if not derived:
        return checkpoint
    from headrace.runner.arranged import Arranged  # torch arranges them

    if isinstance(checkpoint, SafetensorsFolder | PickledFolder):
        return Arranged(checkpoint, derived)
    return checkpoint


def explain(settings: Settings, files: ModelFiles) -> dict[str, Resolved[Any]]:
    """dtype, kv_blocks and max_model_len as `load_runner` would settle them, without loading.

    Free memory is what it is now, less the weights. Raises as `load_runner` does.
    """
    facts = read_facts(settings, files)
    if settings.backend == "cuda":
        measured = Resolved("at start", "from the GPU's memory, once a step was measured")
        return {
            "dtype": facts.dtype,
            "kv_blocks": measured,
            "max_model_len": facts.wanted_model_len,
        }
    dtype = facts.dtype.value
    weights_bytes = 0
    if facts.checkpoint is not None:
        elements = sum(math.prod(tensor.shape) for tensor in facts.checkpoint.tensors.values())
        weights_bytes = elements * ledger.ITEM_BYTES[dtype]
    free_bytes = max(0, device.free_memory_bytes() - weights_bytes)
    blocks = ledger.size_kv(
        settings,
        facts.spec,
        kv_dtype(settings, resolve_kernels(settings, facts.spec), dtype),
        free_bytes,
    )
    return {
        "dtype": facts.dtype,
        "kv_blocks": blocks,
        "max_model_len": ledger.fit_model_len(
            facts.wanted_model_len,
            blocks.value,
            settings.block_size,
            layout_of(facts.spec).windows,
        ),
    }
