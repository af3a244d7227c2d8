"""Backends that tests run on: the processor on torch always, on native kernels where there is a
compiler, a CUDA device where there is one. And the browser, where there is one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from headrace.backends.choose import resolve_backend, settled
from headrace.config import Settings
from headrace.errors import ConfigError
from headrace.native.build import Unavailable, find_compiler
from headrace.sources.files import ModelFiles


def _without_cuda() -> str:
    if not Path("/dev/nvidiactl").exists():  # told without torch: most tests do not need it
        return "no NVIDIA device"
    try:
        resolve_backend(Settings(backend="cuda"))
    except ConfigError as error:
        return error.message
    import torch

    return "" if torch.cuda.is_available() else "torch finds no CUDA device"


WITHOUT_CUDA = _without_cuda()  # why nothing runs on cuda here; "" = it does
_COMPILER = find_compiler()
WITHOUT_NATIVE = _COMPILER.reason if isinstance(_COMPILER, Unavailable) else ""
BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
WITHOUT_BROWSER = "" if BROWSER else "no Chromium (Debian: apt install chromium)"
BACKENDS = tuple(
    name
    for name, missing in (("cpu", ""), ("native", WITHOUT_NATIVE), ("cuda", WITHOUT_CUDA))
    if not missing
)
PROCESSORS = tuple(name for name in BACKENDS if name != "cuda")
MARKS = {  # what a selection goes by
    "cpu": pytest.mark.on_cpu,
    "native": pytest.mark.on_cpu,
    "cuda": pytest.mark.on_cuda,
}
BACKEND_PARAMS = [pytest.param(name, id=name, marks=MARKS[name]) for name in BACKENDS]


def asked(backend: str) -> dict[str, Any]:
    """The settings that ask for one of BACKENDS."""
    if backend == "cuda":
        return {"backend": "cuda"}
    return {"backend": "cpu", "cpu_kernels": "torch" if backend == "cpu" else "native"}


def settings_for(backend: str, **fields: Any) -> Settings:
    """Settings of a test that runs on every backend. Threads are the processor's."""
    if backend == "cuda":
        fields.pop("threads", None)
    return Settings(**asked(backend), **fields)


def load(backend: str, files: ModelFiles, **fields: Any) -> Any:
    """A runner of `files` on `backend`."""
    from headrace.runner.build import load_runner

    settings = settled(settings_for(backend, **fields))
    return load_runner(settings, files, lambda phase, seconds: None)[0]


def kv_tensors(runner: Any) -> list[Any]:
    """K and V of every layer: [blocks + 1, kv_heads, block_size, head_dim] each."""
    if not hasattr(runner, "_memory"):
        store = runner._forward.store
        return [*store.k, *store.v]
    import torch

    memory = runner._memory
    dtype = getattr(torch, memory.dtype)
    tensors = (torch.from_numpy(array) for array in (*memory.k, *memory.v))
    return [tensor.view(dtype) for tensor in tensors]
