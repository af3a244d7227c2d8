"""The supervisor over children that do as they are told: starts that fail, stops that are asked
for twice, and nothing left behind."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace import children as children_module
from headrace import launch, supervisor
from headrace.config import Settings
from headrace.errors import ConfigError
from headrace.messages import EngineInfo
from headrace.sources.resolve import FAKE
from headrace.supervisor import Supervisor

INFO = EngineInfo(1, 1, 1, 1, 1)


def lasting(*args: Any) -> None:
    """Heeds SIGTERM."""
    time.sleep(60)


def stubborn(*args: Any) -> None:
    """Drains for ever."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)


def refusing(*args: Any) -> None:
    raise SystemExit(supervisor.EXIT_SETUP)


def crashing(*args: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def loaded_then_lasting(folder: Path, settings: Settings, files: Any, tell: Any) -> None:
    tell.send(("ready", INFO, 0.0))
    time.sleep(60)


def loaded_then_crashing(folder: Path, settings: Settings, files: Any, tell: Any) -> None:
    """The first time it loads, then it dies while it does."""
    with (folder / "lives").open("a+") as lives:
        first = not lives.tell()
        lives.write("x")
    if first:
        tell.send(("ready", INFO, 0.0))
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(autouse=True)
def own_signals(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """What `run` changes in this process is put back; its folder is under `tmp_path`."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    others = children()  # servers that tests of this process share
    yield
    signal.set_wakeup_fd(-1)
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)
    assert not list(tmp_path.iterdir()), "the runtime folder is gone"
    assert not set(children()) - set(others), "no child is left, dead or alive"


def children() -> list[psutil.Process]:
    found = psutil.Process().children(recursive=True)
    return [child for child in found if "resource_tracker" not in " ".join(child.cmdline())]


def serve(
    monkeypatch: pytest.MonkeyPatch,
    engine: Callable[..., None],
    api: Callable[..., None],
    *,
    signals: tuple[int, ...] = (),
    when: Callable[[], bool] = lambda: True,
    said: list[str] | None = None,
    **settings: Any,
) -> tuple[int, str]:
    """Exit code and what was said. `signals` are sent one after another once `when` holds."""
    monkeypatch.setattr(launch, "engine_process", engine)
    monkeypatch.setattr(launch, "api_process", api)
    said = [] if said is None else said
    over = threading.Event()

    def send() -> None:
        while not when() and not over.is_set():
            time.sleep(0.02)
        for number in signals:
            if not over.is_set():
                os.kill(os.getpid(), number)
            over.wait(0.5)

    sender = threading.Thread(target=send)
    server = Supervisor(
        Settings(backend="fake", port=0, **settings), FAKE, said.append, time.perf_counter()
    )
    sender.start()
    try:
        return server.run(), "\n".join(said)
    finally:
        over.set()
        sender.join()


def two_started() -> bool:
    """Both children have come as far as to be what they are named."""
    names = [child.name() for child in psutil.Process().children()]
    return len([name for name in names if name.startswith("headrace-")]) == 2


def test_the_engine_starts_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes longest; what watches it is imported meanwhile."""
    began = list[str]()
    for what in ("engine", "telemetry"):
        start = getattr(Supervisor, f"_start_{what}")

        def noted(server: Supervisor, what: str = what, start: Any = start) -> None:
            began.append(what)
            start(server)

        monkeypatch.setattr(Supervisor, f"_start_{what}", noted)
    serve(monkeypatch, lasting, refusing)
    assert began == ["engine", "telemetry"]


def test_http_processes_that_cannot_start_end_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    code, said = serve(monkeypatch, lasting, refusing)
    assert code == supervisor.EXIT_SETUP
    assert "did not start" in said
    assert "starting it again" not in said


def test_http_processes_that_keep_dying_end_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "MAX_API_RESTARTS", 1)
    code, said = serve(monkeypatch, lasting, crashing)
    assert code == supervisor.EXIT_API_DIED
    assert said.count("starting it again") == 1
    assert "signal SIGKILL" in said


def test_an_engine_that_dies_while_loading_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    code, said = serve(monkeypatch, crashing, lasting, restart=True)
    assert code == supervisor.EXIT_SETUP
    assert "the engine did not start (signal SIGKILL)" in said


def test_an_engine_that_keeps_dying_is_started_ever_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it dies while it loads: what was there before may come back."""
    monkeypatch.setattr(children_module, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(children_module, "LAST_PAUSE_S", 0.03)
    said: list[str] = []
    again = [f"starting it again{when} (restart = true)"
             for when in ("", " in 0.01 s", " in 0.02 s", " in 0.03 s")]  # fmt: skip
    code, _ = serve(
        monkeypatch,
        loaded_then_crashing,
        lasting,
        signals=(signal.SIGTERM,),
        when=lambda: again[-1] in said,
        said=said,
        restart=True,
    )
    assert code == 0
    assert [line for line in said if "again" in line][:4] == again
    assert said.count("the engine process died (signal SIGKILL)") == 1
    assert said.count("the engine did not start (signal SIGKILL)") >= 3


def test_a_signal_in_a_pause_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    code, _ = serve(
        monkeypatch,
        loaded_then_crashing,
        lasting,
        signals=(signal.SIGTERM,),
        when=lambda: "starting it again in 1 s (restart = true)" in said,
        said=said,
        restart=True,
    )
    assert code == 0


def test_a_signal_while_loading_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    code, said = serve(monkeypatch, lasting, lasting, signals=(signal.SIGTERM,), when=two_started)
    assert code == 0
    assert "SIGTERM: draining" in said


def test_the_second_signal_kills(monkeypatch: pytest.MonkeyPatch) -> None:
    code, said = serve(
        monkeypatch,
        loaded_then_lasting,
        stubborn,
        signals=(signal.SIGINT, signal.SIGINT),
        when=two_started,
        shutdown_timeout_s=3600.0,  # nobody waits for this
    )
    assert code == 0
    assert "SIGINT again: ending at once" in said


def test_a_taken_port_leaves_nothing_behind() -> None:
    first = supervisor._listen(Settings(port=0))
    try:
        with pytest.raises(ConfigError, match="cannot listen"):
            Supervisor(Settings(port=first.getsockname()[1]), FAKE, print, 0.0)
    finally:
        first.close()
