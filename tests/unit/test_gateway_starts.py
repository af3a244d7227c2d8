"""Workers that the gateway starts: one start for all who wait, kept warm, stopped when idle, failed
ones told apart; and how a machine is shared out among replicas."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import sys
from pathlib import Path

import msgspec
import pytest

from headrace.cli.options import read_settings
from headrace.cli.up import SUPPLIED
from headrace.config import Settings
from headrace.errors import ConfigError
from headrace.gateway.app import Gateway
from headrace.gateway.registry import StaticRegistry
from headrace.gateway.settings import WorkerSpec, read_fleet
from headrace.gateway.starts import Started, StartSpec
from headrace.replicas import (
    LATE_S,
    Replicas,
    Shares,
    event_endpoints,
    free_ports,
    visible_gpus,
    workers,
)
from tests.unit.gateway_rig import call, chat, gateway, get, until

NOBODY = itertools.count(1)  # ports where nobody listens
SERVER = """
import json, os, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
open(sys.argv[2], "a").write(f"{os.getpid()}\\n")
print("here I am", flush=True)
class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args): pass
    def do_GET(self): self.say({"data": [{"id": "m"}]})
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.say({"choices": [{"message": {"content": os.environ.get("WORD", "")}}]})
    def say(self, what):
        body = json.dumps(what).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Each process writes its id here."""
    return tmp_path / "pids"


def spec(log: Path, **more: object) -> WorkerSpec:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    command = (sys.executable, "-c", SERVER, str(port), str(log))
    start = StartSpec(command=command, env={"WORD": "hello"}, **more)  # type: ignore[arg-type]
    return WorkerSpec(url=f"http://127.0.0.1:{port}", models=("m",), start=start)


def pids(log: Path) -> list[int]:
    return [int(line) for line in log.read_text().split()] if log.exists() else []


def process(made: Gateway) -> Started:
    (worker,) = made.fleet.workers.values()
    assert worker.start is not None
    return worker.start


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def test_one_start_for_all_who_wait(log: Path) -> None:
    said: list[str] = []
    async with gateway(registry=StaticRegistry([spec(log)]), up=False) as made:
        process(made).tell = said.append
        assert process(made).state == "cold"
        models = (await get(made.port, "/v1/models")).json()
        assert [card["id"] for card in models["data"]] == ["m"], "it is there to be asked for"
        answers = await asyncio.gather(*(call(made.port, chat(model="m")) for _ in range(5)))
        assert [a.json()["choices"][0]["message"]["content"] for a in answers] == ["hello"] * 5
        assert process(made).state == "running"
        assert said == ["here I am"]
    assert len(pids(log)) == 1
    assert gone(pids(log)[0]), "it ends with the gateway"


async def test_kept_warm_and_started_again_when_it_dies(log: Path) -> None:
    async with gateway(registry=StaticRegistry([spec(log, warm=True)])) as made:
        os.kill(pids(log)[0], signal.SIGKILL)
        await until(lambda: process(made).state == "failed", "it is seen to have died")
        assert process(made).why == "signal SIGKILL"
        await until(lambda: process(made).state == "running", "it is started again")
        assert (await call(made.port, chat(model="m"))).status == 200
        assert not process(made).hopeless
    assert len(pids(log)) == 2


async def test_idle_ones_stop_and_come_back(log: Path) -> None:
    async with gateway(registry=StaticRegistry([spec(log, idle_stop_s=0.01)]), up=False) as made:
        assert (await call(made.port, chat(model="m"))).status == 200
        await until(lambda: process(made).state == "cold", "it stopped")
        assert gone(pids(log)[0])
        assert (await call(made.port, chat(model="m"))).status == 200
    assert len(pids(log)) == 2


@pytest.mark.parametrize(
    ("command", "why", "hopeless"),
    [
        ((sys.executable, "-c", "raise SystemExit(3)"), "exit code 3", False),
        ((sys.executable, "-c", "raise SystemExit(2)"), "exit code 2", True),
        (("/no/such/file",), "/no/such/file cannot be run", False),
    ],
)
async def test_a_start_that_fails_is_told(
    command: tuple[str, ...], why: str, hopeless: bool
) -> None:
    """Those who wait get an error at once, not when their patience is over."""
    start = StartSpec(command=command)
    broken = WorkerSpec(url="http://127.0.0.1:1", models=("m",), start=start)
    async with gateway(registry=StaticRegistry([broken]), up=False) as made:
        answer = await call(made.port, chat(model="m"))
        assert (answer.status, answer.json()["error"]["code"]) == (503, "no_worker")
        assert process(made).hopeless is hopeless
        (row,) = (await get(made.port, "/gateway/workers")).json()["workers"]
        assert row["start"]["state"] == "failed"
        assert row["start"]["why"].startswith(why)


async def test_a_start_that_takes_too_long_is_cut() -> None:
    code = "import threading; threading.Event().wait()"
    start = StartSpec(command=(sys.executable, "-c", code), timeout_s=0.1)
    never = WorkerSpec(url="http://127.0.0.1:1", models=("m",), start=start)
    async with gateway(registry=StaticRegistry([never]), up=False) as made:
        assert (await call(made.port, chat(model="m"))).status == 503
        assert process(made).why == "not up after 0.1 s"


def test_on_demand_needs_models(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    text = '[[workers]]\nurl = "http://127.0.0.1:1"\n[workers.start]\ncommand = ["x"]\n'
    file.write_text(text)
    with pytest.raises(ConfigError, match="on demand needs `models`"):
        read_fleet(file)
    file.write_text(text + "warm = true\n")
    assert read_fleet(file).workers[0].start == StartSpec(command=("x",), warm=True)


def broken(code: str) -> WorkerSpec:
    """A worker whose process runs `code` and never listens."""
    start = StartSpec(command=(sys.executable, "-c", code), warm=True)
    return WorkerSpec(url=f"http://127.0.0.1:{next(NOBODY)}", models=("m",), start=start)


async def test_replicas_that_cannot_start_end_the_gateway() -> None:
    said: list[str] = []
    never = "print('no'); raise SystemExit(2)"
    registry = Replicas([broken(never), broken(never)], said.append)
    async with gateway(registry=registry, up=False) as made:
        registry.watch(made)
        await until(lambda: registry.failed, "it gave up")
    why = "did not start: exit code 2; it is not tried again. Its last lines:\n    no"
    assert sorted(said) == sorted(
        line for i in (0, 1) for line in (f"replica {i} | no", f"replica {i} {why}")
    )


async def test_replicas_say_when_all_are_ready(log: Path) -> None:
    said: list[str] = []
    registry = Replicas([spec(log, warm=True), spec(log, warm=True)], said.append)
    async with gateway(registry=registry, up=False) as made:
        registry.watch(made)
        await until(lambda: any(line.startswith("ready in") for line in said), "they are ready")
        assert said[-1].endswith(f"{made.url}, 2 replicas")
        assert not registry.failed


@pytest.mark.parametrize(
    ("code", "then"),
    [
        (1, "it is tried again, each time later, at last every 60 s"),
        (2, "it is not tried again"),
    ],
)
async def test_a_replica_that_never_starts_is_named_and_the_others_go_on(
    log: Path, code: int, then: str
) -> None:
    said: list[str] = []
    never = broken(f"print('first'); print('no memory'); raise SystemExit({code})")
    registry = Replicas([spec(log, warm=True), never], said.append)
    async with gateway(registry=registry, up=False) as made:
        registry.watch(made)
        await until(lambda: any(line.startswith("ready in") for line in said), "one is ready")
        assert said[-1].endswith(f"{made.url}, 1 of 2 replicas")
        why = f"replica 1 did not start: exit code {code}; {then}. Its last lines:"
        assert f"{why}\n    first\n    no memory" in said
        starts = [worker.start for worker in made.fleet.workers.values()]
        if code == 1:
            await until(lambda: starts[1] is not None and starts[1].failures > 1, "tried again")
        assert (await call(made.port, chat(model="m"))).status == 200
        assert sum(line.startswith(why) for line in said) == 1, "said once"


async def test_a_replica_that_hangs_is_named_and_told_when_it_comes(log: Path) -> None:
    """And one that dies later, and comes again."""
    said: list[str] = []
    now_s = 0.0
    hangs = spec(log, warm=True)
    assert hangs.start is not None
    gate = log.with_name("gate")
    waiting = (
        "import pathlib, sys, time\nprint('reads weights', flush=True)\n"
        f"while not pathlib.Path({str(gate)!r}).exists(): time.sleep(0.01)\n"
    )
    command = list(hangs.start.command)
    command[2] = waiting + command[2]
    start = msgspec.structs.replace(hangs.start, command=tuple(command))
    specs = [spec(log, warm=True), msgspec.structs.replace(hangs, start=start)]
    registry = Replicas(specs, said.append, lambda: now_s)
    async with gateway(registry=registry, up=False) as made:
        registry.watch(made)
        workers = list(made.fleet.workers.values())
        await until(lambda: workers[0].up and "replica 1 | reads weights" in said, "one is up")
        registry.tick()
        assert not any(line.startswith("ready") for line in said), "the other may come"
        now_s = 2 * LATE_S
        registry.tick()
        assert said[-1].endswith(f"{made.url}, 1 of 2 replicas")
        assert "replica 1 still starts. Its last lines:\n    reads weights" in said
        gate.touch()
        await until(lambda: "replica 1 is up: 2 of 2 replicas" in said, "the other is told")
        os.kill(pids(log)[0], signal.SIGKILL)
        await until(lambda: "replica 0 is up: 2 of 2 replicas" in said, "it came again")
        assert any(line.startswith("replica 0 ended: signal SIGKILL; ") for line in said)


# ---------------------------------------------------------------- shares of a machine


def test_cores_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2, 4, 6, 8})
    shares = Shares(Settings(), "cpu", 2)
    assert shares.cores == [(0, 2), (4, 6, 8)]
    assert int(shares.kv_memory) > 0
    assert Shares(Settings(kv_blocks=10), "cpu", 2).kv_memory == ""
    with pytest.raises(ConfigError, match="more than the 5 cores"):
        Shares(Settings(), "cpu", 6)


def test_gpus_are_shared_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "tty0"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == ["0", "1"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}, tmp_path) == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    assert Shares(Settings(), "cuda", 2).gpus == ["GPU-a", "GPU-b"]
    assert Shares(Settings(gpu_memory_utilization=0.5), "cuda", 3).gpus[2] == "GPU-a"
    with pytest.raises(ConfigError, match=r"on 2 GPUs.*at most 0.5"):
        Shares(Settings(), "cuda", 3)
    assert len(Shares(Settings(kv_memory="1GiB"), "cuda", 3).gpus) == 3, "it sizes the cache alone"


def test_replicas_get_the_flags_of_serve(tmp_path: Path) -> None:
    settings = Settings(model="m.gguf", usage_log="/x/usage.jsonl", backend="fake")
    flags = {"model": "m.gguf", "port": 80, "ui": False, "cors_origin": ("a", "b"), "seed": 7}
    shares = Shares(settings, "fake", 2)
    one, two = workers(settings, flags, Path("c.toml"), "m", shares, (8001, 8002), tmp_path)
    assert one.start is not None
    command = list(one.start.command)
    at = command.index("serve")
    assert command[at + 1 : at + 11] == [
        "m.gguf", "--no-ui", "--cors-origin", "a", "--cors-origin", "b", "--seed", "7",
        "--config", "c.toml",
    ]  # fmt: skip
    assert command[-2:] == ["--usage-log", "/x/usage.0.jsonl"]
    assert f"ipc://{tmp_path}/events-0" in command
    assert one.url != two.url
    assert one.api_key == two.api_key == one.start.env["HEADRACE_API_KEY"]
    assert one.api_key not in " ".join(command), "every user of the machine can read arguments"


def test_ports_of_replicas_are_theirs_alone() -> None:
    with free_ports(20) as ports:
        assert len(set(ports)) == 20
        for _ in range(2):  # a replica starts, and starts again
            for port in ports:
                with socket.create_server(("127.0.0.1", port)) as listens, socket.socket() as one:
                    one.connect(listens.getsockname())
                    listens.accept()[0].close()
        if sys.platform == "linux":
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", ports[0]))


def test_each_replica_has_its_own_place_for_events(tmp_path: Path) -> None:
    """The user's address counts on; what is not named is the gateway's alone."""
    both = Settings(kv_events_endpoint="tcp://*:5557", kv_events_replay_endpoint="tcp://*:5600")
    assert event_endpoints(both, 3, tmp_path) == [
        ("tcp://*:5557", "tcp://*:5600"),
        ("tcp://*:5558", "tcp://*:5601"),
        ("tcp://*:5559", "tcp://*:5602"),
    ]
    one = Settings(kv_events_endpoint="tcp://[::]:65534")
    assert event_endpoints(one, 2, tmp_path) == [
        ("tcp://[::]:65534", f"ipc://{tmp_path}/replay-0"),
        ("tcp://[::]:65535", f"ipc://{tmp_path}/replay-1"),
    ]
    path = Settings(kv_events_endpoint="ipc:///x/e")
    assert [e for e, _ in event_endpoints(path, 2, tmp_path)] == ["ipc:///x/e-0", "ipc:///x/e-1"]
    assert event_endpoints(Settings(), 1, tmp_path) == [
        (f"ipc://{tmp_path}/events-0", f"ipc://{tmp_path}/replay-0")
    ]
    assert event_endpoints(Settings(prefix_caching=False), 2, tmp_path) == []
    assert event_endpoints(Settings(engine="naive"), 2, tmp_path) == []
    with pytest.raises(ConfigError, match="without a prefix cache, headrace up cannot honour kv_e"):
        event_endpoints(Settings(prefix_caching=False, kv_events_topic="kv"), 2, tmp_path)
    given = {"kv_events_topic": "kv", "kv_events_buffer_steps": 9}
    settings, _ = read_settings(None, given, SUPPLIED)
    assert len(event_endpoints(settings, 2, tmp_path)) == 2, "who names none still has them"


@pytest.mark.parametrize(
    ("endpoint", "replay", "why"),
    [
        ("tcp://*:5557", "tcp://*:5558", "leave 2 ports between them"),
        ("tcp://*:5558", "tcp://127.0.0.1:5557", "leave 2 ports between them"),
        ("ipc:///x/e", "ipc:///x/e", "and meet"),
        ("tcp://*:65535", "", "no 2 ports from there on"),
        ("tcp://collector:5557", "", "a port of its own"),
    ],
)
def test_places_for_events_that_meet(tmp_path: Path, endpoint: str, replay: str, why: str) -> None:
    settings = Settings(kv_events_endpoint=endpoint, kv_events_replay_endpoint=replay)
    with pytest.raises(ConfigError, match=why):
        event_endpoints(settings, 2, tmp_path)
    shares = Shares(settings, "fake", 2)
    with pytest.raises(ConfigError, match=why):
        workers(settings, {"kv_events_endpoint": endpoint}, None, "m", shares, (1, 2), tmp_path)


def test_the_flags_of_events_are_said_once(tmp_path: Path) -> None:
    settings = Settings(kv_events_endpoint="tcp://*:7000")
    flags = {"kv_events_endpoint": "tcp://*:7000"}
    _, two = workers(settings, flags, None, "m", Shares(settings, "fake", 2), (1, 2), tmp_path)
    assert two.start is not None
    command = list(two.start.command)
    assert command.count("--kv-events-endpoint") == 1
    assert command[command.index("--kv-events-endpoint") + 1] == "tcp://*:7001"
