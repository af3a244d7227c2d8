"""From settings and files to a runner that can be launched."""

from __future__ import annotations

import math
import os
from typing import Any

import msgspec
import torch

from headrace.backends.cpu import device
from headrace.backends.cpu.kv_store import KvStore
from headrace.config import Resolved, Settings
from headrace.engine.protocol import Capacity, Runner
from headrace.errors import ConfigError
from headrace.models.features import refuse_missing
from headrace.models.layers import Decoder
from headrace.models.registry import derived_of, module_of, slots_of
from headrace.models.spec import ModelSpec, read_spec
from headrace.runner import ledger, weights
from headrace.runner.arranged import Arranged
from headrace.runner.build_cpu import (
    kernels_info,
    kv_dtype,
    load_decoder,
    make_pool,
    make_runner,
    resolve_kernels,
)
from headrace.runner.checkpoint import (
    PLAIN_DTYPES,
    Checkpoint,
    PickledFolder,
    SafetensorsFolder,
    dtypes_of,
    open_checkpoint,
)
from headrace.runner.phase import Report, phase
from headrace.runner.progress import Progress
from headrace.sources.cache import cache_home
from headrace.sources.files import ModelFiles

PROCESSOR = torch.device("cpu")


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
    checkpoint: Checkpoint | None  # None: the weights are random
    dtype: Resolved[torch.dtype]
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
        return _load_cuda(settings, files, report, progress)
    if settings.backend not in ("auto", "cpu"):
        raise ConfigError(f"backend = {settings.backend} runs no model", param="backend")
    return _load_cpu(settings, files, report, progress)


def _load_cuda(
    settings: Settings, files: ModelFiles, report: Report, progress: Progress | None
) -> tuple[Runner, LoadInfo]:
    # Compiled kernels stay; Triton's own key names sources, versions, options and card.
    os.environ.setdefault("TRITON_CACHE_DIR", str(cache_home() / "triton"))
    with phase("find the GPU", report):
        from headrace.backends.cuda.attention import check_choice
        from headrace.backends.cuda.device import find_card, native_bfloat16
        from headrace.backends.cuda.ops import COMPUTES
        from headrace.runner.build_cuda import build_runner

        card = find_card()
        target = torch.device("cuda", card.index)
        torch.zeros(1, device=target)  # makes the context
    with phase("read the model's config", report):
        facts = read_facts(settings, files)
        refuse_missing(facts.spec, COMPUTES, "cuda")
        if facts.dtype.value == torch.bfloat16 and not native_bfloat16(card):
            raise ConfigError(f"{card.name} has no bfloat16: use float16", param="dtype")
        head_dim = facts.spec.head_dim
        check_choice(settings.prefill_attention, facts.dtype.value, head_dim, target)
    _check(settings, facts, report)
    with phase("load weights", report):
        model = load_model(facts.spec, facts.checkpoint, facts.dtype.value, target, progress)
        torch.cuda.synchronize(target)
    runner, blocks, length, lines = build_runner(
        settings, model, facts.wanted_model_len, card, report
    )
    weights = ledger.weights_line(model.parameters())
    return runner, _info(runner.capacity, weights, model.dtype, facts, blocks, length, lines)


def _load_cpu(
    settings: Settings, files: ModelFiles, report: Report, progress: Progress | None
) -> tuple[Runner, LoadInfo]:
    with phase("read the model's config", report):
        facts = read_facts(settings, files)
    spec = facts.spec
    _check(settings, facts, report)
    with phase("load weights", report):
        torch.set_num_threads(settings.threads or device.cores())
        loaded = load_decoder(
            settings,
            spec,
            facts.checkpoint,
            lambda dtype: load_model(spec, facts.checkpoint, dtype, progress=progress),
            facts.dtype.value,
            progress,
        )
    dtype = kv_dtype(settings, loaded.kernels, facts.dtype.value)
    with phase("make the KV cache", report):
        free_bytes = device.free_memory_bytes()
        blocks = ledger.size_kv(settings, spec, dtype, free_bytes)
        length = ledger.fit_model_len(facts.wanted_model_len, blocks.value, settings.block_size)
        store = KvStore(
            layers=spec.layers,
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
        window=spec.window,
    )
    activations = ledger.Line(
        "activations",
        ledger.activation_bytes(settings, spec, facts.dtype.value, length.value),
        f"estimate for a step of {settings.max_num_batched_tokens} tokens",
    )
    with phase("measure the parts of a step", report):
        runner = make_runner(settings, loaded, store, capacity, pool)
    info = _info(runner.capacity, loaded.weights, dtype, facts, blocks, length, [activations])
    info.ledger.insert(0, f"{'kernels':13} {loaded.kernels}")
    return runner, info


