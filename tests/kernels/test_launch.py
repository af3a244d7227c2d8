"""`compiling` compiles what would be launched, side by side; what it made is found again on disk.

In a process of its own, which compiles for a Hopper card without having one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.kernels import launch

PRELUDE = """
import json, sys
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

launchers = []

class Card:
    def launcher_cls(self, src, metadata): launchers.append((src.name, str(src.signature)))
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def get_current_target(self): return GPUTarget("cuda", 90, 32)

driver.set_active(Card())
from headrace.kernels import launch as own
from headrace.kernels.launch import compiled, compiling, fetched, launch
from headrace.kernels.sampling import Scratch, sample
from headrace.kernels.state import poke
from tests.kernels.probes import beyond_any_card

i = lambda *shape: torch.zeros(shape, dtype=torch.int32)
scratch = Scratch.allocate(4, 1000, torch.device("cpu"))
args = (torch.zeros(2, 1000), i(2), i(3, 8), i(2), i(2), i(2), i(3), i(2))
poked = i(9)

"""
SCRIPT = (
    PRELUDE
    + """
forked, run_forked = [], own.run_forked

def counted(jobs, workers):
    forked.append(len(jobs))
    return run_forked(jobs, workers)

own.run_forked = counted
keys, submit = [], own._Mode.submit

def noted(mode, key, *more):
    keys.append(key)
    return submit(mode, key, *more)

own._Mode.submit = noted

def work(kind):
    sample(*args, kind=kind, scratch=scratch)
    sample(*args, kind=kind, scratch=scratch)
    poke(poked, torch.ones(4, 2, dtype=torch.int32), i(1) + 4)

counts = []
for kind in ("greedy", "greedy", "plain"):
    with compiling(2):
        work(kind)
    counts.append([compiled(), fetched()])
built = sorted(launchers)
children, anew = list(forked), len(keys) - len(set(keys))
failed = []
for _ in range(2):  # a compilation that fails does not spoil what comes after
    try:
        with compiling(2):
            launch(beyond_any_card, (1,), i(16), N=12)
    except Exception as error:
        failed.append(type(error).__name__)
try:  # a launch passes the cache and then fails on the missing card
    work("greedy")
    launched = True
except Exception:
    launched = False
counts.append([compiled(), fetched()])
print(json.dumps([counts, failed, launched, poked.tolist(), built, anew, children]))
"""
)


STOPPED = (
    PRELUDE
    + """
def stop(*_):
    raise SystemExit(0)

run_forked, own.run_forked = own.run_forked, stop
told = []
for fails in (True, False):  # by what is inside; by a stop while children compile
    try:
        with compiling(2):
            sample(*args, kind="greedy", scratch=scratch)
            if fails:
                raise OSError("no such file")
    except BaseException as error:
        told.append(type(error).__name__)
counts = [compiled()]
own.run_forked = run_forked
with compiling(2):
    sample(*args, kind="greedy", scratch=scratch)
counts.append(compiled())
print(json.dumps([told, counts]))
"""
)


def run(cache: Path, script: str = SCRIPT) -> Any:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
    path = os.pathsep.join([os.getcwd(), *sys.path])
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_compiled_side_by_side_and_found_again_on_disk(tmp_path: Path) -> None:
    counts, failed, launched, poked, built, anew, children = run(tmp_path)
    assert counts == [[3, 0], [3, 0], [5, 0], [5, 0]], "each once; a plain draw has two of its own"
    assert failed == ["CompilationError"], "said once"
    assert len(built) == 5, "what launches a kernel is built beside it"
    assert len({tuple(one) for one in built}) == 3, "greedy and plain draws differ by constants"
    assert not launched, "this card cannot launch"
    assert poked == [0] * 9, "nothing ran"
    assert anew == 0, "a kernel's key is made once, however often it is launched"
    assert children == [3, 2], "a job for each"
    counts, *_, children = run(tmp_path)
    assert counts == [[0, 3], [0, 3], [0, 5], [0, 5]]
    assert children == [], "what is on disk is read here"


def test_what_fails_or_is_stopped_compiles_nothing_and_holds_nobody_up(tmp_path: Path) -> None:
    told, counts = run(tmp_path, STOPPED)
    assert told == ["OSError", "SystemExit"]
    assert counts == [0, 2], "the next one compiles what was left"


def test_children_compile_only_what_the_cache_lacks(tmp_path: Path) -> None:
    run(tmp_path)
    kernels = sorted({found.parent for found in tmp_path.glob("*/*.cubin")})
    assert len(kernels) == 5
    shutil.rmtree(kernels[0])
    for folder in kernels[1:3]:  # as in a cache that was moved: its lists name what is not there
        next(found for found in folder.glob("*.json") if "__grp__" not in found.name).unlink()
    counts, *_, children = run(tmp_path)
    assert counts[-1] == [3, 2]
    lacked = (counts[0][0], 3 - counts[0][0])  # in the first round, and in the last
    assert children == [count for count in lacked if count > 1], "a single one is compiled here"


def test_a_kernel_is_remembered_at_its_first_launch() -> None:
    """Triton 3.7 does so by itself, 3.6 when it is compiled."""
    kept: list[Any] = []
    asked = launch._Mode(launch._Collected()).submit("a kernel", lambda: None, kept.append)
    assert kept == [asked]


def test_nobody_knows_what_a_cache_elsewhere_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "get_cache_manager", lambda key: object())
    assert not launch._on_disk("a kernel")
