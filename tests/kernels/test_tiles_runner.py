"""Gate and up over tiles in whole steps of the CUDA runner, in Triton's interpreter: which steps
and layers take them, and that no token changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.sources.files import ModelFiles
from tests.golden.families import save
from tests.kernels import test_cuda_runner
from tests.kernels.conftest import CUDA
from tests.kernels.test_cuda_runner import interpreted, on_the_cpu, scenario

pytestmark = pytest.mark.skipif(CUDA, reason="the contract suite runs on the GPU itself")
small = test_cuda_runner.small
files = test_cuda_runner.files


def over_tiles(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[int]]:
    """A configuration of gate and up, and tokens of the products that went over its tiles."""
    from headrace.backends.cuda import ops
    from headrace.kernels import gate_up_tiles as tiled

    seen: list[int] = []
    run = tiled.gate_up_tiles

    def noted(x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        seen.append(x.shape[0])
        return run(x, *args, **options)

    monkeypatch.setattr(ops, "gate_up_tiles", noted)
    for module in (ops, tiled):  # the interpreter takes float32, whose tokens are the CPU's
        monkeypatch.setattr(module, "fits", lambda x, weight: True)
    monkeypatch.setattr(ops.CudaOps, "_config", lambda *args: None)
    return tiled.TileConfig(tokens=16, columns=16, depth=16, flat=False), seen


@pytest.mark.parametrize("folded", [False, True], ids=["plain", "folded"])
def test_gate_and_up_over_tiles(
    files: ModelFiles, monkeypatch: pytest.MonkeyPatch, *, folded: bool
) -> None:
    config, seen = over_tiles(monkeypatch)
    runner = interpreted(files, folded=folded, tiles=config)
    assert scenario(runner) == scenario(on_the_cpu(files))
    assert seen, "a step of four tokens or more goes over tiles"
    runner.close()


def test_gate_and_up_with_a_bias_are_the_librarys(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The kernel of tiles has none."""
    _, files = save("llama-biases", tmp_path)
    config, seen = over_tiles(monkeypatch)
    runner = interpreted(files, tiles=config)
    assert scenario(runner) == scenario(on_the_cpu(files))
    assert not seen
    runner.close()


def test_layers_that_leave_out_small_gates_are_the_librarys(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two of the five do, between product and activation."""
    _, files = save("gemma3n", tmp_path)
    config, seen = over_tiles(monkeypatch)
    runner = interpreted(files, tiles=config)
    with torch.inference_mode():
        runner._forward._pad("alone", 4)
        runner._forward._graph_work("alone", 4)
    assert seen == [4] * 3
    runner.close()