def _info(
    capacity: Capacity,
    weights: ledger.Line,
    kv_dtype: torch.dtype,
    facts: Facts,
    blocks: Resolved[int],
    length: Resolved[int],
    more: list[ledger.Line],
) -> LoadInfo:
    """What was loaded; `more`: the backend's own lines of the ledger."""
    name = named(facts.dtype)
    per_token = ledger.kv_bytes_per_token(facts.spec, kv_dtype)
    tokens = blocks.value * capacity.block_size
    lines = [
        weights,
        ledger.Line(
            "KV cache",
            tokens * per_token,
            f"{blocks.value} blocks, {tokens} tokens of {per_token} bytes: {blocks.reason}",
        ),
        *more,
    ]
    return LoadInfo(
        capacity,
        facts.spec,
        name,
        length,
        blocks,
        [
            *_foreign(facts.spec),
            f"{'dtype':13} {name.value}: {name.reason}",
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


def _check(settings: Settings, facts: Facts, report: Report) -> None:
    """Refuse weights that are not finite, if the settings ask for that."""
    if settings.check_weights and facts.checkpoint is not None:
        with phase("check weights", report):
            dtype = facts.dtype.value
            weights.check(facts.spec, slots_of(facts.spec), facts.checkpoint, dtype)


def arranged(files: ModelFiles, spec: ModelSpec, settings: Settings) -> Checkpoint:
    """The checkpoint as the family's slots name its tensors. Raises as `open_checkpoint` does."""
    checkpoint, derived = open_checkpoint(files, settings.allow_pickle), derived_of(spec)
    if derived and isinstance(checkpoint, SafetensorsFolder | PickledFolder):
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
            "dtype": named(facts.dtype),
            "kv_blocks": measured,
            "max_model_len": facts.wanted_model_len,
        }
    dtype = facts.dtype.value
    weights_bytes = 0
    if facts.checkpoint is not None:
        elements = sum(math.prod(tensor.shape) for tensor in facts.checkpoint.tensors.values())
        weights_bytes = elements * dtype.itemsize
    free_bytes = max(0, device.free_memory_bytes() - weights_bytes)
    blocks = ledger.size_kv(
        settings,
        facts.spec,
        kv_dtype(settings, resolve_kernels(settings, facts.spec), dtype),
        free_bytes,
    )
    return {
        "dtype": named(facts.dtype),
        "kv_blocks": blocks,
        "max_model_len": ledger.fit_model_len(
            facts.wanted_model_len, blocks.value, settings.block_size
        ),
    }


def named(dtype: Resolved[torch.dtype]) -> Resolved[str]:
    """With torch's name instead of torch's object: float32, ..."""
    return Resolved(str(dtype.value).removeprefix("torch."), dtype.reason)


def load_model(
    spec: ModelSpec,
    checkpoint: Checkpoint | None,
    dtype: torch.dtype,
    device: torch.device = PROCESSOR,
    progress: Progress | None = None,
) -> Decoder:
    """The model with its weights on `device`; random ones if `checkpoint` is None."""
    with torch.device(device):
        model = module_of(spec.architecture).build(spec, dtype)
    slots = slots_of(spec)
    if checkpoint is None:
        weights.fill_dummy(model, slots)
    else:
        weights.load(model, slots, checkpoint, progress)
    return model
