"""The processor's runner where torch computes, and weights that torch makes."""

from __future__ import annotations

import functools

import torch

from headrace.backends.cpu import device
from headrace.backends.cpu.forward import TorchForward
from headrace.backends.cpu.kv_memory import KvMemory
from headrace.backends.cpu.kv_store import KvStore
from headrace.config import Settings
from headrace.models.layers import Decoder
from headrace.models.spec import ModelSpec
from headrace.native.library import Library
from headrace.runner import weights
from headrace.runner.checkpoint import RawCheckpoint
from headrace.runner.pack import Weights
from headrace.runner.pack_model import pack_model
from headrace.runner.progress import Progress
from headrace.runner.worker import ThreadWorker


def isa() -> str:
    """What of the processor torch uses."""
    return str(torch.backends.cpu.get_cpu_capability()).lower()


def load_model(
    settings: Settings,
    spec: ModelSpec,
    checkpoint: RawCheckpoint | None,
    dtype: str,
    progress: Progress | None,
) -> Decoder:
    """The model with its weights, random ones if there is no checkpoint."""
    torch.set_num_threads(_threads(settings))
    return weights.load_model(spec, checkpoint, getattr(torch, dtype), progress=progress)


def random_packed(spec: ModelSpec, library: Library, quantization: str) -> Weights:
    """Random weights for native kernels: those that torch would compute with, packed."""
    model = weights.load_model(spec, None, torch.float32)
    return pack_model(model, library, quantization=quantization)


def make_forward(
    settings: Settings, model: Decoder, memory: KvMemory
) -> tuple[TorchForward, ThreadWorker]:
    """What computes, and the thread that it computes on."""
    # OpenMP keeps its thread count per thread: the worker sets its own.
    begin = functools.partial(torch.set_num_threads, _threads(settings))
    return TorchForward(model, KvStore(memory)), ThreadWorker(begin)


def _threads(settings: Settings) -> int:
    return settings.threads or device.cores()
