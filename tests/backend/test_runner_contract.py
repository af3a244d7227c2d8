"""The runner contract, on every runner there is."""

from __future__ import annotations

from collections.abc import Callable

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
from tests.devices import BACKEND_PARAMS, BACKENDS, WITHOUT_NATIVE, load
from tests.golden.reference import tiny_model

INT8_KV = () if WITHOUT_NATIVE else (pytest.param("native-int8-kv", marks=pytest.mark.on_cpu),)


@pytest.fixture(scope="module")
def runners(tmp_path_factory: pytest.TempPathFactory) -> dict[str, MakeRunner]:
    folder = tmp_path_factory.mktemp("contract")
    tiny_model("llama-gqa", folder)
    files = ModelFiles("contract", "hf", folder)

    def make_fake() -> Runner:
        return FakeRunner(BLOCKS, BLOCK_SIZE, ROWS, MAX_MODEL_LEN, verify=True)

    def maker(backend: str, **more: str) -> MakeRunner:
        return lambda: load(
            backend,
            files,
            dtype="float32",
            kv_blocks=BLOCKS,
            block_size=BLOCK_SIZE,
            max_num_seqs=ROWS,
            max_model_len=MAX_MODEL_LEN,
            threads=1,
            **more,
        )

    made = {"fake": make_fake} | {backend: maker(backend) for backend in BACKENDS}
    return made | {"native-int8-kv": maker("native", kv_dtype="int8")}


@pytest.mark.parametrize("name", ["fake", *BACKEND_PARAMS, *INT8_KV])
@pytest.mark.parametrize(
    "clause",
    [*CONTRACT, *DRAW_CONTRACT, *POOL_CONTRACT, *TAP_CONTRACT],
    ids=lambda clause: clause.__name__,
)
def test_contract(
    clause: Callable[[MakeRunner], None], name: str, runners: dict[str, MakeRunner]
) -> None:
    clause(runners[name])
