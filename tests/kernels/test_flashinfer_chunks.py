"""Prompt chunks by FlashInfer: what it is told of a step, and what it is asked for in vain.

Without the package a stand-in takes its place that reads the pages it is given, by plain torch.
"""

from __future__ import annotations

import importlib.machinery
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.backends.cuda import flashinfer_chunks
from headrace.backends.cuda.attention import Attention
from headrace.backends.cuda.chunk_choice import check_choice
from headrace.backends.cuda.device import Card
from headrace.backends.cuda.flashinfer_chunks import FlashInferChunks, unsupported
from headrace.config import PrefillAttention, Resolved
from headrace.errors import ConfigError
from headrace.kernels.attention import attend_reference
from headrace.kernels.attention_configs import decode_config
from headrace.kernels.tuned import Decoding
from headrace.runner.build_cuda import kernels_info
from tests.kernels.conftest import CUDA
from tests.kernels.test_step_attention import DEVICE, Step, spec_of

SPANS = [(33, 1), (0, 1), (20, 11), (0, 40), (31, 2), (16, 16), (5, 1)]
PLANS: list[dict[str, Any]] = []  # what the stand-in was told, one a call of plan


class Wrapper:
    """FlashInfer's BatchPrefillWithPagedKVCacheWrapper, as far as it is used."""

    def __init__(self, workspace: Tensor, kv_layout: str, *, backend: str) -> None:
        assert (workspace.dtype, kv_layout) == (torch.uint8, "HND")
        assert backend == "fa2"

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        seq_lens: Tensor,
        disable_split_kv: bool,
    ) -> None:
        lists = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, seq_lens)
        assert all(x.dtype == torch.int32 for x in lists)
        assert causal
        assert disable_split_kv, "the workspace has no room for parts"
        assert q_data_type == kv_data_type
        self._shape = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        self._scale = sm_scale
        names = ("queries", "page_ends", "pages", "last", "lengths")
        # Copies: the pinned memory is the caller's again.
        self._lists = [x.tolist() for x in lists]
        PLANS.append(dict(zip(names, self._lists, strict=True)) | {"scale": sm_scale})

    def run(
        self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor, enable_pdl: bool
    ) -> Tensor:
        assert not enable_pdl
        heads, kv_heads, d, page = self._shape
        k, v = paged_kv_cache
        queries, ends, pages, last, _ = self._lists
        assert q.shape == out.shape == (queries[-1], heads, d)
        assert k.shape[1:] == v.shape[1:] == (kv_heads, page, d)
        for i, tail in enumerate(last):
            own = pages[ends[i] : ends[i + 1]]
            keys, values = (
                x[own].transpose(0, 1).reshape(kv_heads, -1, d)[:, : (len(own) - 1) * page + tail]
                for x in (k, v)
            )
            mine = slice(queries[i], queries[i + 1])
            start = keys.shape[1] - (queries[i + 1] - queries[i])
            out[mine] = attend_reference(q[mine], keys, values, start, scale=self._scale)
        return out


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("flashinfer")
    module.__spec__ = importlib.machinery.ModuleSpec("flashinfer", None)
    module.BatchPrefillWithPagedKVCacheWrapper = Wrapper
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    PLANS.clear()


def with_flashinfer(step: Step) -> FlashInferChunks:
    spec, attention = step.spec, step.attention
    shape = (spec.heads, spec.kv_heads, spec.head_dim)
    chunks = FlashInferChunks(*shape, attention.scale, step.dtype, DEVICE)
    attention.choice.dense, attention.choice.library = None, chunks
    return chunks


@pytest.mark.skipif(CUDA, reason="the package itself is tried on the card")
def test_what_it_is_told_of_a_mixed_step(stand_in: None) -> None:
    step = Step(SPANS, spec_of(6, 2, 16), torch.float32)
    chunks = with_flashinfer(step)
    assert step.run() == 0
    assert not PLANS, "nothing is compiled: our kernel does all"
    cache = step.cache
    chosen = step.attention.prepare(cache.k, cache.v, cache.tables)
    assert chosen.value == "flashinfer"
    assert "fa2" in chosen.reason
    PLANS.clear()
    for _ in range(6):  # more often than there are turns
        assert step.run() == 0
    assert chunks.ready
    told = PLANS[-1]
    assert told["queries"] == [0, 11, 51, 53, 69, 70]
    assert told["lengths"] == [31, 40, 33, 32, 6]
    assert told["last"] == [15, 8, 1, 16, 6]
    assert told["page_ends"] == [0, 2, 5, 8, 10, 11]
    used = [(2, 2), (3, 3), (4, 3), (5, 2), (6, 1)]
    assert told["pages"] == [x for row, n in used for x in cache.tables[row, :n].tolist()]
    assert told["scale"] == 16**-0.5


@pytest.mark.skipif(CUDA, reason="the package itself is tried on the card")
def test_single_tokens_alone_are_no_business_of_it(stand_in: None) -> None:
    step = Step([(33, 1), (7, 1)], spec_of(2, 1, 16), torch.float32)
    with_flashinfer(step).prepare(step.cache.k, step.cache.v, step.cache.tables)
    PLANS.clear()
    step.run()
    assert not PLANS


