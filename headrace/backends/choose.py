"""Which backend computes, what suits it, and why.

Looks at files and devices, not at torch: it must be quick.
"""

from __future__ import annotations

import os
import re
import shutil
import sysconfig
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

import msgspec

from headrace.backends.cpu.device import cores as usable_cores
from headrace.config import Resolved, Settings, refuse
from headrace.engine.protocol import StepCost
from headrace.errors import ConfigError

# Settings that a backend would have to ignore.
_MEANINGLESS: Mapping[str, tuple[str, ...]] = {
    "fake": (
        "dtype", "load_format", "quantization", "kv_dtype", "kv_memory", "threads",
        "gpu_memory_utilization", "prefill_attention", "allow_pickle", "check_weights",
        "cuda_graphs", "cpu_kernels", "cpu_precision", "expert_copies",
    ),
    "cpu": ("gpu_memory_utilization", "prefill_attention", "cuda_graphs", "expert_copies"),
    "cuda": ("threads", "cpu_kernels", "cpu_precision", "quantization", "kv_dtype"),
}  # fmt: skip
_LEAST_TARGET_S, _MOST_TARGET_S, _TARGET_FLOORS = 0.025, 0.045, 6
_WITHOUT_GPU = "no NVIDIA GPU found"


def settled(settings: Settings) -> Settings:
    """`settings` with backend, max_num_seqs and max_num_batched_tokens as they will be used.

    Whatever builds a runner or an engine gets settled settings. Settling twice changes nothing.
    Raises ConfigError for a backend that cannot run here and for settings that it cannot honour.
    """
    backend = resolve_backend(settings).value
    refuse(settings, f"backend = {backend}", _MEANINGLESS[backend])
    if backend != "cuda" and not settings.fake_device:  # others know no step's time beforehand
        resolve_itl_target_s(settings, None)
    return msgspec.structs.replace(
        settings,
        backend=backend,
        max_num_seqs=resolve_max_num_seqs(settings, backend).value,
        max_num_batched_tokens=resolve_max_num_batched_tokens(settings, backend).value,
    )


def resolve_backend(settings: Settings) -> Resolved[str]:
    """`auto` becomes cuda where it can run, else cpu. Raises ConfigError if cuda is set and cannot.

    The reason of cpu says what cuda lacks.
    """
    if settings.backend == "auto" and settings.engine == "naive":
        return Resolved("cpu", "the naive engine computes on the CPU")
    if settings.backend not in ("auto", "cuda"):
        return Resolved(settings.backend, "as set")
    gaps = cuda_gaps()
    if settings.backend == "cuda":
        if gaps:
            raise ConfigError(f"backend = 'cuda': {'; '.join(gaps)}", param="backend")
        return Resolved("cuda", "as set")
    if not gaps:
        return Resolved("cuda", "an NVIDIA GPU, a CUDA build of torch and triton are here")
    if gaps[0].startswith(_WITHOUT_GPU):
        return Resolved("cpu", f"no GPU found; {usable_cores()} cores")
    return Resolved("cpu", f"a GPU is here, but {'; '.join(gaps)}")


def cuda_gaps(
    device: Path = Path("/dev/nvidiactl"),
    find: Callable[[str], ModuleSpec | None] = find_spec,
    environ: Mapping[str, str] = os.environ,
    which: Callable[[str], str | None] = shutil.which,
    headers: Path | None = None,
) -> list[str]:
    """What the cuda backend lacks on this machine, each with its remedy; empty if it can run.

    Reads torch's version file instead of importing torch, which takes seconds.
    """
    gaps: list[str] = []
    if not device.exists():
        gaps.append(f"{_WITHOUT_GPU} ({device} is missing: install the driver, or use cpu)")
    elif environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        gaps.append(f"{_WITHOUT_GPU} (CUDA_VISIBLE_DEVICES hides all: unset it)")
    torch = find("torch")
    if torch is None or torch.origin is None:
        gaps.append("torch is not installed: pip install torch")
    elif not _cuda_of(Path(torch.origin).parent / "version.py"):
        gaps.append("torch is a build without CUDA: install a CUDA build (https://pytorch.org)")
    if find("triton") is None:
        gaps.append("triton is not installed: pip install triton")
    if not environ.get("CC") and not which("gcc") and not which("clang"):
        gaps.append("triton needs a C compiler for its launchers: install gcc")
    elsewhere = environ.get("CPATH") or environ.get("C_INCLUDE_PATH")
    if not elsewhere and not ((headers or _python_headers()) / "Python.h").exists():
        gaps.append("triton needs Python's headers for its launchers: install python3-dev")
    return gaps


