"""Where there is no GPU kernels are interpreted, whatever else is collected or runs before them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels import interpreter
from tests.kernels.conftest import CUDA

pytestmark = pytest.mark.skipif(CUDA, reason="kernels run on the GPU")
ROOT = Path(__file__).parents[2]
UNIT = "tests/unit/test_pool.py"
KERNELS = "tests/kernels/test_state.py"


def run(*arguments: str, path: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Pytest in a process of its own, where nobody has set the variable."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        env=inherited | {"PYTHONPATH": str(path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_files_of_other_folders_may_be_named_before() -> None:
    done = run(UNIT, KERNELS)
    assert done.returncode == 0, done.stdout + done.stderr


def test_who_imported_triton_too_early_is_told(tmp_path: Path) -> None:
    """As a plug-in of pytest could, which comes before every conftest.py."""
    (tmp_path / "too_early.py").write_text("import triton.language\n")
    done = run("-p", "too_early", UNIT, KERNELS, path=tmp_path)
    assert done.returncode != 0
    assert "triton was imported before" in done.stdout + done.stderr


def test_a_variable_that_is_gone_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    interpreter.check()
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET is gone"):
        interpreter.check()
