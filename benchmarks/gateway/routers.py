"""How each router is started, and what its processes use while it runs.

headrace has keys, limits and metrics on. vllm-router and sglang-router have their defaults but for
the policy, ports, the log level and the interval of checks at the start; they live in an
environment of their own: `python -m venv DIR && DIR/bin/pip install vllm-router sglang-router`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import psutil

from benchmarks.gateway.load import KEY
from headrace.children import die_with_parent

_POLL_S = 0.05
_START_S = 30.0
_LEVEL = {"vllm-router": "warning", "sglang-router": "warn"}
FLEET = """\
[gateway]
port = {port}
policy = "{policy}"
log_level = "warning"
index_bytes = {index_bytes}
{workers}
[[keys]]
key = "{key}"
tier = "t"
admin = true
[tiers.t]
requests_per_min = 100000000
tokens_per_min = 1000000000
parallel = 10000
"""


class Router(msgspec.Struct, frozen=True):
    """One that could be started."""

    name: str
    policy: str

    @property
    def label(self) -> str:
        """For tables."""
        return f"{self.name} {self.policy}"


ROUTERS = (
    Router("headrace", "token_cost"),
    Router("vllm-router", "round_robin"),
    Router("vllm-router", "cache_aware"),
    Router("sglang-router", "round_robin"),
    Router("sglang-router", "cache_aware"),
)


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def command(
    router: Router, port: int, workers: Sequence[str], peers: Path, folder: Path, index_bytes: int
) -> list[str]:
    """What starts it before `workers` (URLs)."""
    if router.name == "headrace":
        file = folder / "fleet.toml"
        rows = "\n".join(f'[[workers]]\nurl = "{url}"' for url in workers)
        file.write_text(
            FLEET.format(
                port=port, policy=router.policy, workers=rows, key=KEY, index_bytes=index_bytes
            )
        )
        return [sys.executable, "-m", "headrace.cli.main", "gateway", "--config", str(file)]
    module = {"vllm-router": "vllm_router", "sglang-router": "sglang_router"}[router.name]
    return [
        *(str(peers / "bin" / "python"), "-m", f"{module}.launch_router"),
        *("--worker-urls", *workers, "--policy", router.policy),
        *("--host", "127.0.0.1", "--port", str(port), "--log-level", _LEVEL[router.name]),
        *("--prometheus-port", str(free_port()), "--worker-startup-check-interval", "1"),
    ]


class Running:
    """A router that runs: what it used so far."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.port = port
        self._process = psutil.Process(process.pid)

    def _all(self) -> list[psutil.Process]:
        return [self._process, *self._process.children(recursive=True)]

    def cpu_s(self) -> float:
        """User and system seconds of all its processes."""
        return float(sum(sum(process.cpu_times()[:2]) for process in self._all()))

    def rss_mib(self) -> float:
        """Resident memory of all its processes."""
        return float(sum(process.memory_info().rss for process in self._all()) / 2**20)


@contextlib.contextmanager
def spawned(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is killed at the end, with what it started."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(signal.SIGKILL),
            env=os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def await_answer(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until GET `url` says 200. Raises RuntimeError with the log's end where it does not."""
    deadline_s = time.monotonic() + _START_S
    while time.monotonic() < deadline_s and process.poll() is None:
        with contextlib.suppress(OSError):
            request = urllib.request.Request(url, headers={"authorization": f"Bearer {KEY}"})
            with urllib.request.urlopen(request, timeout=5) as answer:
                if answer.status == 200:
                    return
        time.sleep(_POLL_S)
    raise RuntimeError(f"{url} does not answer; {log.read_text()[-2000:]}")


@contextlib.contextmanager
def running(
    router: Router,
    workers: Sequence[str],
    peers: Path,
    folder: Path,
    index_bytes: int = 256 * 2**20,
) -> Iterator[Running]:
    """It runs and takes requests."""
    port = free_port()
    log = folder / f"{router.name}-{router.policy}.log"
    ready = "/ready" if router.name == "headrace" else "/health"
    with spawned(command(router, port, workers, peers, folder, index_bytes), log) as process:
        await_answer(f"http://127.0.0.1:{port}{ready}", process, log)
        time.sleep(0.5)  # its own checks at the start
        yield Running(process, port)


@contextlib.contextmanager
def mocks(count: int, folder: Path) -> Iterator[list[str]]:
    """URLs of `count` mock workers."""
    with contextlib.ExitStack() as stack:
        urls = []
        for i in range(count):
            port, log = free_port(), folder / f"mock-{i}.log"
            module = [sys.executable, "-m", "benchmarks.gateway.mock", str(port)]
            process = stack.enter_context(spawned(module, log))
            urls.append(f"http://127.0.0.1:{port}")
            await_answer(urls[-1] + "/health", process, log)
        yield urls


def answered(url: str) -> int:
    """How many requests a mock worker has answered."""
    with urllib.request.urlopen(url + "/count", timeout=5) as answer:
        return int(msgspec.json.decode(answer.read())["answered"])
