"""The runner contract, on every runner there is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headrace.backends.fake import FakeRunner
from headrace.config import Settings
from headrace.engine.protocol import Runner
from headrace.runner.build import load_runner
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


@pytest.fixture(scope="module")
def runners(tmp_path_factory: pytest.TempPathFactory) -> dict[str, MakeRunner]:
    folder = tmp_path_factory.mktemp("contract")
    tiny_model("llama-gqa", folder)
    settings = Settings(
        backend="cpu",
        dtype="float32",
        kv_blocks=BLOCKS,
        block_size=BLOCK_SIZE,
        max_num_seqs=ROWS,
        max_num_batched_tokens=64,
        max_model_len=MAX_MODEL_LEN,
        threads=1,
    )

    def make_fake() -> Runner:
        return FakeRunner(BLOCKS, BLOCK_SIZE, ROWS, MAX_MODEL_LEN, verify=True)

    def make_cpu() -> Runner:
        files = ModelFiles("contract", "hf", folder)
        return load_runner(settings, files, lambda phase, seconds: None)[0]

    return {"fake": make_fake, "cpu": make_cpu}


@pytest.mark.parametrize("name", ["fake", "cpu"])
@pytest.mark.parametrize("clause", CONTRACT, ids=lambda clause: clause.__name__)
def test_contract(
    clause: Callable[[MakeRunner], None], name: str, runners: dict[str, MakeRunner]
) -> None:
    clause(runners[name])
