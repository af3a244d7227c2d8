"""`kv_dtype`: what the cache holds, what it costs, how close int8 stays, and who refuses it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.backends.choose import settled
from headrace.backends.cpu.kv_memory import KvMemory
from headrace.config import Settings
from headrace.errors import ConfigError
from headrace.models.kv_layout import layout_of
from headrace.runner import ledger
from headrace.runner.build import explain, load_runner
from tests.backend.test_ledger import SPEC
from tests.backend.test_quantization import NATIVE, folder, logits
from tests.devices import kv_tensors


@pytest.mark.parametrize(
    ("dtype", "line_bytes"),
    [("float32", 32), ("bfloat16", 16), ("int8", 8 + 4)],
)
def test_bytes_of_a_token(dtype: str, line_bytes: int) -> None:
    """K and V of 4 layers and 2 heads of 8."""
    token_bytes = ledger.kv_block_bytes(SPEC, layout_of(SPEC), dtype, 1)
    assert token_bytes == 2 * 4 * 2 * line_bytes
    memory = KvMemory(layers=4, blocks=9, kv_heads=2, block_size=5, head_dim=8, dtype=dtype)
    assert memory.size_bytes == 10 * 5 * token_bytes


def test_copies_take_the_scales_along() -> None:
    memory = KvMemory(layers=2, blocks=4, kv_heads=2, block_size=3, head_dim=8, dtype="int8")
    assert len(memory.arrays()) == 8
    for i, array in enumerate(memory.arrays()):
        for block in range(4):
            array[block] = 10 * i + block
    memory.copy([(0, 1), (1, 2)])
    for i, array in enumerate(memory.arrays()):
        assert [int(array[block].flat[0]) - 10 * i for block in range(4)] == [0, 0, 1, 3]


@NATIVE
@pytest.mark.parametrize(
    ("kv_dtype", "low", "high"),
    [("float32", 0, 0), ("float16", 1e-6, 1e-3), ("bfloat16", 1e-5, 8e-3), ("int8", 1e-4, 1.5e-2)],
)
def test_close_to_a_float_cache(tmp_path: Path, kv_dtype: str, low: float, high: float) -> None:
    files = folder(tmp_path)
    wanted, _ = logits(files)
    got, lines = logits(files, kv_dtype=kv_dtype)
    assert low <= float((got - wanted).norm() / wanted.norm()) <= high
    spec = load_spec(files)
    per_token = ledger.kv_block_bytes(spec, layout_of(spec), kv_dtype, 1)
    (line,) = [line for line in lines if line.startswith("KV cache")]
    assert f"tokens of {per_token} bytes" in line


def load_spec(files: Any) -> Any:
    from headrace.models.spec import read_spec

    return read_spec(files)


@NATIVE
def test_int8_with_every_other_setting(tmp_path: Path) -> None:
    """The settings do not depend on each other, and `headrace config` counts with them."""
    files = folder(tmp_path)
    chosen: dict[str, Any] = {"quantization": "int8", "cpu_precision": "fast", "kv_dtype": "int8"}
    settings = settled(Settings(backend="cpu", kv_memory="1MiB", **chosen))
    runner, info = load_runner(settings, files, lambda phase, seconds: None)
    assert {tensor.dtype for tensor in kv_tensors(runner)} == {torch.int8}
    blocks = 2**20 // (ledger.kv_block_bytes(info.spec, layout_of(info.spec), "int8", 1) * 16)
    assert info.kv_blocks.value == explain(settings, files)["kv_blocks"].value == blocks
    runner.close()


def test_torch_refuses_what_it_has_not(tmp_path: Path) -> None:
    files = folder(tmp_path)
    chosen: dict[str, Any] = {"dtype": "float32", "cpu_kernels": "torch", "kv_blocks": 8}
    for kv_dtype in ("int8", "bfloat16"):
        settings = settled(Settings(backend="cpu", kv_dtype=kv_dtype, **chosen))
        with pytest.raises(ConfigError, match=f"kv_dtype = {kv_dtype} .* native kernels") as caught:
            load_runner(settings, files, lambda phase, seconds: None)
        assert caught.value.param == "kv_dtype"
    settings = settled(Settings(backend="cpu", kv_dtype="float32", **chosen))
    load_runner(settings, files, lambda phase, seconds: None)[0].close()


def test_other_backends_refuse() -> None:
    from headrace.bench.naive import refuse

    with pytest.raises(ConfigError, match="cannot honour kv_dtype = 'int8'"):
        refuse(Settings(engine="naive", kv_dtype="int8"))
    with pytest.raises(ConfigError, match="cannot honour kv_dtype = 'int8'"):
        settled(Settings(backend="fake", kv_dtype="int8"))
