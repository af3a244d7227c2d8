"""What is launched before a graph is recorded brings every kernel of the graph to the device: the
same kernels with the same constants, the same products, in fewer layers. Nothing is computed."""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

from headrace.runner.calibrate import Probe
from tests.golden.families import save
from tests.kernels import test_cuda_runner
from tests.kernels.conftest import CUDA
from tests.kernels.test_cuda_runner import MAX_TOKENS, interpreted

pytestmark = pytest.mark.skipif(CUDA, reason="counts launches of Triton's interpreter")
small = test_cuda_runner.small
NAMES = ("qwen2", "qwen3", "gpt2", "gemma3", "gemma3n", "deepseek-v2", "gpt-oss", "qwen3-moe")


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Kernels with their types and constants, library operations with their shapes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = Counter[Any]()
        monkeypatch.setattr(GridExecutor, "__call__", self._launched())

    def _launched(self) -> Any:
        def call(executor: Any, *args: Any, **options: Any) -> None:
            names = inspect.signature(executor.fn).parameters
            given = inspect.getcallargs(
                executor.fn, *args, **{k: v for k, v in options.items() if k in names}
            )
            facts = [
                (name, value if name in executor.constexprs else _kind(value))
                for name, value in given.items()
            ]
            self.seen[executor.fn.__name__, str(facts)] += 1

        return call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func), str([_kind(arg) for arg in args])] += 1
        return func(*args, **(kwargs or {}))

    def taken(self) -> Counter[Any]:
        seen, self.seen = self.seen, Counter()
        return seen


def _kind(value: Any) -> Any:
    """What makes a kernel another: the type of a tensor, and what a product's shape decides."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.stride()
    return type(value)


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_fewer_layers_launch_every_kernel(
    name: str, folded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, files = save(name, tmp_path)
    forward = interpreted(files, folded=folded)._forward
    with Launches(monkeypatch) as launches, torch.inference_mode():
        for way, size in (key for part in forward._graph_list() for key in part):
            forward._pad(way, size)
            launches.taken()
            forward._graph_load(way, size)
            loaded = launches.taken()
            forward._graph_work(way, size)
            work = launches.taken()
            assert work.keys() <= loaded.keys(), (way, size)


def test_many_layers_are_loaded_by_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, files = save("qwen3", tmp_path, num_hidden_layers=8)
    forward = interpreted(files)._forward
    with Launches(monkeypatch) as launches, torch.inference_mode():
        forward._graph_load("mixed", 8)
        loaded = launches.taken()
        forward._graph_work("mixed", 8)
        assert loaded.total() < launches.taken().total() / 2


def test_the_largest_step_is_seen_in_two_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels and products of a step are those of one in which every layer ran; and it takes
    the memory that they take."""
    _, files = save("qwen3", tmp_path, num_hidden_layers=8)
    forward, seen = interpreted(files, folded=True)._forward, []
    plan = Probe(forward)._plan([], [], 0, MAX_TOKENS)
    assert forward.way(plan) == "eager"
    with Launches(monkeypatch) as launches, torch.inference_mode():
        for layers in (contextlib.nullcontext(), forward.fewer_layers(), contextlib.nullcontext()):
            launches.taken()
            with layers:
                forward.run(plan)
            seen.append(launches.taken())
    every, fewer, again = seen
    assert fewer.keys() == every.keys()
    assert fewer.total() < every.total() / 2
    assert again.total() == every.total()
