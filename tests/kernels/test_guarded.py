"""Each kernel once more, in the interpreter, between pages that nobody may touch: `guard.c`.

What compute-sanitizer finds on a card (`scripts/gpu_check --sanitize`), found without one: a
kernel that reads or writes past a tensor ends its process.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.conftest import CUDA

ROOT = Path(__file__).parents[2]
COMPILER = os.environ.get("CC", "cc")
OVERRUN = """
import torch, triton, triton.language as tl

@triton.jit
def copy(x, y, n, READ: tl.constexpr):
    i = tl.arange(0, READ)
    tl.store(y + i, tl.load(x + i), mask=i < n)

out = torch.zeros(64)
copy[(1,)](torch.ones(20), out, 20, READ={read})
print(int(out.sum()))
"""

pytestmark = [
    pytest.mark.skipif(CUDA, reason="kernels run on the card here: scripts/gpu_check --sanitize"),
    pytest.mark.skipif(
        sys.platform != "linux" or shutil.which(COMPILER) is None,
        reason=f"guarded tensors: no {COMPILER} on Linux here",
    ),
]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process whose tensors have guards."""
    library = tmp_path_factory.mktemp("guard") / "guard.so"
    source = Path(__file__).with_name("guard.c")
    flags = ["-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run([COMPILER, *flags, "-o", library, source, "-ldl"], check=True)
    return {**os.environ, "LD_PRELOAD": str(library), "TRITON_INTERPRET": "1"}


def ran(environment: dict[str, str], *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.timeout(600)
def test_no_kernel_leaves_its_tensors(guarded: dict[str, str]) -> None:
    each = "tests/kernels/test_each_kernel.py"
    done = ran(guarded, "-X", "faulthandler", "-m", "pytest", "-x", "-p", "no:cacheprovider", each)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "100%]" in done.stdout, done.stdout[-3000:]  # it ran to its end


@pytest.mark.parametrize(("read", "status"), [(16, 0), (32, -signal.SIGSEGV)])
def test_an_overrun_ends_the_process(
    read: int, status: int, guarded: dict[str, str], tmp_path: Path
) -> None:
    script = tmp_path / "overrun.py"
    script.write_text(OVERRUN.format(read=read))
    done = ran(guarded, script)
    assert done.returncode == status, done.stderr
    assert done.stdout == ("16\n" if status == 0 else "")
