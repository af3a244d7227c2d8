"""`headrace up`: this machine's devices shared out among replicas of one model, as workers that a
gateway starts, watches and stops.
"""

from __future__ import annotations

import math
import os
import secrets
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path

from headrace.backends.cpu.device import KV_SHARE, free_memory_bytes
from headrace.children import LAST_PAUSE_S
from headrace.config import ENV_PREFIX, KV_EVENTS, Settings, flag_of, refuse
from headrace.engine.kv_events import binds
from headrace.errors import ConfigError
from headrace.gateway.app import Gateway
from headrace.gateway.registry import Apply, Named
from headrace.gateway.settings import WorkerSpec
from headrace.gateway.starts import Started, StartSpec

LATE_S = 60.0  # of replicas that still start while another is up
LAST_LINES = 5
_FOR_USERS = ("try: ", "look: ")  # lines of a server that name its own address
_OURS = frozenset({
    "model", "host", "port", "api_key", "usage_log", "kv_memory", "kv_events_endpoint",
    "kv_events_replay_endpoint",
})  # said for each replica anew  # fmt: skip


def visible_gpus(environ: Mapping[str, str] = os.environ, dev: Path = Path("/dev")) -> list[str]:
    """What CUDA_VISIBLE_DEVICES may hold, one by one: its own entries, or the numbers of all."""
    named = environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name for name in named.split(",") if name not in ("", "-1")]
    return [str(i) for i in range(sum(p.name[6:].isdigit() for p in dev.glob("nvidia*")))]


