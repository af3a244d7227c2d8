"""Dense families through the CUDA runner in Triton's interpreter: logits of a few steps of every
way are those of the CPU runner. Those that ask nothing more of a backend are in the golden tests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.engine.protocol import Runner
from headrace.messages import StepPlan
from headrace.runner.cuda_runner import CudaRunner, Finished
from tests.backend.runner_contract import Steps
from tests.golden.families import _KINDS, FAMILIES, save
from tests.kernels import test_cuda_runner
from tests.kernels.conftest import CUDA
from tests.kernels.test_cuda_runner import MAX_MODEL_LEN, interpreted, on_the_cpu

pytestmark = pytest.mark.skipif(CUDA, reason="the golden tests run on the GPU itself")
small = test_cuda_runner.small
WINDOW, ORIGINAL = 5, 8
NAMES = (
    "llama-biases",
    "llama-longrope",
    "llama-dynamic",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3",
    "gemma3n",
    "gpt2",
    "mpt",
)
_LLAMA_LIKE = {
    "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "vocab_size": 35,
    "num_key_value_heads": 1, "num_hidden_layers": 1, "head_dim": 8,
    "max_position_embeddings": MAX_MODEL_LEN,
}  # fmt: skip
_OTHERS = {
    "GPT2": {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": MAX_MODEL_LEN, "n_inner": 24},
    "Mpt": {
        "d_model": 16,
        "n_heads": 2,
        "n_layers": 1,
        "max_seq_len": MAX_MODEL_LEN,
    },
}


def changes_of(name: str) -> dict[str, Any]:
    tiny = FAMILIES[name]
    if tiny.kind in _OTHERS:
        return _OTHERS[tiny.kind] | {"vocab_size": 35}
    changes: dict[str, Any] = dict(_LLAMA_LIKE)
    if tiny.window:
        changes["sliding_window"] = WINDOW
    if name == "gemma3":
        changes["num_hidden_layers"] = 2
        changes["layer_types"] = ["sliding_attention", "full_attention"]
    if name == "gemma3n":  # two layers share the K and V of the two before
        changes["num_hidden_layers"] = 4
        changes["layer_types"] = ["sliding_attention", "full_attention"] * 2
        changes["intermediate_size"] = [24, 20, 24, 24]
        changes["activation_sparsity_pattern"] = [0.8, 0.0, 0.0, 0.5]
        changes["vocab_size_per_layer_input"] = 30
        changes["head_dim"] = 16  # a program of q, k and v may take a head
    kind = name.removeprefix("llama-")
    if kind in _KINDS:
        changes["rope_parameters"] = _KINDS[kind] | (
            {} if kind == "dynamic" else {"original_max_position_embeddings": ORIGINAL}
        )
        if kind == "dynamic":
            changes["max_position_embeddings"] = ORIGINAL
    return changes


def logits_of(runner: Any, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The logits of each step that draws, as they come. Of the CUDA runner nothing is drawn: its
    sampler has tests of its own, and the interpreter takes long over it."""
    forward, found = runner._forward, list[Tensor]()
    if isinstance(runner, CudaRunner):

        def noted(plan: StepPlan, masks: object) -> Finished:
            if plan.draw_from:
                found.append(forward.place.buffers.logits[: forward._logit_rows].clone())
            return Finished(runner._at, None, [])

        monkeypatch.setattr(runner, "draw", noted)
        return found
    logits = forward.logits

    def noted_too(batch: Any) -> Any:
        made = logits(batch)
        found.extend([] if made is None else [torch.from_numpy(made.copy())])
        return made

    monkeypatch.setattr(forward, "logits", noted_too)
    return found


def run_steps(runner: Runner) -> None:
    """A short prompt, a chunk of a graph beside a decode, a step launched call by call, decodes
    past every window and context."""
    run = Steps(runner)

    def step() -> None:
        run.launch().result()

    run.join(0, [3, 1, 8, 7], prompt_tokens=3)
    run.forward(0, [11, 7, 3])
    step()
    run.join(1, [5, 2, 4], prompt_tokens=7)
    run.forward(0, [8])
    run.forward(1, [5, 30, 12, 12, 9, 33], draw_into=())
    step()
    run.join(2, [9, 10, 11], prompt_tokens=9)
    run.forward(1, [2])
    run.forward(2, [9, 1, 30, 2, 2, 34, 0, 8, 21])
    step()
    for row in (0, 1, 2):
        run.forward(row, [10 + row])
    step()


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_the_cpu(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, files = save(name, tmp_path, **changes_of(name))
    groups = 2 if name in ("gemma3", "gemma3n") else 1
    ours, reference = interpreted(files), on_the_cpu(files, groups)
    assert ours.capacity.windows == reference.capacity.windows
    assert len(reference.capacity.windows) == groups
    got, wanted = logits_of(ours, monkeypatch), logits_of(reference, monkeypatch)
    run_steps(ours)
    run_steps(reference)
    assert [x.shape for x in got] == [x.shape for x in wanted]
    assert len(got) == 4
    for mine, theirs in zip(got, wanted, strict=True):
        assert float((mine - theirs).abs().max() / theirs.abs().max()) < 1e-4
    ours.close()
    reference.close()


def test_a_vector_behind_a_layer_norm(tmp_path: Path) -> None:
    _, files = save("gpt2", tmp_path, **changes_of("gpt2"))
    said = []
    for runner in (interpreted(files), on_the_cpu(files)):
        run = Steps(runner)
        run.join(0, [3, 1, 8])
        run.forward(0, [11, 7, 3], draw_into=())
        run.pool("sum")
        (vector,) = run.launch().result().vectors
        said.append(np.frombuffer(vector, "<f4"))
        runner.close()
    np.testing.assert_allclose(said[0], said[1], rtol=1e-4, atol=1e-4)
