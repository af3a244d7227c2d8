"""The runner contract, on every runner there is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headrace.backends.fake import FakeRunner
from headrace.engine.protocol import Runner
from headrace.sources.files import ModelFiles
from tests.backend.draw_contract import DRAW_CONTRACT
from tests.backend.pool_contract import POOL_CONTRACT
from tests.backend.runner_contract import (
    BLOCK_SIZE,
    BLOCKS,
    CONTRACT,
    MAX_MODEL_LEN,
    ROWS,
    MakeRunner,
)
from tests.backend.tap_contract import TAP_CONTRACT
from tests.devices import BACKEND_PARAMS, BACKENDS, MARKS, WITHOUT_NATIVE, load
from tests.golden.families import save
from tests.golden.reference import tiny_model

INT8_KV = () if WITHOUT_NATIVE else (pytest.param("native-int8-kv", marks=pytest.mark.on_cpu),)

# Layers with a window that the contract's sequences outgrow: beside others, and alone.
WINDOWED: dict[str, dict[str, Any]] = {
    "gemma3": {
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 6,
    },
    "mistral": {"num_hidden_layers": 2, "sliding_window": 6},
}
WITH_WINDOWS = [
    pytest.param(f"{backend}-{name}", marks=MARKS[backend])
    for backend in BACKENDS
    if backend != "native"  # its tables are filled as torch's
    for name in WINDOWED
]


@pytest.fixture(scope="module")
def runners(tmp_path_factory: pytest.TempPathFactory) -> dict[str, MakeRunner]:
    folder = tmp_path_factory.mktemp("contract")
    tiny_model("llama-gqa", folder)
    files = ModelFiles("contract", "hf", folder)
    windowed = {
        name: save(name, tmp_path_factory.mktemp(name), **changes)[1]
        for name, changes in WINDOWED.items()
    }

    def make_fake() -> Runner:
        return FakeRunner(BLOCKS, BLOCK_SIZE, ROWS, MAX_MODEL_LEN, verify=True)

    def maker(backend: str, files: ModelFiles = files, groups: int = 1, **more: str) -> MakeRunner:
        return lambda: load(
            backend,
            files,
            dtype="float32",
            kv_blocks=groups * BLOCKS,
            block_size=BLOCK_SIZE,
            max_num_seqs=ROWS,
            max_model_len=MAX_MODEL_LEN,
            threads=1,
            **more,
        )

    made = {"fake": make_fake} | {backend: maker(backend) for backend in BACKENDS}
    for backend in BACKENDS:
        for name, groups in (("gemma3", 2), ("mistral", 1)):
            made[f"{backend}-{name}"] = maker(backend, windowed[name], groups)
    return made | {"native-int8-kv": maker("native", kv_dtype="int8")}


@pytest.mark.parametrize("name", ["fake", *BACKEND_PARAMS, *INT8_KV, *WITH_WINDOWS])
@pytest.mark.parametrize(
    "clause",
    [*CONTRACT, *DRAW_CONTRACT, *POOL_CONTRACT, *TAP_CONTRACT],
    ids=lambda clause: clause.__name__,
)
def test_contract(
    clause: Callable[[MakeRunner], None], name: str, runners: dict[str, MakeRunner]
) -> None:
    clause(runners[name])
