"""What a start compiles is all that steps launch, each kernel with the constants that make it
another one. Nothing is compiled here: launches in the interpreter are written down."""

from __future__ import annotations

import contextlib
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import GridExecutor

from headrace.runner import forward as runner_forward
from tests.backend.runner_contract import Steps
from tests.golden.families import save
from tests.kernels import test_cuda_runner
from tests.kernels.conftest import CUDA
from tests.kernels.test_cuda_runner import interpreted

pytestmark = pytest.mark.skipif(CUDA, reason="counts launches of Triton's interpreter")
small = test_cuda_runner.small
ROWS, MAX_TOKENS = 70, 72


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> set[Any]:
    """Kernels with their constants and the types of their tensors. None is run."""
    seen = set[Any]()

    def call(executor: Any, *args: Any, **options: Any) -> None:
        names = inspect.signature(executor.fn).parameters
        known = {name: value for name, value in options.items() if name in names}
        given = inspect.getcallargs(executor.fn, *args, **known)
        facts = {
            name: value if name in executor.constexprs else getattr(value, "dtype", None)
            for name, value in given.items()
        }
        seen.add((executor.fn.__name__, str(facts)))

    monkeypatch.setattr(GridExecutor, "__call__", call)
    return seen


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "deepseek-v2", "gpt-oss"])
@pytest.mark.parametrize("rows", [5, 17, 40, ROWS])
@pytest.mark.parametrize("last", [1, 2])  # tokens of the last row: alone, or a chunk
def test_more_single_tokens_than_a_graph_holds(
    name: str,
    rows: int,
    last: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    launched: set[Any],
) -> None:
    monkeypatch.setattr(test_cuda_runner, "ROWS", ROWS)
    monkeypatch.setattr(test_cuda_runner, "MAX_TOKENS", MAX_TOKENS)
    monkeypatch.setattr(test_cuda_runner, "BLOCKS", ROWS + 1)
    _, files = save(name, tmp_path)
    runner = interpreted(files, folded=True)  # products are the library's
    monkeypatch.setattr(runner_forward, "compiling", lambda workers: contextlib.nullcontext())
    runner._forward.compile(1)
    compiled, steps = set(launched), Steps(runner)
    for row in range(rows):
        steps.join(row, [row])
        steps.forward(row, [row] * (last if row == rows - 1 else 1))
    launched.clear()
    with torch.inference_mode():
        steps.launch()
    late = launched - compiled
    assert launched
    assert not late, late
