"""Prompt chunks by FlashInfer, an optional package: it reads the paged cache as it lies.

Its HND layout of pages [pages, kv_heads, page_size, head_dim] is that of a layer's K and V. Its
kernels are compiled by nvcc when a type and head size are first asked for: `prepare` does that,
before the server is ready. Each step is planned once, for all layers: lengths come from the host,
block ids stay on the device, and no call waits for the device.
"""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.backends.cuda.chunk_library import SETTING
from headrace.errors import ConfigError
from headrace.kernels.dense_prefill import Span

HEAD_DIMS = (64, 128, 256)
_TURNS = 4  # more than the steps that can be in flight
_WORKSPACE_BYTES = 1 << 20  # nothing is left there while no chunk's keys are split


def unsupported(
    dtype: torch.dtype,
    head_dim: int,
    device: torch.device,
    find: Callable[[str], object] = find_spec,
    has_nvcc: Callable[[], bool] | None = None,
) -> str:
    """Why FlashInfer takes no chunk here, with the remedy; "" where it can."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it has no kernel for {dtype}: set dtype to bfloat16 or float16"
    if head_dim not in HEAD_DIMS:
        return f"it has no kernel for head_dim {head_dim}, only for {HEAD_DIMS}"
    if device.type != "cuda":
        return "no CUDA device"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "the card is older than compute capability 8.0"
    if find("flashinfer") is None:
        return "it is not installed: pip install flashinfer-python"
    if find("flashinfer_jit_cache") is None:
        if not (has_nvcc or _has_nvcc)():
            return (
                "there is no nvcc to compile its kernels: install the CUDA toolkit of torch's "
                "version and set CUDA_HOME, or install flashinfer-jit-cache"
            )
        if not shutil.which("ninja"):
            return "there is no ninja to compile its kernels with: pip install ninja"
    return ""


def _has_nvcc() -> bool:
    """Where FlashInfer looks for it."""
    if asked := os.environ.get("FLASHINFER_NVCC"):
        return shutil.which(asked) is not None
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home is None and shutil.which("nvcc"):
        return True
    return (Path(home or "/usr/local/cuda") / "bin" / "nvcc").exists()


def load() -> Any:
    """The package. Raises ConfigError where it cannot be imported."""
    try:
        return importlib.import_module("flashinfer")
    except Exception as error:
        raise ConfigError(
            f"{SETTING} = flashinfer: it cannot be imported ({type(error).__name__}: {error}): "
            "pip install flashinfer-python brings what it needs",
            param=SETTING,
        ) from error


def kernel_for(device: torch.device) -> str:
    """FlashInfer's name for its kernels: those made for compute capability 9.0, or the general."""
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    return "fa3" if hopper else "fa2"


class _Turn:
    """One of a ring: FlashInfer's wrapper, pinned memory of the step's lengths and places, and the
    event behind which the device has read them. The wrapper's own pinned memory is written by its
    next plan, so it waits for the event too."""

    def __init__(self, wrapper: Any, words: int, device: torch.device) -> None:
        self.wrapper = wrapper
        cuda = device.type == "cuda"
        self.host = torch.zeros(words, dtype=torch.int32, pin_memory=cuda)
        self.read = torch.cuda.Event() if cuda else None

    def wait(self) -> None:
        if self.read is not None:
            self.read.synchronize()  # at once, unless the device is far behind

    def sent(self) -> None:
        if self.read is not None:
            self.read.record()


class WrappedChunks:
    """The chunks of one step, tokens [first, first + count), ready for every layer."""

    def __init__(self, wrapper: Any, first: int, count: int) -> None:
        self._wrapper, self._tokens = wrapper, slice(first, first + count)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """See `PlannedChunks`."""
        own = out[self._tokens]
        # Without dependent launch: our kernels before it may still write what it reads.
        self._wrapper.run(q[self._tokens], (k, v), out=own, enable_pdl=False)


