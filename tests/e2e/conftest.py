"""Servers that several files of tests share: a start costs seconds."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.serve_process import ServeProcess
from tests.e2e.serving import Server

CONTEXT_TOKENS = 2048


@pytest.fixture(scope="session")
def shared_server() -> Iterator[Server]:
    """The fake model behind two HTTP processes. Tests change nothing that others would see."""
    with Server(
        workers=2,
        fake_step_ms=0.2,
        max_model_len=CONTEXT_TOKENS,
        max_body_bytes=100_000,
        scheduling_policy="priority",
    ) as running:
        yield running
        running.wait_idle()


@pytest.fixture(scope="session")
def thinking_server() -> Iterator[Server]:
    """The fake model as one that thinks."""
    options: dict[str, Any] = {"reasoning_parser": "think", "trust_request_chat_template": True}
    with Server(fake_step_ms=0.2, **options) as running:
        yield running
        running.wait_idle()


@pytest.fixture(scope="session")
def default_server() -> Iterator[ServeProcess]:
    """The default model on this machine's processor, in float32: equal prompts, equal answers."""
    options = ("--backend", "cpu", "--dtype", "float32", "--max-model-len", "2048")
    with tempfile.TemporaryDirectory(prefix="hr") as folder:
        places = (
            *("--kv-events-endpoint", f"ipc://{folder}/events"),
            *("--kv-events-replay-endpoint", f"ipc://{folder}/replay"),
        )
        with ServeProcess(*options, *places) as running:
            yield running
