"""The processor's runner: which kernels compute, in what precision, over which KV cache."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import torch

from headrace.backends.choose import resolve_overlap
from headrace.backends.cpu import device, native, ops
from headrace.backends.cpu.forward import Forward, TorchForward
from headrace.backends.cpu.kv_store import KvStore
from headrace.backends.cpu.native import NativeForward
from headrace.config import Settings
from headrace.engine.protocol import Capacity
from headrace.errors import ConfigError
from headrace.messages import KernelsInfo
from headrace.models.features import missing, refuse_missing
from headrace.models.layers import Decoder
from headrace.models.registry import module_of, slots_of
from headrace.models.spec import ModelSpec
from headrace.native.build import Unavailable
from headrace.native.library import Library, load
from headrace.native.pool import Pool
from headrace.native.weights import Arena
from headrace.runner import ledger, pack, work
from headrace.runner.checkpoint import Checkpoint
from headrace.runner.progress import Progress
from headrace.runner.runner import TorchRunner, table_width
from headrace.runner.worker import InlineWorker, ThreadWorker, Worker


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
    """A decoder and what it takes to run it. `packed`: None where torch computes."""

    model: Decoder
    kernels: Kernels
    packed: pack.Packed | None
    weights: ledger.Line


def kernels_info(kernels: Kernels, pool: Pool | None) -> KernelsInfo:
    """The same for /metrics. `pool`: what runs native kernels, None where torch computes."""
    return KernelsInfo(
        "cpu",
        "native" if pool else "torch",
        pool.isa if pool else torch.backends.cpu.get_cpu_capability().lower(),
        "exact" if kernels.exact else "fast",
        kernels.reason,
    )


def resolve_kernels(settings: Settings, spec: ModelSpec) -> Kernels:
    """Native kernels if asked for, or if `auto` finds them and they compute the model. Builds the
    library at its first use.

    Raises ConfigError if they, or what only they can do, are asked for and cannot be had;
    ModelError for a model that nothing on a processor computes.
    """
    refuse_missing(spec, ops.COMPUTES, "cpu")
    kernels = _choose(settings, missing(spec, native.COMPUTES))
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


def kv_dtype(settings: Settings, kernels: Kernels, dtype: torch.dtype) -> torch.dtype:
    """The KV cache's type: the model's, but native kernels widen bfloat16 on any processor.

    Raises ConfigError for one that only native kernels take.
    """
    if settings.kv_dtype == "auto":
        widened = kernels.library is not None and not kernels.exact and settings.dtype == "auto"
        return torch.bfloat16 if widened else dtype
    wanted: torch.dtype = getattr(torch, settings.kv_dtype)
    if kernels.library is None and wanted != dtype:
        name = str(dtype).removeprefix("torch.")
        raise ConfigError(
            f"kv_dtype = {settings.kv_dtype} with dtype = {name} needs native kernels, and here "
            f"is {kernels}",
            param="kv_dtype",
        )
    return wanted


def load_decoder(
    settings: Settings,
    spec: ModelSpec,
    checkpoint: Checkpoint | None,
    plain: Callable[[torch.dtype], Decoder],
    dtype: torch.dtype,
    progress: Progress | None = None,
) -> Loaded:
    """The decoder as `resolve_kernels` wants it. `plain` loads one whose matrices are tensors;
    random weights (no checkpoint) are drawn so and then packed. `progress` hears of every piece
    that goes to packed matrices."""
    kernels = resolve_kernels(settings, spec)
    if kernels.library is None:
        model = plain(dtype)
        return Loaded(model, kernels, None, ledger.weights_line(model.parameters()))
    arena = Arena()
    if checkpoint is None:
        model = plain(torch.float32)
        packed = pack.pack_parameters(
            model, kernels.library, arena, quantization=settings.quantization
        )
        return Loaded(model, kernels, packed, _weights_line(model, arena, packed))
    with torch.device("meta"):
        model = module_of(spec.architecture).build(spec, torch.float32)
    pack.shell(model, spec)
    packed = pack.load(
        model,
        slots_of(spec),
        checkpoint,
        kernels.library,
        arena,
        quantization=settings.quantization,
        threads=settings.threads or device.cores(),
        progress=progress,
    )
    return Loaded(model, kernels, packed, _weights_line(model, arena, packed))


def _weights_line(model: Decoder, arena: Arena, packed: pack.Packed) -> ledger.Line:
    vectors = [p for p in model.parameters() if p.ndim == 1]
    size_bytes = arena.used_bytes + sum(p.numel() * p.element_size() for p in vectors)
    count = sum(p.numel() for p in model.parameters())
    note = f"{count / 1e6:.1f} M parameters, {pack.describe(packed)}"
    return ledger.Line("weights", size_bytes, note)


def make_pool(settings: Settings, kernels: Kernels) -> Pool | None:
    """The threads of native kernels; None where torch computes."""
    if kernels.library is None:
        return None
    return Pool(kernels.library, settings.threads or device.cores())


def make_runner(
    settings: Settings, loaded: Loaded, store: KvStore, capacity: Capacity, pool: Pool | None
) -> TorchRunner:
    """The runner over a loaded decoder; it takes the pool (see `make_pool`).

    Its capacity says what the parts of a step cost, measured here.
    """
    forward: Forward
    worker: Worker
    if pool is None or loaded.packed is None:
        forward = TorchForward(loaded.model, store)
        worker = ThreadWorker(settings.threads or device.cores())
    else:
        forward = NativeForward(
            loaded.model,
            loaded.packed,
            store,
            pool,
            positions=table_width(capacity) * capacity.block_size,
            rows=capacity.max_rows,
            exact=loaded.kernels.exact,
        )
        # One pool computes: torch's own threads would spin beside it.
        overlap = resolve_overlap(settings, "cpu").value
        worker = ThreadWorker(1) if overlap else InlineWorker()
    parts = work.measure(forward, worker, loaded.model, store, loaded.weights.size_bytes)
    capacity = msgspec.structs.replace(capacity, work=parts)
    return TorchRunner(forward, store, capacity, worker)
