"""Mixtures of experts and latent attention through the CUDA runner in Triton's interpreter, against
the CPU runner: short prompts, a chunk of a graph, one launched call by call, steady decodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.engine.protocol import Runner
from tests.backend.runner_contract import Steps
from tests.golden.families import save
from tests.kernels import test_cuda_runner
from tests.kernels.conftest import CUDA
from tests.kernels.test_cuda_runner import interpreted, on_the_cpu

pytestmark = pytest.mark.skipif(CUDA, reason="the golden tests run on the GPU itself")
small = test_cuda_runner.small

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 67,
    "moe_intermediate_size": 8,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 2,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}


def steps(runner: Runner) -> list[int]:
    """Tokens of a few steps of every way."""
    run, said = Steps(runner), []
    run.join(0, [3, 1, 8])
    run.forward(0, [11, 7, 3])
    said += run.run()
    run.join(1, [5, 2])
    run.forward(0, None)
    run.forward(1, [5, 60, 42, 42, 9, 33], draw_into=())
    said += run.run()
    run.forward(1, [2])
    said += run.run()
    run.join(2, [9, 10, 11])
    run.forward(1, None)
    run.forward(2, [9, 1, 30, 2, 2, 66, 0, 8, 51])
    said += run.run()
    return said


@pytest.mark.parametrize("folded", [False, True])
def test_as_on_the_cpu(tmp_path: Path, folded: bool) -> None:
    _, files = save("deepseek-v2", tmp_path, **SIZES, **LATENT)
    ours, reference = interpreted(files, folded=folded), on_the_cpu(files)
    before = [dict(runner.counters()) for runner in (ours, reference)]
    assert steps(ours) == steps(reference)
    after = [dict(runner.counters()) for runner in (ours, reference)]
    (counts, expected) = (
        {key: new[key] - old[key] for key in new if "expert" in key}
        for new, old in zip(after, before, strict=True)
    )
    assert sum(expected.values()) > 0
    # Ours takes all tokens of a small step through the last layer, whoever is drawn from.
    assert all(counts[key] >= expected[key] for key in expected)
    ours.close()
    reference.close()
