"""Fixtures shared by all tests."""

from __future__ import annotations

import pytest

from headrace.sources.files import ModelFiles
from headrace.sources.resolve import resolve


@pytest.fixture(scope="session")
def default_model() -> ModelFiles:
    """SmolLM2-135M-Instruct. Downloaded into the normal cache once; fails where that fails."""
    return resolve("", say=print)
