"""Vectors of the CUDA runner in Triton's interpreter, against the CPU runner, on every way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headrace.engine.protocol import Runner
from headrace.sources.files import ModelFiles
from tests.backend.runner_contract import Steps
from tests.golden.classifiers import tiny_classifier
from tests.kernels.conftest import CUDA
from tests.kernels.test_cuda_runner import FIRST, LONG, interpreted, on_the_cpu, small

pytestmark = pytest.mark.skipif(CUDA, reason="the contract suite runs on the GPU itself")
__all__ = ["small"]  # used by pytest

SIZES: dict[str, Any] = {
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "vocab_size": 67,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return tiny_classifier("qwen2", tmp_path_factory.mktemp("classifier"), 3, **SIZES)[1]


def scenario(runner: Runner) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
    steps, said = Steps(runner), list[np.ndarray[Any, np.dtype[np.float32]]]()

    def pooled() -> None:
        said.extend(np.frombuffer(raw, "<f4") for raw in steps.launch().result().vectors)

    steps.join(0, [3, 1, 8])
    steps.forward(0, FIRST, draw_into=())
    steps.pool("sum")
    pooled()  # alone
    steps.join(1, [5, 2])
    steps.forward(0, [4], draw_into=())
    steps.pool("scores")
    steps.forward(1, LONG[:5], draw_into=())
    steps.pool("sum")
    pooled()  # mixed, whole
    steps.forward(0, [9], draw_into=())
    steps.forward(1, [*LONG[5:], 1], draw_into=())
    steps.pool("scores")
    steps.join(2, [6, 7, 9])
    steps.forward(2, [8, 8], draw_into=())
    steps.pool("last")
    pooled()  # mixed, narrowed to two tokens
    return said


def test_a_scenario_yields_the_vectors_of_the_cpu(files: ModelFiles) -> None:
    runner = interpreted(files)
    got, want = scenario(runner), scenario(on_the_cpu(files))
    assert len(got) == len(want) == 5
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
    ways = {name: count for name, count in runner.counters().items() if name.startswith("steps_")}
    assert ways["steps_alone"] > 0
    assert ways["steps_mixed"] + ways["steps_crowd"] > 0
    runner.close()