def _python_headers() -> Path:
    """Where triton looks for them."""
    scheme = sysconfig.get_default_scheme()
    scheme = "posix_prefix" if scheme == "posix_local" else scheme  # Debian's own
    return Path(sysconfig.get_paths(scheme=scheme)["include"])


def _cuda_of(version_file: Path) -> str:
    """The CUDA version that this torch was built for, "" if none."""
    try:
        text = version_file.read_text(encoding="utf-8")
    except OSError:
        return ""
    found = re.search(r"^cuda\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return found[1] if found else ""


def resolve_max_num_seqs(settings: Settings, backend: str) -> Resolved[int]:
    """Sequences that run at once."""
    if settings.max_num_seqs:
        return Resolved(settings.max_num_seqs, "as set")
    many = Resolved(64, "more rows make each step longer on a CPU")
    if backend == "cuda":
        many = Resolved(512, "a GPU reads the weights once a step, for one row or for hundreds")
    elif backend == "fake":
        many = Resolved(64, "the fake backend's own number")
    if 0 < settings.max_num_batched_tokens < many.value:
        reason = "a step of max_num_batched_tokens holds one token of each"
        return Resolved(settings.max_num_batched_tokens, reason)
    return many


def resolve_max_num_batched_tokens(settings: Settings, backend: str) -> Resolved[int]:
    """Tokens computed in one step."""
    if settings.max_num_batched_tokens:
        return Resolved(settings.max_num_batched_tokens, "as set")
    many = Resolved(512, "larger steps gain little on a CPU and hold up those that decode")
    if backend == "cuda":
        reason = "fills the card while nothing decodes; otherwise the ITL target limits a step"
        many = Resolved(8192, reason)
    elif backend == "fake":
        many = Resolved(512, "the fake backend's own number")
    if settings.max_num_seqs > many.value:
        return Resolved(settings.max_num_seqs, "a step holds one token of each of max_num_seqs")
    return many


def resolve_itl_target_s(settings: Settings, cost: StepCost | None) -> Resolved[float]:
    """The longest step, in seconds, while sequences decode; 0 = no limit.

    `cost` is what the loaded runner knows of its steps. auto: six times the step that only reads
    the weights, so that prompts get about five sixths of the time, in bounds that readers of a
    stream do not feel. Raises ConfigError for a limit that nothing could keep: without a cost.
    """
    if settings.itl_target_ms != "auto":
        target_s = float(settings.itl_target_ms) / 1000
        if target_s and cost is None:
            raise ConfigError(
                f"itl_target_ms = {settings.itl_target_ms}: backend = {settings.backend} has no "
                "model of its step time here; use 0 or auto",
                param="itl_target_ms",
            )
        return Resolved(target_s, "as set")
    if cost is None:
        return Resolved(0.0, "no model of the step time")
    free_s = _TARGET_FLOORS * cost.floor_s + cost.base_s
    target_s = min(_MOST_TARGET_S, max(_LEAST_TARGET_S, free_s))
    bounds = f"{_LEAST_TARGET_S * 1000:.0f} to {_MOST_TARGET_S * 1000:.0f} ms"
    return Resolved(
        target_s,
        f"{_TARGET_FLOORS} x {cost.floor_s * 1000:.1f} ms to read the weights + "
        f"{cost.base_s * 1000:.1f} ms, within {bounds}",
    )


def resolve_overlap(settings: Settings, backend: str) -> Resolved[bool]:
    """Whether step N+1 is planned while step N runs."""
    if settings.overlap != "auto":
        return Resolved(settings.overlap == "on", "as set")
    if backend == "fake":
        return Resolved(True, "the fake device runs beside the host")
    if backend == "cuda":
        return Resolved(True, "the host plans the next step while the card runs this one")
    return Resolved(False, "on the cpu backend host and device are the same cores")


def resolve_api_workers(settings: Settings) -> Resolved[int]:
    """How many HTTP processes: they detokenise and stream, so many cores can use several."""
    if settings.api_workers != "auto":
        return Resolved(int(settings.api_workers), "as set")
    cores = usable_cores()
    if cores < 8:
        return Resolved(1, f"{cores} cores: the rest computes")
    return Resolved(min(4, cores // 8), f"one for each 8 of {cores} cores, at most 4")
