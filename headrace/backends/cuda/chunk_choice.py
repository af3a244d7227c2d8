"""Which library takes chunks of prompts, and why: the setting `prefill_attention`.

What a library leaves is our kernel's, and so are all chunks of captured graphs, but for those of
large graphs where FlashAttention 3 is taken.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.backends.cuda import dense_chunks, flash_chunks, flashinfer_chunks
from headrace.backends.cuda.chunk_library import SETTING, ChunkLibrary
from headrace.backends.cuda.dense_chunks import SIZES, DenseChunks
from headrace.backends.cuda.flash_chunks import FlashChunks
from headrace.backends.cuda.flashinfer_chunks import FlashInferChunks
from headrace.config import PrefillAttention, Resolved
from headrace.errors import ConfigError
from headrace.models.spec import ModelSpec

_NOT_PLAIN = "the model has windows, sinks or scores of its own"
_WHY_NOT = {
    "cudnn": dense_chunks.unsupported,
    "flash": flash_chunks.unsupported,
    "flashinfer": flashinfer_chunks.unsupported,
}
_LOAD = {"flash": flash_chunks.load, "flashinfer": flashinfer_chunks.load}


class _Heads(NamedTuple):
    """What every library is made for, in the order of their arguments."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    dtype: torch.dtype
    device: torch.device


def check_choice(
    choice: PrefillAttention, dtype: torch.dtype, head_dim: int, device: torch.device
) -> None:
    """Raises ConfigError where what the setting asks for cannot be had."""
    if choice in _WHY_NOT and (why_not := _WHY_NOT[choice](dtype, head_dim, device)):
        raise _refusal(choice, why_not)
    if choice in _LOAD:
        _LOAD[choice]()


def _refusal(choice: PrefillAttention, why_not: str) -> ConfigError:
    return ConfigError(f"{SETTING} = {choice}: {why_not}; auto takes what there is", param=SETTING)


def plain(spec: ModelSpec) -> bool:
    """Whether the libraries' kernels compute it: the whole context, scores as they are."""
    bent = any(layer.window or layer.scale for layer in spec.every_layer())
    return not (bent or spec.sinks or spec.softcap or spec.alibi)


class ChunkChoice:
    """The library of a model's chunks, if any: `library` takes chunks of many kinds, `dense` long
    first ones. Raises ConfigError where the choice cannot be had.
    """

    def __init__(
        self,
        choice: PrefillAttention,
        spec: ModelSpec,
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.library: ChunkLibrary | None = None
        self.dense: DenseChunks | None = None
        self._choice = choice
        self._why_not, self._passed_over = "as set", ""  # installed, but not taken
        if not plain(spec):
            if choice in _WHY_NOT:
                raise _refusal(choice, _NOT_PLAIN)
            self._why_not = _NOT_PLAIN
            return
        head_dim = spec.head_dim
        heads = _Heads(spec.heads, spec.kv_heads, head_dim, head_dim**-0.5, dtype, device)
        if choice == "flashinfer":
            self.library = FlashInferChunks(*heads)
        elif choice == "flash":
            self.library = FlashChunks(max_tokens, *heads)
        elif choice == "auto":
            self.library = self._unasked(max_tokens, heads)
        if self.library is None and choice != "triton":
            self._take_dense(max_tokens, heads)

    def _unasked(self, max_tokens: int, heads: _Heads) -> FlashChunks | None:
        """FlashAttention 3 where it is installed and can be had."""
        if find_spec("flashinfer") is not None:
            self._passed_over = (
                f"; FlashInfer, which is installed, only with {SETTING} = flashinfer"
            )
        if find_spec(flash_chunks.MODULE) is None:
            return None
        why_not = flash_chunks.unsupported(heads.dtype, heads.head_dim, heads.device)
        if not why_not:
            try:
                return FlashChunks(max_tokens, *heads)
            except ConfigError as error:
                why_not = str(error)
        self._passed_over += f"; not FlashAttention 3, which is installed: {why_not}"
        return None

    def _take_dense(self, max_tokens: int, heads: _Heads) -> None:
        sizes = tuple(size for size in SIZES if size <= max_tokens)
        self._why_not = dense_chunks.unsupported(heads.dtype, heads.head_dim, heads.device)
        if not self._why_not and not sizes:
            self._why_not = f"no chunk of {max_tokens} tokens is long enough for cuDNN"
        if not self._why_not:
            self.dense = DenseChunks(sizes, *heads)
        elif self._choice == "cudnn":
            raise _refusal(self._choice, self._why_not)

    def compile(self, cache: Tensor, tables: Tensor) -> None:
        """Launch our kernels that gather, for `kernels.launch.compiling`. cache: K of any layer."""
        if self.library is not None:
            self.library.compile(cache, tables)
        if self.dense is not None:
            self.dense.compile(cache, tables)

    def prepare(self, k: Tensor, v: Tensor, tables: Tensor) -> Resolved[str]:
        """See `Attention.prepare`."""
        set_or_not = "as set: " if self._choice != "auto" else ""
        if self.library is not None:
            what = self.library.prepare(k, v, tables)
            return Resolved(
                self.library.name, f"{set_or_not}{what}; else Triton{self._passed_over}"
            )
        if self.dense is None:
            return Resolved("triton", self._why_not + self._passed_over)
        self.dense.prepare(k, v, tables)
        sizes = ", ".join(map(str, self.dense.sizes))
        why = f"for long first chunks, padded to {sizes}; else Triton"
        return Resolved("cudnn", set_or_not + why + self._passed_over)