class FlashInferChunks:
    """All chunks of steps that are launched call by call, once `prepare` has compiled the kernel.

    Raises ConfigError where FlashInfer cannot be imported.
    """

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        head_dim: int,
        scale: float,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.name, self.kernel = "flashinfer", kernel_for(device)
        self._heads, self._kv_heads, self._head_dim = heads, kv_heads, head_dim
        self._scale, self._dtype, self._device = scale, dtype, device
        wrapper = load().BatchPrefillWithPagedKVCacheWrapper
        workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrappers = [
            wrapper(workspace, "HND", backend=self.kernel) for _ in range(_TURNS)
        ]  # memory on the device is taken here, where it is counted
        self._turns: list[_Turn] = []
        self._at = 0
        self._page = 0

    @property
    def ready(self) -> bool:
        """`prepare` was called: chunks may come."""
        return bool(self._turns)

    def compile(self, cache: Tensor, tables: Tensor) -> None:
        """Nothing: it reads the cache as it lies."""

    def prepare(self, k: Tensor, v: Tensor, tables: Tensor) -> str:
        """See `ChunkLibrary`. Compiles, if it was not before on this machine: seconds to
        minutes."""
        assert k.is_contiguous(), "a layer's K is dense"
        assert v.is_contiguous(), "a layer's V is dense"
        self._page = k.shape[2]
        words = 4 * tables.shape[0] + 2 + tables.numel()
        self._turns = [_Turn(wrapper, words, self._device) for wrapper in self._wrappers]
        q = torch.zeros(2, self._heads, self._head_dim, dtype=self._dtype, device=self._device)
        try:
            for _ in self._turns:
                self._planned([Span(0, 0, 2, 0)], tables).attend(q, k, v, torch.empty_like(q))
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        except Exception as error:
            self._turns = []
            raise ConfigError(
                f"{SETTING} = flashinfer: its kernel failed to compile or to run; set it to auto, "
                f"or mend this: {type(error).__name__}: {_ends(str(error))}",
                param=SETTING,
            ) from error
        return f"its {self.kernel} kernel in steps without a graph"

    def plan(self, spans: Sequence[Span], tables: Tensor) -> tuple[WrappedChunks, list[Span]]:
        """See `ChunkLibrary`. It takes every chunk."""
        return self._planned(spans, tables), []

    def _planned(self, spans: Sequence[Span], tables: Tensor) -> WrappedChunks:
        assert self.ready, "prepare comes first"
        assert tables.is_contiguous(), "tables are read as one list"
        first, n = spans[0].first, len(spans)
        counts = np.array([span.count for span in spans], np.int32)
        lengths = counts + np.array([span.start for span in spans], np.int32)
        firsts = np.array([span.first for span in spans], np.int32)
        assert (firsts - first == np.cumsum(counts) - counts).all(), "chunks follow one another"
        pages = -(-lengths // self._page)
        width = tables.shape[1]
        at = np.concatenate(
            [
                np.arange(span.row * width, span.row * width + used, dtype=np.int32)
                for span, used in zip(spans, pages.tolist(), strict=True)
            ]
        )
        turn = self._turns[self._at]
        self._at = (self._at + 1) % len(self._turns)
        turn.wait()
        sizes = (n + 1, n + 1, n, n, at.size)
        queries, page_ends, last, total, places = turn.host[: sum(sizes)].split(sizes)
        queries.numpy()[:] = np.concatenate(([0], np.cumsum(counts)))
        page_ends.numpy()[:] = np.concatenate(([0], np.cumsum(pages)))
        last.numpy()[:] = lengths - (pages - 1) * self._page
        total.numpy()[:] = lengths
        places.numpy()[:] = at
        blocks = tables.view(-1).index_select(0, places.to(self._device, non_blocking=True))
        turn.wrapper.plan(
            queries,
            page_ends,
            blocks,
            last,
            self._heads,
            self._kv_heads,
            self._head_dim,
            self._page,
            causal=True,  # the last query sees the last key
            sm_scale=self._scale,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
            seq_lens=total,
            disable_split_kv=True,
        )
        turn.sent()
        return WrappedChunks(turn.wrapper, first, int(counts.sum()))


def _ends(text: str) -> str:
    """A compiler's output tells at its ends what failed."""
    return text if len(text) <= 1200 else f"{text[:600]} [...] {text[-600:]}"