def test_a_kernel_that_fails_is_an_error_of_the_setting(
    stand_in: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("ninja: " + "x" * 5000 + " no such file")

    if CUDA:
        monkeypatch.setattr(flashinfer_chunks, "kernel_for", lambda device: "fa2")
    step = Step([(0, 3)], spec_of(2, 1, 16), torch.float32)
    chunks = with_flashinfer(step)
    monkeypatch.setattr(Wrapper, "plan", fail)
    with pytest.raises(ConfigError, match=r"set it to auto.*ninja.*no such file") as raised:
        chunks.prepare(step.cache.k, step.cache.v, step.cache.tables)
    assert raised.value.param == "prefill_attention"
    assert len(str(raised.value)) < 2000
    assert not chunks.ready


def test_what_cannot_be_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def why(d: int = 128, installed: tuple[str, ...] = (), nvcc: bool = True) -> str:
        def find(name: str) -> object:
            return name if name in installed else None

        return unsupported(torch.bfloat16, d, cuda, find, lambda: nvcc)

    assert "float32: set dtype" in unsupported(torch.float32, 128, cuda)
    assert "head_dim 80" in why(80)
    assert "no CUDA device" in unsupported(torch.float16, 128, torch.device("cpu"))
    assert "pip install flashinfer-python" in why()
    assert "no nvcc" in why(installed=("flashinfer",), nvcc=False)
    assert not why(installed=("flashinfer", "flashinfer_jit_cache"), nvcc=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "pip install ninja" in why(installed=("flashinfer",))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "older than" in why(installed=("flashinfer",))


def test_where_nvcc_is_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("FLASHINFER_NVCC", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert not flashinfer_chunks._has_nvcc()
    (tmp_path / "bin").mkdir()
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.touch(0o755)
    assert flashinfer_chunks._has_nvcc()
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert flashinfer_chunks._has_nvcc()
    monkeypatch.setenv("FLASHINFER_NVCC", "no-such-nvcc")
    assert not flashinfer_chunks._has_nvcc()


@pytest.mark.parametrize("choice", ["cudnn", "flash", "flashinfer"])
def test_a_choice_that_cannot_be_is_refused(choice: PrefillAttention) -> None:
    with pytest.raises(ConfigError, match=f"prefill_attention = {choice}.*float32") as raised:
        check_choice(choice, torch.float32, 128, DEVICE)
    assert raised.value.param == "prefill_attention"
    for other in ("auto", "triton"):
        check_choice(other, torch.float32, 128, DEVICE)


def test_a_package_that_does_not_import_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ConfigError, match="cannot be imported") as raised:
        flashinfer_chunks.load()
    assert raised.value.param == "prefill_attention"


def test_auto_leaves_an_installed_package_alone_and_says_so(stand_in: None) -> None:
    step = Step([(0, 9)], spec_of(2, 1, 16), torch.float32)
    assert step.attention.choice.library is None
    cache = step.cache
    chosen = step.attention.prepare(cache.k, cache.v, cache.tables)
    assert chosen.value == "triton"
    assert "FlashInfer, which is installed, only with prefill_attention" in chosen.reason


def test_the_setting_decides(stand_in: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_chunks, "kernel_for", lambda device: "fa2")
    spec, decoding = spec_of(2, 1, 16), Decoding(decode_config(torch.float32, 16), 4)

    def build(choice: PrefillAttention) -> Attention:
        return Attention(
            spec, 4, 9, 1, torch.float32, DEVICE, lambda tokens: decoding, choice=choice
        )

    cache = Step([(0, 9)], spec, torch.float32).cache
    assert build("triton").prepare(cache.k, cache.v, cache.tables) == Resolved("triton", "as set")
    found = build("flashinfer").prepare(cache.k, cache.v, cache.tables)
    assert found.value == "flashinfer"
    with pytest.raises(ConfigError, match=r"prefill_attention = cudnn.*float32"):
        build("cudnn")


@pytest.mark.parametrize(
    ("value", "kernels"),
    [("triton", "triton"), ("flash", "triton+flash"), ("flashinfer", "triton+flashinfer")],
)
def test_the_choice_is_a_metric(value: str, kernels: str) -> None:
    card = Card("x", 0, 132, (9, 0))
    info = kernels_info(Resolved(value, "as set"), card)
    assert (info.backend, info.kernels, info.isa) == ("cuda", kernels, "sm_90")
    assert info.reason == f"prefill attention: {value} (as set)"


def missing_on_the_card(d: int = 128) -> str:
    return unsupported(torch.bfloat16, d, DEVICE)


@pytest.mark.skipif(bool(missing_on_the_card()), reason=f"FlashInfer: {missing_on_the_card()}")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mixed_step_on_the_card(dtype: torch.dtype) -> None:
    spans = [(700, 1), (0, 1), (0, 2000), (500, 300), (1000, 17), (0, 960), (90, 1)]
    step = Step(spans, spec_of(10, 2, 128), dtype)
    step.run()  # our kernel
    chunks = with_flashinfer(step)
    cache = step.cache
    chunks.prepare(cache.k, cache.v, cache.tables)
    for _ in range(6):
        step.run()
