"""Kernel tests run on the GPU where there is one, else in Triton's interpreter on the CPU."""

from __future__ import annotations

import os

import pytest
import torch

from tests.kernels import interpreter

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    interpreter.repair()

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


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
