"""Attention of single tokens reads columns and tables before it waits: in every way of every family
a kernel that passes on (`kernels.pdl`) comes between it and what writes them. Nothing is computed.
"""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import GridExecutor

from headrace.runner.cuda_runner import Finished
from tests.golden.families import save
from tests.kernels import test_cuda_runner
from tests.kernels.conftest import CUDA
from tests.kernels.test_cuda_runner import interpreted
from tests.kernels.test_family_runner import run_steps

pytestmark = pytest.mark.skipif(CUDA, reason="looks at launches of Triton's interpreter")
small = test_cuda_runner.small
NAMES = ("qwen2", "qwen3", "gpt2", "mpt", "llama-longrope", "gemma3", "gemma3n", "qwen3-moe")
WRITERS = {"begin_kernel", "_poke_kernel"}
READER = "_decode_kernel"


@functools.cache
def passes_on(kernel: Any) -> bool:
    """Whether every program waits before it releases."""
    head, found, _ = inspect.getsource(kernel).partition("pdl.pass_on(")
    return bool(found) and "pdl.release(" not in head


def check(kernels: list[Any]) -> None:
    """Of steps, in the order of their launches."""
    names = [kernel.__name__ for kernel in kernels]
    assert READER in names
    assert WRITERS & {*names}
    passed = False
    for kernel, name in zip(kernels, names, strict=True):
        assert passed or name != READER, names
        passed = name not in WRITERS and (passed or passes_on(kernel))


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_columns_are_passed_on(
    name: str, folded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[Any] = []
    monkeypatch.setattr(
        GridExecutor, "__call__", lambda executor, *args, **options: launched.append(executor.fn)
    )
    _, files = save(name, tmp_path)
    runner = interpreted(files, folded=folded)
    forward = runner._forward
    with torch.inference_mode():
        for way, size in (key for part in forward._graph_list() for key in part):
            forward._pad(way, size)
            launched.clear()
            forward._graph_work(way, size)
            check(launched)
    launched.clear()
    monkeypatch.setattr(runner, "draw", lambda plan, masks: Finished(runner._at, None, []))
    run_steps(runner)
    check(launched)
    assert runner.counters()["steps_eager"] > 0
    runner.close()
