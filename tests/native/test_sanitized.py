"""The other tests of this folder once more, with the address and undefined-behaviour sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPILER = os.environ.get("CXX", "g++")


def lacking() -> str:
    """Why it cannot run here; "" if it can."""
    if sys.platform != "linux" or shutil.which(COMPILER) is None:
        return f"no {COMPILER} on Linux here"
    command = [COMPILER, "-print-file-name=libasan.so"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return "" if Path(found).is_absolute() else f"{COMPILER} has no libasan.so"


@pytest.mark.skipif("NATIVE_FLAGS" in os.environ, reason="this is the run under sanitizers")
@pytest.mark.skipif(bool(lacking()), reason=f"sanitizers: {lacking()}")
@pytest.mark.timeout(600)
def test_nothing_overruns_and_nothing_is_undefined() -> None:
    ran = subprocess.run(
        [ROOT / "scripts" / "native_sanitize", "-x", "-p", "no:cacheprovider"],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    assert "100%]" in ran.stdout, ran.stdout[-3000:]  # it ran to its end
