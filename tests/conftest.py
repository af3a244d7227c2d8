"""Fixtures shared by all tests."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

from headrace.sources.files import ModelFiles
from headrace.sources.resolve import resolve
from tests.devices import BACKEND_PARAMS, WITHOUT_BROWSER, WITHOUT_CUDA, WITHOUT_NATIVE

if WITHOUT_CUDA:
    # Before anything imports triton, as transformers does: what triton has made by then stays
    # compiled, and kernel tests could not be interpreted any more.
    os.environ["TRITON_INTERPRET"] = "1"


# How long an example takes says how busy the machine is.
settings.register_profile(
    "untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("untimed")


@pytest.fixture(scope="session", params=BACKEND_PARAMS)
def backend(request: pytest.FixtureRequest) -> str:
    """cpu (torch), native (cpu, C++) with a compiler, cuda with a device; the summary says so."""
    name: str = request.param
    return name


@pytest.fixture(scope="session")
def default_model() -> ModelFiles:
    """SmolLM2-135M-Instruct. Downloaded into the normal cache once; fails where that fails."""
    return resolve("", say=print)


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "default_model" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.model)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if WITHOUT_CUDA:
        terminalreporter.write_line(f"NOT RUN: tests on the cuda backend: {WITHOUT_CUDA}")
    if WITHOUT_NATIVE:
        terminalreporter.write_line(f"NOT RUN: tests on native kernels: {WITHOUT_NATIVE}")
    if WITHOUT_BROWSER:
        terminalreporter.write_line(f"NOT RUN: tests of the live page: {WITHOUT_BROWSER}")
