"""Kernel tests run on the GPU where there is one, else in Triton's interpreter on the CPU."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from tests.devices import WITHOUT_CUDA

CUDA = not WITHOUT_CUDA  # one answer for all tests: tests/conftest.py sets triton's variable by it
TRITON = importlib.util.find_spec("triton") is not None
if not TRITON:
    collect_ignore_glob = ["test_*.py"]
elif not CUDA:
    from tests.kernels import interpreter

    interpreter.check()
    interpreter.repair()

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not TRITON:
        why = "triton is not installed (it is for Linux: pip install triton)"
        terminalreporter.write_line(f"NOT RUN: tests/kernels: {why}")


@pytest.fixture(autouse=True)
def still_interpreted() -> None:
    """Kernels that a test imports are interpreted too, whatever ran before it."""
    if TRITON and not CUDA:
        interpreter.check()


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Draws are a test's own: one far draw in thousands is too much for the interpreter's exp."""
    torch.manual_seed(0)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if CUDA else "cpu")


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """||out - reference|| / ||reference||; NaN where out holds one."""
    reference = reference.double()
    return float((out.double() - reference).norm() / reference.norm().clamp(min=1e-30))


def assert_close(out: torch.Tensor, reference: torch.Tensor, dtype: torch.dtype) -> None:
    """Fails on a NaN too."""
    error = relative_error(out, reference)
    assert error < TOLERANCES[dtype], f"relative error {error:.2e} in {dtype}"
