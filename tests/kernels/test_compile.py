"""Kernels are compiled ahead, under the keys of the real launches, and found again on disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# A process that compiles for a Hopper card without having one: only the launch itself is missing.
SCRIPT = """
import json, sys
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

class Card:
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def get_current_target(self): return GPUTarget("cuda", 90, 32)

driver.set_active(Card())
from headrace.kernels.compile import Compiles, compile_all, use_cache
from headrace.kernels.draw import draw_kernel
from headrace.kernels.sampling import Scratch, sample
from headrace.kernels.state import _copy_kernel, poke

folder = use_cache("Card 1")
compiles = Compiles()
i = lambda *shape: torch.zeros(shape, dtype=torch.int32)
scratch = Scratch.allocate(4, 1000, torch.device("cpu"))
args = (torch.zeros(2, 1000), i(3, 8), i(2), i(2), i(2), i(3), i(2))
poked = i(9)
jobs = [
    lambda: sample(*args, kind="greedy", scratch=scratch),
    lambda: sample(*args, kind="greedy", scratch=scratch),
    lambda: poke(poked, torch.ones(4, 2, dtype=torch.int32), i(1) + 4),
    lambda: _copy_kernel.warmup(
        torch.float32, torch.float32, torch.int32, 8, 8,
        SIZE=8, PIECE=8, PDL=False, num_warps=8, grid=(1, 1, 1),
    ),
]
if "plain" in sys.argv:
    jobs.append(lambda: sample(*args, kind="plain", scratch=scratch))
seconds = compile_all(jobs, 2)
first = compiles.count, compiles.loads
compiles.mark()
# A launch would find them: a warm-up of the real call needs no compile, and no disk.
kernel = _copy_kernel.warmup(
    torch.float32, torch.float32, torch.int32, 8, 8,
    SIZE=8, PIECE=8, PDL=False, num_warps=8, grid=(1, 1, 1),
)
# Launches pass the cache and then fail on the missing card: a compile would be counted before.
try:
    sample(*args, kind="greedy", scratch=scratch)
    launched = True
except Exception:
    launched = False
print(json.dumps({
    "folder": str(folder), "first": first,
    "again": [compiles.since_mark, compiles.loads - first[1]],
    "cubin": len(kernel.asm["cubin"]), "poked": poked.tolist(), "seconds": seconds,
    "launched": launched,
}))
"""


def run(cache: Path, *words: str) -> dict[str, Any]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
    environment |= {"HEADRACE_CACHE": str(cache), "PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
def test_compiled_ahead_then_found_in_memory_and_on_disk(tmp_path: Path) -> None:
    cold = run(tmp_path)
    assert cold["first"] == [4, 0], "two of the sampler, poke, copy: each once"
    assert cold["again"] == [0, 0], "the real calls compile nothing and read no disk"
    assert cold["cubin"] > 1000
    assert cold["poked"] == [0] * 9, "a job launches nothing"
    assert not cold["launched"], "this card cannot launch"
    assert cold["folder"].startswith(f"{tmp_path}/triton/")
    assert "card-1" in cold["folder"]
    warm = run(tmp_path, "plain")
    assert warm["folder"] == cold["folder"]
    assert warm["first"] == [2, 4], "the four from disk; a plain draw's two are new"
