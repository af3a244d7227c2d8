"""The processor's runner: which kernels compute, in what precision, over which KV cache.

No torch is imported where native kernels compute; `build_torch` has what needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from headrace.backends.choose import resolve_overlap
from headrace.backends.cpu import computes, device
from headrace.backends.cpu.batch import Forward
from headrace.backends.cpu.kv_memory import KvMemory
from headrace.backends.cpu.native import NativeForward
from headrace.config import Settings
from headrace.engine.protocol import Capacity
from headrace.errors import ConfigError
from headrace.messages import KernelsInfo
from headrace.models.features import missing, refuse_missing
from headrace.models.outline import Outline
from headrace.models.registry import own_layers, slots_of
from headrace.models.spec import ModelSpec
from headrace.native.build import Unavailable
from headrace.native.library import Library, load
from headrace.native.pool import Pool
from headrace.runner import ledger, pack, work
from headrace.runner.checkpoint import RawCheckpoint
from headrace.runner.progress import Progress
from headrace.runner.runner import CpuRunner, table_width
from headrace.runner.worker import InlineWorker, ThreadWorker, Worker

if TYPE_CHECKING:
    from headrace.models.layers import Decoder


class Kernels(msgspec.Struct, frozen=True):
    """What computes on the processor, and why. `library`: None where torch does."""

    library: Library | None
    exact: bool  # activations stay float before products with quantised weights
    reason: str

    def __str__(self) -> str:
        if self.library is None:
            return f"torch: {self.reason}"
        return f"native, {'float' if self.exact else 'int8'} activations: {self.reason}"


class Loaded(msgspec.Struct, frozen=True):
    """A model and what it takes to run it."""

    model: pack.Weights | Decoder  # packed for native kernels, or torch's
    kernels: Kernels
    weights: ledger.Line


def kernels_info(kernels: Kernels, pool: Pool | None) -> KernelsInfo:
    """The same for /metrics. `pool`: what runs native kernels, None where torch computes."""
    name, isa = "torch", ""
    if pool is not None:
        name, isa = "native", pool.isa
    else:
        from headrace.runner import build_torch

        isa = build_torch.isa()
    return KernelsInfo("cpu", name, isa, "exact" if kernels.exact else "fast", kernels.reason)


def resolve_kernels(settings: Settings, spec: ModelSpec) -> Kernels:
    """Native kernels if asked for, or if `auto` finds them and they compute the model. Builds the
    library at its first use.

    Raises ConfigError if they, or what only they can do, are asked for and cannot be had;
    ModelError for a model that nothing on a processor computes.
    """
    refuse_missing(spec, computes.TORCH, "cpu")
    lacks = missing(spec, computes.NATIVE)
    if not lacks and own_layers(spec):
        lacks = ["layers of the family's own"]
    kernels = _choose(settings, lacks)
    if kernels.library is None and settings.quantization != "none":
        raise ConfigError(
            f"quantization = {settings.quantization} needs native kernels, and here is {kernels}",
            param="quantization",
        )
    return kernels


def _choose(settings: Settings, lacks: list[str]) -> Kernels:
    """lacks: what the model asks and native kernels do not compute."""
    if settings.cpu_kernels == "torch":
        if settings.cpu_precision == "fast":
            raise ConfigError("cpu_precision = fast needs native kernels", param="cpu_precision")
        return Kernels(None, True, "as set")
    if lacks:
        reason = f"native kernels do not compute {', '.join(lacks)}"
        if settings.cpu_kernels == "native" or settings.cpu_precision == "fast":
            raise ConfigError(reason, param="cpu_kernels")
        return Kernels(None, True, reason)
    found = load()
    if isinstance(found, Unavailable):
        reason = f"{found.reason}; {found.remedy}"
        if settings.cpu_kernels == "native" or settings.cpu_precision == "fast":
            raise ConfigError(f"no native kernels: {reason}", param="cpu_kernels")
        return Kernels(None, True, f"no native kernels: {reason}")
    if settings.cpu_precision != "auto":
        return Kernels(found, settings.cpu_precision == "exact", "as set")
    if settings.dtype == "float32":
        return Kernels(found, True, "dtype = float32 asks for exactness")
    return Kernels(found, False, "faster; the default model's perplexity rises by 0.14 %")


def kv_dtype(settings: Settings, kernels: Kernels, dtype: str) -> str:
    """The KV cache's type, by torch's name: the model's, but native kernels widen bfloat16 on any
    processor.

    Raises ConfigError for one that only native kernels take.
    """
    if settings.kv_dtype == "auto":
        widened = kernels.library is not None and not kernels.exact and settings.dtype == "auto"
        return "bfloat16" if widened else dtype
    if kernels.library is None and settings.kv_dtype != dtype:
        raise ConfigError(
            f"kv_dtype = {settings.kv_dtype} with dtype = {dtype} needs native kernels, and here "
            f"is {kernels}",
            param="kv_dtype",
        )
    return settings.kv_dtype


def load_model(
    settings: Settings,
    kernels: Kernels,
    spec: ModelSpec,
    checkpoint: RawCheckpoint | None,
    dtype: str,
    progress: Progress | None = None,
) -> Loaded:
    """The model as `kernels` wants it. Random weights (no checkpoint) are torch's, also
    those that are then packed. `progress` hears of every piece."""
    if kernels.library is None:
        from headrace.runner import build_torch

        model = build_torch.load_model(settings, spec, checkpoint, dtype, progress)
        return Loaded(model, kernels, ledger.weights_line(model.parameters()))
    if checkpoint is None:
        from headrace.runner import build_torch

        packed = build_torch.random_packed(spec, kernels.library, settings.quantization)
    else:
        packed = pack.load(
            spec,
            slots_of(spec),
            checkpoint,
            kernels.library,
            quantization=settings.quantization,
            threads=settings.threads or device.cores(),
            progress=progress,
        )
    note = f"{packed.count / 1e6:.1f} M parameters, {packed.describe()}"
    return Loaded(packed, kernels, ledger.Line("weights", packed.size_bytes, note))


def make_pool(settings: Settings, kernels: Kernels) -> Pool | None:
    """The threads of native kernels; None where torch computes."""
    if kernels.library is None:
        return None
    return Pool(kernels.library, settings.threads or device.cores())


def make_runner(
    settings: Settings,
    spec: ModelSpec,
    loaded: Loaded,
    memory: KvMemory,
    capacity: Capacity,
    pool: Pool | None,
) -> CpuRunner:
    """The runner over a loaded model; it takes the pool (see `make_pool`).

    Its capacity says what the parts of a step cost, measured here.
    """
    forward: Forward
    worker: Worker
    if pool is None or not isinstance(loaded.model, pack.Weights):
        from headrace.runner import build_torch

        assert not isinstance(loaded.model, pack.Weights), "packed weights need native kernels"
        forward, worker = build_torch.make_forward(settings, loaded.model, memory)
    else:
        forward = NativeForward(
            Outline(spec, loaded.model.vectors),
            loaded.model.packed,
            memory,
            pool,
            positions=table_width(capacity) * capacity.block_size,
            rows=capacity.max_rows,
            exact=loaded.kernels.exact,
        )
        overlap = resolve_overlap(settings, "cpu").value
        worker = ThreadWorker() if overlap else InlineWorker()
    parts = work.measure(forward, worker, spec, memory, loaded.weights.size_bytes)
    capacity = msgspec.structs.replace(capacity, work=parts)
    return CpuRunner(forward, memory, capacity, worker)
