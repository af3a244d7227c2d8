"""`quantization`: a float checkpoint becomes int8 or int4 on load; what cannot be is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from headrace.backends.choose import settled
from headrace.backends.cpu.batch import Batch
from headrace.config import Settings
from headrace.errors import ConfigError
from headrace.native import build as native_build
from headrace.runner import build_cpu
from headrace.runner.build import load_runner
from headrace.sources.files import ModelFiles
from tests.backend.test_weights import hf_folder
from tests.devices import WITHOUT_NATIVE

NATIVE = pytest.mark.skipif(bool(WITHOUT_NATIVE), reason=WITHOUT_NATIVE)
SIZES = {"hidden_size": 96, "intermediate_size": 256, "vocab_size": 300, "num_hidden_layers": 3}


def folder(path: Path, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> ModelFiles:
    files, tensors = hf_folder(path, **(SIZES | changes))
    scaled = {n: t if t.ndim == 1 else t * t.shape[1] ** -0.5 for n, t in tensors.items()}
    save_file({n: t.to(dtype) for n, t in scaled.items()}, path / "model.safetensors")
    return files


def logits(files: ModelFiles, **fields: Any) -> tuple[torch.Tensor, list[str]]:
    """[64, vocab], one token a sequence's end, and the ledger."""
    chosen: dict[str, Any] = {"dtype": "float32", "kv_blocks": 64, "max_num_seqs": 64} | fields
    settings = settled(Settings(backend="cpu", **chosen))
    runner, info = load_runner(settings, files, lambda phase, seconds: None)
    rows = list(range(64))
    ids = torch.randint(0, 300, (64 * 4,), generator=torch.Generator().manual_seed(3))
    tables = np.arange(64).reshape(1, 64, 1)
    batch = Batch(ids.numpy(), tables, rows, [0] * 64, [4] * 64, [], rows)
    inner: Any = runner
    out = inner.worker.submit(lambda: inner._forward.logits(batch).copy()).result()
    runner.close()
    return torch.from_numpy(out), info.ledger


@NATIVE
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("quantization", "worst", "types"),
    [("int8", 0.02, "packed as Q8_0"), ("int4", 0.3, "packed as Q4_1, Q8_0")],
)
def test_close_to_the_float_model(
    tmp_path: Path, dtype: torch.dtype, quantization: str, worst: float, types: str
) -> None:
    files = folder(tmp_path, dtype)
    wanted, _ = logits(files)
    got, ledger = logits(files, quantization=quantization)
    error = float((got - wanted).norm() / wanted.norm())
    assert 1e-4 < error < worst, "not quantised, or badly"
    assert any(types in line for line in ledger), ledger


@NATIVE
def test_rows_that_blocks_do_not_fill_stay_and_say_so(tmp_path: Path) -> None:
    files = folder(tmp_path, hidden_size=80, num_attention_heads=5, num_key_value_heads=1)
    _, ledger = logits(files, quantization="int8")
    assert any("Q8_0" in line and "bfloat16" in line for line in ledger), ledger


@NATIVE
def test_random_weights_are_quantised_too(tmp_path: Path) -> None:
    files = folder(tmp_path)
    wanted, _ = logits(files, load_format="dummy")
    got, ledger = logits(files, load_format="dummy", quantization="int4")
    assert 1e-4 < float((got - wanted).norm() / wanted.norm()) < 0.3
    assert any("packed as Q4_1, Q8_0" in line for line in ledger), ledger


def test_a_packed_file_is_refused(default_model: ModelFiles) -> None:
    settings = settled(Settings(backend="cpu", quantization="int8", kv_blocks=8))
    with pytest.raises(
        ConfigError, match=r"quantization = int8: .*gguf is packed already \(Q4_1"
    ) as e:
        load_runner(settings, default_model, lambda phase, seconds: None)
    assert e.value.param == "quantization"


def test_torch_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = folder(tmp_path)
    changes: list[dict[str, Any]] = [{"cpu_kernels": "torch"}, {}]
    for change in changes:
        missing = native_build.Unavailable("no C++ compiler on PATH", "install one")
        monkeypatch.setattr(build_cpu, "load", lambda missing=missing: missing)
        settings = settled(Settings(backend="cpu", quantization="int4", kv_blocks=8, **change))
        with pytest.raises(ConfigError, match="quantization = int4 needs native kernels") as caught:
            load_runner(settings, files, lambda phase, seconds: None)
        assert caught.value.param == "quantization"


@pytest.mark.parametrize("backend", ["fake", "naive"])
def test_other_backends_refuse(backend: str) -> None:
    if backend == "naive":
        from headrace.bench.naive import refuse

        with pytest.raises(ConfigError, match="cannot honour quantization = 'int8'"):
            refuse(Settings(engine="naive", quantization="int8"))
        return
    with pytest.raises(ConfigError, match="cannot honour quantization = 'int8'"):
        settled(Settings(backend="fake", quantization="int8"))
