"""The CUDA runner in Triton's interpreter: its plans, tables, kernels and sampler, but no graphs.

On a machine with a GPU the contract suite runs it as users do; see `tests/backend`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from headrace.config import Settings
from headrace.engine.protocol import Capacity, Runner
from headrace.runner.build import load_model, read_facts
from headrace.sources.files import ModelFiles
from tests.backend.runner_contract import (
    BLOCK_SIZE,
    BLOCKS,
    CONTRACT,
    MAX_MODEL_LEN,
    ROWS,
    MakeRunner,
)
from tests.golden.reference import tiny_model
from tests.kernels.conftest import CUDA

pytestmark = pytest.mark.skipif(CUDA, reason="the contract suite runs on the GPU itself")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("interpreted")
    tiny_model("llama-gqa", folder)
    return folder


def interpreted(folder: Path, max_tokens: int) -> Runner:
    """A CudaRunner on CPU tensors."""
    from headrace.backends.cuda.buffers import Buffers
    from headrace.backends.cuda.device import Card
    from headrace.runner.build_cuda import Plan, forward_on
    from headrace.runner.cuda_runner import CudaRunner

    facts = read_facts(Settings(dtype="float32"), ModelFiles("interpreted", "hf", folder))
    model = load_model(facts.spec, facts.checkpoint, torch.float32)
    plan = Plan(ROWS, max_tokens, BLOCK_SIZE, MAX_MODEL_LEN)
    card = Card("interpreter", 0, 0, 2, (0, 0))
    buffers = Buffers(facts.spec, max_tokens, ROWS, torch.float32, torch.device("cpu"))
    forward = forward_on(model, plan, BLOCKS, card, buffers)
    capacity = Capacity([BLOCKS], BLOCK_SIZE, ROWS, MAX_MODEL_LEN, facts.spec.vocab_size)
    return CudaRunner(forward, capacity)


@pytest.mark.parametrize("clause", CONTRACT, ids=lambda clause: clause.__name__)
def test_contract(clause: Callable[[MakeRunner], None], folder: Path) -> None:
    clause(lambda: interpreted(folder, 64))
