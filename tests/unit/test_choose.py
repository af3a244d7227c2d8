"""What a backend is chosen for, what suits it, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.backends import choose
from headrace.backends.choose import (
    cuda_gaps,
    resolve_backend,
    resolve_itl_target_s,
    resolve_max_num_batched_tokens,
    resolve_max_num_seqs,
    resolve_overlap,
    settled,
)
from headrace.config import Settings
from headrace.engine.protocol import StepCost
from headrace.errors import ConfigError

COST = StepCost(floor_s=0.007, token_s=40e-6, base_s=0.001, pair_s=1e-9, read_s=1e-8, tile=128)
CUDA_BUILD = "from typing import Optional\n__version__ = '2.11.0'\ncuda: Optional[str] = '13.0'\n"
CPU_BUILD = "__version__ = '2.11.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = '6'\n"


class Machine:
    """A device file and installed packages, as `cuda_gaps` looks for them."""

    def __init__(self, folder: Path, version: str | None = CUDA_BUILD) -> None:
        self.device = folder / "nvidiactl"
        self.device.touch()
        self.environ: dict[str, str] = {}
        self.programs = {"gcc": "/usr/bin/gcc"}
        (folder / "Python.h").touch()
        self.headers = folder
        self.packages: dict[str, ModuleSpec] = {"triton": ModuleSpec("triton", None)}
        if version is not None:
            self.packages["torch"] = ModuleSpec("torch", None, origin=str(folder / "__init__.py"))
            (folder / "version.py").write_text(version)

    def gaps(self) -> list[str]:
        return cuda_gaps(
            self.device, self.packages.get, self.environ, self.programs.get, self.headers
        )


def choose_here(monkeypatch: pytest.MonkeyPatch, *gaps: str) -> None:
    monkeypatch.setattr(choose, "cuda_gaps", lambda: list(gaps))


# ---------------------------------------------------------------- what cuda needs


@pytest.mark.parametrize("line", ["cuda: Optional[str] = '13.0'", 'cuda = "12.8"', "cuda='12.8'"])
def test_a_machine_that_has_it_all(tmp_path: Path, line: str) -> None:
    machine = Machine(tmp_path, f"debug = False\n{line}\nhip = None\n")
    assert machine.gaps() == []
    machine.environ["CUDA_VISIBLE_DEVICES"] = "1,2"
    assert machine.gaps() == []


@pytest.mark.parametrize(
    "text", [CPU_BUILD, "", "cudart = '13.0'\n", "# cuda = '13.0'\n", "cuda = ''\n"]
)
def test_a_torch_without_cuda(tmp_path: Path, text: str) -> None:
    (gap,) = Machine(tmp_path, text).gaps()
    assert "without CUDA" in gap
    assert "install a CUDA build" in gap


def test_no_compiler_for_triton_s_launchers(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.programs.clear()
    (gap,) = machine.gaps()
    assert "install gcc" in gap
    machine.environ["CC"] = "/opt/cc"
    assert machine.gaps() == []
    machine.environ.clear()
    machine.programs["clang"] = "/usr/bin/clang"
    assert machine.gaps() == []
    (tmp_path / "Python.h").unlink()
    (gap,) = machine.gaps()
    assert "python3-dev" in gap
    machine.environ["CPATH"] = "/opt/include"
    assert machine.gaps() == []


def test_a_torch_without_a_version_file(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    (tmp_path / "version.py").unlink()
    (gap,) = machine.gaps()
    assert "without CUDA" in gap


def test_every_gap_is_named_with_its_remedy(tmp_path: Path) -> None:
    machine = Machine(tmp_path, None)
    machine.packages.clear()
    machine.device.unlink()
    device, torch, triton = machine.gaps()
    assert str(machine.device) in device
    assert "pip install torch" in torch
    assert "pip install triton" in triton


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_a_gpu_that_the_environment_hides(tmp_path: Path, hidden: str) -> None:
    machine = Machine(tmp_path)
    machine.environ["CUDA_VISIBLE_DEVICES"] = hidden
    (gap,) = machine.gaps()
    assert "CUDA_VISIBLE_DEVICES" in gap


def test_torch_is_not_imported() -> None:
    code = (
        "import sys; from headrace.backends.choose import settled; "
        "from headrace.config import Settings; settled(Settings()); "
        "assert not {'torch', 'triton'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# ---------------------------------------------------------------- the choice


def test_auto_is_cuda_where_nothing_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    choose_here(monkeypatch)
    assert resolve_backend(Settings()).value == "cuda"
    assert resolve_backend(Settings(backend="cuda")).reason == "as set"
    assert resolve_backend(Settings(backend="cpu")).value == "cpu"


def test_auto_is_cpu_and_says_what_a_gpu_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    choose_here(monkeypatch, "triton is not installed: pip install triton")
    found = resolve_backend(Settings())
    assert found.value == "cpu"
    assert found.reason == "a GPU is here, but triton is not installed: pip install triton"


def test_auto_without_a_gpu_says_only_that(monkeypatch: pytest.MonkeyPatch) -> None:
    choose_here(monkeypatch, "no NVIDIA GPU found (x)", "triton is not installed")
    found = resolve_backend(Settings())
    assert found.value == "cpu"
    assert found.reason.startswith("no GPU found; ")


def test_cuda_is_refused_with_all_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    choose_here(monkeypatch, "one thing", "another")
    with pytest.raises(ConfigError, match="backend = 'cuda': one thing; another") as caught:
        resolve_backend(Settings(backend="cuda"))
    assert caught.value.param == "backend"


def test_the_naive_engine_stays_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    choose_here(monkeypatch)
    assert resolve_backend(Settings(engine="naive")).value == "cpu"


def test_overlap_is_on_where_the_device_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {"cuda": True, "fake": True, "cpu": False}
    assert {b: resolve_overlap(Settings(), b).value for b in wanted} == wanted
    assert not resolve_overlap(Settings(overlap="off"), "cuda").value


# ---------------------------------------------------------------- numbers that suit it


@pytest.mark.parametrize(
    ("backend", "given", "numbers"),
    [
        ("fake", {}, (64, 512)),
        ("cpu", {}, (64, 512)),
        ("cuda", {}, (512, 8192)),
        ("cuda", {"max_num_seqs": 7, "max_num_batched_tokens": 100}, (7, 100)),
        ("cpu", {"max_num_batched_tokens": 8}, (8, 8)),
        ("cpu", {"max_num_seqs": 1000}, (1000, 1000)),
        ("cpu", {"max_num_seqs": 100}, (100, 512)),
        ("cuda", {"max_num_batched_tokens": 512}, (512, 512)),
    ],
)
def test_rows_and_tokens_of_a_step(
    monkeypatch: pytest.MonkeyPatch, backend: Any, given: dict[str, int], numbers: tuple[int, int]
) -> None:
    choose_here(monkeypatch)
    settings = Settings(backend=backend, **given)  # type: ignore[arg-type]
    after = settled(settings)
    assert (after.max_num_seqs, after.max_num_batched_tokens) == numbers
    assert settled(after) == after
    assert after.max_num_seqs <= after.max_num_batched_tokens
    for key, found in (
        ("max_num_seqs", resolve_max_num_seqs(settings, backend)),
        ("max_num_batched_tokens", resolve_max_num_batched_tokens(settings, backend)),
    ):
        assert found.value == getattr(after, key)
        assert (found.reason == "as set") == (key in given)


def test_settling_names_the_backend_and_leaves_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    choose_here(monkeypatch)
    settings = Settings(port=1, itl_target_ms="30", kv_memory="1GiB", gpu_memory_utilization=0.5)
    after = settled(settings)
    assert after.backend == "cuda"
    changed = {"backend", "max_num_seqs", "max_num_batched_tokens"}
    rest = [key for key in Settings.__struct_fields__ if key not in changed]
    assert all(getattr(after, key) == getattr(settings, key) for key in rest)


@pytest.mark.parametrize(
    ("backend", "given"),
    [
        ("cpu", {"gpu_memory_utilization": 0.5}),
        ("cpu", {"prefill_attention": "triton"}),
        ("fake", {"prefill_attention": "flashinfer"}),
        ("fake", {"gpu_memory_utilization": 0.5}),
        ("fake", {"threads": 2}),
        ("fake", {"cpu_kernels": "torch"}),
        ("fake", {"cpu_precision": "exact"}),
        ("fake", {"expert_copies": "all"}),
        ("cpu", {"expert_copies": "off"}),
        ("cuda", {"threads": 2}),
        ("cpu", {"itl_target_ms": "30"}),
        ("fake", {"itl_target_ms": "0.5"}),
    ],
)
def test_what_a_backend_would_ignore_is_refused(
    monkeypatch: pytest.MonkeyPatch, backend: Any, given: dict[str, Any]
) -> None:
    choose_here(monkeypatch)
    (key,) = given
    with pytest.raises(ConfigError, match=key) as caught:
        settled(Settings(backend=backend, **given))
    assert backend in str(caught.value)
    assert caught.value.param == key


@pytest.mark.parametrize("target", ["0", "0.0", "auto"])
def test_no_target_suits_every_backend(target: str) -> None:
    assert settled(Settings(backend="cpu", itl_target_ms=target)).itl_target_ms == target


# ---------------------------------------------------------------- the target for a step


@pytest.mark.parametrize(
    ("floor_ms", "base_ms", "target_ms"),
    [(6, 1, 37), (1, 0, 25), (12, 1, 45), (4, 0, 25), (7, 1, 43), (7.3, 2, 45)],
)
def test_the_target_follows_the_time_to_read_the_weights(
    floor_ms: float, base_ms: float, target_ms: float
) -> None:
    cost = msgspec.structs.replace(COST, floor_s=floor_ms / 1000, base_s=base_ms / 1000)
    found = resolve_itl_target_s(Settings(), cost)
    assert found.value == pytest.approx(target_ms / 1000)
    assert f"{floor_ms:.1f} ms to read the weights" in found.reason


def test_a_target_as_set_and_none() -> None:
    assert resolve_itl_target_s(Settings(itl_target_ms="12.5"), COST).value == 0.0125
    assert resolve_itl_target_s(Settings(itl_target_ms="0"), COST).value == 0
    assert resolve_itl_target_s(Settings(), None).value == 0
    with pytest.raises(ConfigError, match="itl_target_ms = 30: backend = cuda has no model"):
        resolve_itl_target_s(Settings(backend="cuda", itl_target_ms="30"), None)
