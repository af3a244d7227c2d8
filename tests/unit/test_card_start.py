"""What a start on a GPU does beside its imports; there is no GPU here, and no torch."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace import bytecode, config, kernels, launch
from headrace.backends.cuda import context
from headrace.runner import build
from headrace.sources.files import ModelFiles

FILES = ModelFiles("m", "hf", Path("m"))


class Driver:
    """Writes down what it is asked; `fails`: the call that returns an error."""

    def __init__(self, fails: str = "") -> None:
        self.asked: list[str] = []
        self._fails = fails

    def __getattr__(self, name: str) -> Any:
        def call(*_: Any) -> int:
            self.asked.append(name)
            return int(name == self._fails)

        return call


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setenv("CUDA_MODULE_LOADING", "")  # known to monkeypatch, which takes back ours
    monkeypatch.delenv("CUDA_MODULE_LOADING")


ALL = ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]


@pytest.mark.parametrize(("fails", "asked"), [("", ALL), ("cuInit", ALL[:1]), (ALL[1], ALL[:2])])
def test_the_first_device_gets_its_context(
    without_torch: None, monkeypatch: pytest.MonkeyPatch, fails: str, asked: list[str]
) -> None:
    driver = Driver(fails)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    thread = context.make_ahead()
    assert thread is not None
    thread.join()
    assert driver.asked == asked
    assert os.environ["CUDA_MODULE_LOADING"] == "LAZY", "as torch would have set it"


def test_no_driver_is_left_to_torch(without_torch: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "_DRIVER", "libthere-is-none.so.1")
    thread = context.make_ahead()
    assert thread is not None
    thread.join()  # a thread that raises is an error of the test


def test_where_torch_is_it_has_the_say(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace())
    assert context.make_ahead() is None
    assert driver.asked == []


@pytest.mark.parametrize("backend", ["cuda", "cpu"])
def test_a_card_is_made_ready_while_its_runner_is_imported(
    monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    did: list[Any] = []

    def load_runner(*_: Any) -> Any:
        did.append(("load", gc.isenabled()))
        return "runner", SimpleNamespace(ledger=[])

    @contextlib.contextmanager
    def kept(package: str, folder: Path) -> Iterator[None]:
        did.append((package, folder.name))
        yield

    find = SimpleNamespace(find=lambda: did.append("key"))
    monkeypatch.setattr(context, "make_ahead", lambda: did.append("context"))
    monkeypatch.setattr(kernels, "key", find, raising=False)
    monkeypatch.setattr(launch, "importlib", SimpleNamespace(import_module=did.append))
    monkeypatch.setattr(bytecode, "kept", kept)
    monkeypatch.setattr(build, "load_runner", load_runner)
    settings = config.load({"backend": backend})[0]
    launch._load_runner(settings, FILES, lambda *_: None, None)
    imported = ["context", "key", "headrace.runner.load_cuda"]
    on_card = [("torch", "bytecode"), *imported, ("load", False)]
    assert did == (on_card if backend == "cuda" else [("load", True)])
    assert gc.isenabled()


def test_what_a_load_made_is_old_and_not_searched_again() -> None:
    with launch._garbage_kept():
        made: list[Any] = [[] for _ in range(10)]
        assert not gc.isenabled()
    assert gc.isenabled()
    assert any(one is made for one in gc.get_objects(generation=2))
    assert gc.get_freeze_count() == 0


def test_what_the_caller_froze_stays_frozen() -> None:
    gc.freeze()
    try:
        with launch._garbage_kept():
            pass
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()