class Shares:
    """What each of `count` replicas gets of this machine. Raises ConfigError if it is too small."""

    def __init__(self, settings: Settings, backend: str, count: int) -> None:
        self.cores: list[tuple[int, ...]] = [()] * count
        self.gpus: list[str] = [""] * count
        self.kv_memory = settings.kv_memory
        if backend == "cuda":
            self._share_gpus(settings, count)
        elif backend == "cpu":
            self._share_cores(count)
            if not settings.kv_memory and not settings.kv_blocks:
                self.kv_memory = str(free_memory_bytes() // KV_SHARE // count)

    def _share_gpus(self, settings: Settings, count: int) -> None:
        gpus = visible_gpus()
        each = -(-count // max(1, len(gpus)))
        sized = settings.kv_blocks or settings.kv_memory  # then the share says nothing
        if not gpus or (each > 1 and not sized and settings.gpu_memory_utilization * each > 1):
            raise ConfigError(
                f"replicas = {count} on {len(gpus)} GPUs: at most one a GPU, or a "
                f"--gpu-memory-utilization of at most {1 / each:.2g}, or --kv-memory",
                param="replicas",
            )
        self.gpus = [gpus[i % len(gpus)] for i in range(count)]

    def _share_cores(self, count: int) -> None:
        if not hasattr(os, "sched_getaffinity"):
            return  # no such thing here: each replica counts all cores as its own
        cores = sorted(os.sched_getaffinity(0))
        if count > len(cores):
            raise ConfigError(
                f"replicas = {count}: more than the {len(cores)} cores of this machine",
                param="replicas",
            )
        ends = [len(cores) * i // count for i in range(count + 1)]
        self.cores = [tuple(cores[a:b]) for a, b in pairwise(ends)]


def workers(
    settings: Settings,
    flags: Mapping[str, object],
    config_file: Path | None,
    name: str,
    shares: Shares,
    ports: Sequence[int],
    folder: Path,
) -> tuple[WorkerSpec, ...]:
    """A worker a share, each a `headrace serve` on one of the ports of this machine's loopback.

    flags: the settings that the user gave as flags, as values. name: of the model in requests.
    folder: of this user alone. Nobody but the gateway knows the replicas' key.
    """
    count = len(shares.cores)
    events = event_endpoints(settings, count, folder)
    key = secrets.token_urlsafe(32)
    passed = [text for name, value in flags.items() for text in _argument(name, value)]
    config = ["--config", str(config_file)] if config_file else []
    specs = []
    for i, port in enumerate(ports):
        more = ["--host", "127.0.0.1", "--port", str(port)]
        if shares.kv_memory:
            more += ["--kv-memory", shares.kv_memory]
        if events:
            endpoint, replay = events[i]
            more += ["--kv-events-endpoint", endpoint, "--kv-events-replay-endpoint", replay]
        if settings.usage_log:
            log = Path(settings.usage_log)
            more += ["--usage-log", str(log.with_name(f"{log.stem}.{i}{log.suffix}"))]
        env = {f"{ENV_PREFIX}API_KEY": key}
        if shares.gpus[i]:
            env["CUDA_VISIBLE_DEVICES"] = shares.gpus[i]
        serve = (sys.executable, "-m", "headrace.cli.main", "serve")
        model = [settings.model] if settings.model else []
        start = StartSpec(
            command=(*serve, *model, *passed, *config, *more),
            warm=True,
            env=env,
            cores=shares.cores[i],
        )
        specs.append(
            WorkerSpec(url=f"http://127.0.0.1:{port}", models=(name,), api_key=key, start=start)
        )
    return tuple(specs)


def event_endpoints(settings: Settings, count: int, folder: Path) -> list[tuple[str, str]]:
    """Where each replica publishes its KV events and is asked for old ones; []: nowhere.

    The user's port, or path, is that of the first; the next count on from it. What the user does
    not name lies in `folder`, for the gateway alone. Raises ConfigError.
    """
    if not settings.prefix_caching or settings.engine != "headrace":
        refuse(settings, "without a prefix cache, headrace up", KV_EVENTS)
        return []
    key, endpoint = "kv_events_endpoint", settings.kv_events_endpoint
    if endpoint.startswith("tcp://") and not binds(endpoint):
        raise ConfigError(
            f"{key} = {endpoint!r}: each replica listens at a port of its own: tcp://*:PORT",
            param=key,
        )
    replay_key = "kv_events_replay_endpoint"
    replay = settings.kv_events_replay_endpoint or f"ipc://{folder}/replay"
    published = _numbered(key, endpoint or f"ipc://{folder}/events", count)
    asked = _numbered(replay_key, replay, count)
    taken = [_place(address) for address in (*published, *asked)]
    if len(set(taken)) < len(taken):
        raise ConfigError(
            f"{key} = {endpoint!r} and {replay_key} = {replay!r}: {count} replicas count on from "
            f"each, and meet: leave {count} ports between them",
            param=replay_key,
        )
    return list(zip(published, asked, strict=True))


def _numbered(key: str, address: str, count: int) -> list[str]:
    if address.startswith("ipc://"):
        return [f"{address}-{i}" for i in range(count)]
    host, _, port = address.rpartition(":")
    if int(port) + count > 2**16:
        raise ConfigError(f"{key} = {address!r}: no {count} ports from there on", param=key)
    return [f"{host}:{int(port) + i}" for i in range(count)]


def _place(address: str) -> str:
    """Two that have the same cannot both be listened at, whatever the interface."""
    return address if address.startswith("ipc://") else address.rpartition(":")[2]


def _argument(name: str, value: object) -> list[str]:
    if name in _OURS:
        return []
    if isinstance(value, bool):
        flag = flag_of(name)
        return [flag if value else f"--no-{flag[2:]}"]
    if isinstance(value, tuple):
        return [text for one in value for text in (flag_of(name), str(one))]
    return [flag_of(name), str(value)]


@contextmanager
def free_ports(count: int) -> Iterator[list[int]]:
    """Ports of this machine's loopback that nobody listens on. Where the system can, they are kept
    from others while inside: a replica may listen, and again after its end, but none of them is
    given away to a connection that somebody opens meanwhile.
    """
    with ExitStack() as stack:
        socks = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in socks:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("127.0.0.1", 0))
        ports = [sock.getsockname()[1] for sock in socks]
        if sys.platform != "linux":  # elsewhere nobody could listen beside them
            stack.close()
        yield ports


class Replicas:
    """The registry of `headrace up`: the replicas, whose start it follows.

    It says once which of them are there: when all are, when the others have failed, or LATE_S after
    the first. When none of them can start as it was asked, it stops the gateway, and `failed` is
    true.
    """

    def __init__(
        self,
        specs: Sequence[WorkerSpec],
        say: Callable[[str], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._specs, self._say, self._clock = specs, say, clock
        self._begun_s = clock()
        self._first_s = math.inf  # one was up
        self._gateway: Gateway | None = None
        self._ready = self.failed = False
        self._rows = [_Row() for _ in specs]

    names: Sequence[Named] = ()

    def start(self, apply: Apply) -> None:
        """See `gateway.registry.Registry`."""
        apply(self._specs)

    def close(self) -> None:
        """See `gateway.registry.Registry`."""

    def watch(self, gateway: Gateway) -> None:
        """The gateway listens."""
        self._gateway = gateway
        for i, worker in enumerate(gateway.fleet.workers.values()):
            if worker.start is not None:
                worker.start.tell = partial(self._pass_on, i)

    def _pass_on(self, replica: int, line: str) -> None:
        self._rows[replica].lines.append(line)
        if not line.startswith(_FOR_USERS):
            self._say(f"replica {replica} | {line}")

    def tick(self) -> None:
        """See `gateway.registry.Registry`."""
        if self._gateway is None or self.failed:
            return
        workers = list(self._gateway.fleet.workers.values())
        starts = [worker.start for worker in workers if worker.start is not None]
        for i, start in enumerate(starts):
            self._tell_failure(i, start)
        if all(start.hopeless for start in starts):
            self.failed = True
            self._gateway.stop()
            return
        ups = [worker.up for worker in workers]
        if self._ready:
            for i, row in enumerate(self._rows):
                if ups[i] and not row.up:
                    self._say(f"replica {i} is up: {sum(ups)} of {len(ups)} replicas")
        elif any(ups):
            self._first_s = min(self._first_s, self._clock())
            late = self._clock() > self._first_s + LATE_S
            if late or all(up or s.failures for up, s in zip(ups, starts, strict=True)):
                self._tell_ready(self._gateway, ups, starts)
        for row, up in zip(self._rows, ups, strict=True):
            row.up = up

    def _tell_failure(self, replica: int, start: Started) -> None:
        """Once, and again when it fails in another way."""
        row, why = self._rows[replica], start.last_failure
        if start.failures == row.failures:
            return
        row.failures = start.failures
        if why != row.why:
            row.why = why
            what = "ended" if start.ever_up else "did not start"
            then = (
                "it is not tried again"
                if start.hopeless
                else f"it is tried again, each time later, at last every {LAST_PAUSE_S:g} s"
            )
            self._say(f"replica {replica} {what}: {why}; {then}{row.said()}")
        row.lines.clear()

    def _tell_ready(self, gateway: Gateway, ups: Sequence[bool], starts: Sequence[Started]) -> None:
        self._ready = True
        for i, (up, start) in enumerate(zip(ups, starts, strict=True)):
            if not up and not start.failures:
                self._say(f"replica {i} still starts{self._rows[i].said()}")
        if look := gateway.page:
            self._say(f"look: {look}")
        count = f"{len(ups)}" if all(ups) else f"{sum(ups)} of {len(ups)}"
        passed_s = self._clock() - self._begun_s
        self._say(f"ready in {passed_s:.1f} s: {gateway.url}, {count} replicas")


class _Row:
    """What was seen of one replica."""

    def __init__(self) -> None:
        self.up = False
        self.failures = 0
        self.why = ""  # of the last failure that was told
        self.lines: deque[str] = deque(maxlen=LAST_LINES)  # of its process that runs, or ran last

    def said(self) -> str:
        """Behind a sentence about it."""
        return ". Its last lines:\n    " + "\n    ".join(self.lines) if self.lines else ""
