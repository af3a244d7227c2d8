"""The runner contract, on every runner there is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headrace.backends.fake import FakeRunner
from headrace.engine.protocol import Runner
from tests.backend.runner_contract import (
    BLOCK_SIZE,
    BLOCKS,
    CONTRACT,
    MAX_MODEL_LEN,
    ROWS,
    MakeRunner,
)


def make_fake() -> Runner:
    return FakeRunner(BLOCKS, BLOCK_SIZE, ROWS, MAX_MODEL_LEN, verify=True)


RUNNERS: dict[str, MakeRunner] = {"fake": make_fake}


@pytest.mark.parametrize("name", RUNNERS)
@pytest.mark.parametrize("clause", CONTRACT, ids=lambda clause: clause.__name__)
def test_contract(clause: Callable[[MakeRunner], None], name: str) -> None:
    clause(RUNNERS[name])
