"""Triton's key of itself is found once, in a thread, and whoever compiles waits for it."""

from __future__ import annotations

import threading

import pytest

from headrace.kernels import key
from headrace.kernels.launch import compiling


@pytest.fixture(autouse=True)
def not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key, "_finding", None)


def test_found_beside_and_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    found, go = list[str](), threading.Event()

    def triton_key() -> None:
        assert go.wait(60)
        found.append(threading.current_thread().name)

    monkeypatch.setattr(key, "triton_key", triton_key)
    key.find()
    key.find()
    assert not found, "it does not hold up who asked"
    go.set()
    with compiling(1):
        assert found == ["triton-key"]


def test_nobody_began() -> None:
    key.wait()


def test_a_failure_is_heard_of_where_the_key_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    def triton_key() -> None:
        raise OSError("no such library")

    monkeypatch.setattr(key, "triton_key", triton_key)
    key.find()
    key.wait()
