"""Telemetry of processes, machine and GPU, through a scripted driver and made-up files."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.parser import text_string_to_metric_families

from headrace.api.live import gpu_now
from headrace.observe.exposition import Exposition
from headrace.observe.host import Rapl
from headrace.observe.metrics import expose
from headrace.observe.nvml import Device, DeviceReading
from headrace.observe.telemetry import DeviceMetrics, Telemetry, TokenEnergy
from tests.unit.scripted_nvml import UUID, NVMLError, ScriptedNvml

GIB = 2**30
WHOLE: dict[str, Any] = {
    "name": "NVIDIA H100 80GB HBM3",
    "index": 3,
    "utilization": SimpleNamespace(gpu=97, memory=55),
    "memory": SimpleNamespace(used=60 * GIB, total=80 * GIB),
    "power": 512_300,
    "limit": 700_000,
    "energy": 9_000_000,
    "sm_clock": 1980,
    "memory_clock": 2619,
    "temperature": 61,
    "throttles": 0x4 | 0x40,
}


def shown(registry: CollectorRegistry) -> dict[str, float]:
    """Name, and the value of the label `reason`, `source` or `process`, -> value."""
    found = {}
    for family in text_string_to_metric_families(expose(registry).decode()):
        for sample in family.samples:
            kinds = [sample.labels.get(key, "") for key in ("reason", "source", "process")]
            found[" ".join([sample.name, *filter(None, kinds)])] = sample.value
    return found


def test_all_that_a_card_says() -> None:
    nvml = ScriptedNvml(**WHOLE)
    device = Device(nvml, UUID)
    assert device.read() == pytest.approx(
        DeviceReading(
            0.97, 0.55, 60 * GIB, 80 * GIB, 512.3, 700, 9000, 1.98e9, 2.619e9, 61, 0x44,
            0.99, 0.8, 0.4, 0.25, 0.6,
        )
    )  # fmt: skip
    assert (device.index, device.name) == ("3", WHOLE["name"])
    device.close()
    assert (nvml.opened, nvml.samples) == (0, 0)


def test_what_a_card_cannot_say_is_absent() -> None:
    registry = CollectorRegistry()
    nvml = ScriptedNvml(gpm=False, name="old", temperature=50)
    device, metrics = Device(nvml, UUID), DeviceMetrics(registry)
    assert device.read() == DeviceReading(temperature_c=50)
    assert metrics.write(device, device.read()) == 0.0
    found = {name: value for name, value in shown(registry).items() if value == value}
    assert found == {"headrace_device_temperature_celsius": 50, "DCGM_FI_DEV_GPU_TEMP": 50}


def test_a_single_figure_of_gpm_that_fails() -> None:
    nvml = ScriptedNvml(**WHOLE)
    del nvml.activity[5]
    reading = Device(nvml, UUID).read()
    assert (reading.tensor_active, reading.dram_active) == (None, 0.6)


def test_series_of_a_card() -> None:
    registry = CollectorRegistry()
    nvml = ScriptedNvml(**WHOLE)
    device, metrics = Device(nvml, UUID), DeviceMetrics(registry)
    assert metrics.write(device, device.read()) == 0.0, "what was drawn before is not ours"
    nvml.says["energy"] += 2_500
    assert metrics.write(device, device.read()) == pytest.approx(2.5)
    found = shown(registry)
    assert found["headrace_device_energy_joules_total"] == pytest.approx(2.5)
    assert found["headrace_device_memory_used_bytes"] == 60 * GIB
    assert found["headrace_device_throttled power_cap"] == 1
    assert found["headrace_device_throttled thermal"] == 0
    dcgm = {name: value for name, value in found.items() if name.startswith("DCGM_")}
    assert dcgm == pytest.approx(
        {
            "DCGM_FI_DEV_GPU_UTIL": 97, "DCGM_FI_DEV_MEM_COPY_UTIL": 55,
            "DCGM_FI_DEV_FB_USED": 60 * 1024, "DCGM_FI_DEV_FB_FREE": 20 * 1024,
            "DCGM_FI_DEV_POWER_USAGE": 512.3, "DCGM_FI_DEV_SM_CLOCK": 1980,
            "DCGM_FI_DEV_MEM_CLOCK": 2619, "DCGM_FI_DEV_GPU_TEMP": 61,
            "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": 9_002_500,
            "DCGM_FI_DEV_CLOCK_THROTTLE_REASONS": 0x44,
            "DCGM_FI_PROF_GR_ENGINE_ACTIVE": 0.99, "DCGM_FI_PROF_SM_ACTIVE": 0.8,
            "DCGM_FI_PROF_SM_OCCUPANCY": 0.4, "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": 0.25,
            "DCGM_FI_PROF_DRAM_ACTIVE": 0.6,
        }
    )  # fmt: skip
    nvml.says["energy"] = 100  # the driver was loaded again
    assert metrics.write(device, device.read()) == 0.0


def rapl(root: Path, zone: str, name: str, energy_uj: int, limit: int = 10_000_000) -> Path:
    folder = root / zone
    folder.mkdir(exist_ok=True)
    (folder / "name").write_text(f"{name}\n")
    (folder / "max_energy_range_uj").write_text(f"{limit}\n")
    (folder / "energy_uj").write_text(f"{energy_uj}\n")
    return folder / "energy_uj"


def test_energy_of_processors(tmp_path: Path) -> None:
    package = rapl(tmp_path, "intel-rapl:0", "package-0", 9_000_000)
    rapl(tmp_path, "intel-rapl:0:0", "core", 1)
    rapl(tmp_path, "intel-rapl:0:1", "dram", 5)
    energy = Rapl(tmp_path)
    assert energy.read() == {"package-0:0": 0.0, "dram:0:1": 0.0}, "cores are in their package"
    package.write_text("9500000")
    assert energy.read()["package-0:0"] == pytest.approx(0.5)
    package.write_text("250000")  # it starts again at its range
    assert energy.read()["package-0:0"] == pytest.approx(0.75)
    package.unlink()
    assert "package-0:0" not in energy.read()


def test_energy_that_may_not_be_read(tmp_path: Path) -> None:
    rapl(tmp_path, "intel-rapl:0", "package-0", 1).unlink()
    assert Rapl(tmp_path).read() == {}
    assert Rapl(tmp_path / "none").read() == {}


def test_joules_per_token() -> None:
    registry = CollectorRegistry()
    per_token = TokenEnergy(registry)

    def value() -> float:
        return shown(registry)["headrace_joules_per_token device"]

    per_token.write("device", 0.0, 100.0, 0.0)
    per_token.write("device", 50.0, 100.0, 1.0)
    assert value() != value(), "no token was made: nothing is said"
    per_token.write("device", 50.0, 150.0, 2.0)
    assert value() == 2.0
    per_token.write("device", 10.0, 160.0, 31.5)  # the first two moments are too old
    assert value() == 1.0
    per_token.write("device", 10.0, 160.0, 70.0)
    assert value() != value()


class Server:
    """A Telemetry without its thread, for processes that the test names."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **pids: int) -> None:
        monkeypatch.setattr("headrace.observe.host.POWERCAP", tmp_path)
        self.now_s = 100.0
        self.pids: Mapping[str, int] = pids
        self.telemetry = Telemetry(lambda: self.pids, 1.0, lambda: self.now_s)
        self.registry = self.telemetry._registry
        self.tokens = Counter("headrace_generation_tokens", "as an engine", registry=self.registry)

    def read(self) -> dict[str, float]:
        self.now_s += 1.0
        self.telemetry.read()
        return shown(self.registry)


def test_processes_and_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    server = Server(monkeypatch, tmp_path, engine=os.getpid(), gone=2**22 + 1)
    first = server.read()
    assert first["headrace_process_cpu_seconds_total engine"] > 0
    assert first["headrace_process_resident_bytes engine"] > 2**20
    assert first["headrace_host_memory_bytes"] > first["headrace_host_memory_available_bytes"] > 0
    assert not [name for name in first if "gone" in name or "joules" in name]
    second = server.read()
    name = "headrace_process_cpu_seconds_total engine"
    assert second[name] >= first[name]
    assert second["headrace_process_cpu_cores engine"] >= 0
    server.pids = {}
    third = server.read()
    assert third[name] == second[name], "a counter stays"
    resident = third["headrace_process_resident_bytes engine"]
    assert resident != resident, "a gauge goes"


def test_a_card_under_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    server, nvml = Server(monkeypatch, tmp_path), ScriptedNvml(**WHOLE)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    server.telemetry.watch(UUID)
    assert server.telemetry._device is None, "the thread opens it"
    server.read()
    server.telemetry.watch(UUID)  # an engine that was started again, on the same card
    for _ in range(5):
        nvml.says["energy"] += 500_000
        server.tokens.inc(250)
        found = server.read()
    assert found["headrace_joules_per_token device"] == pytest.approx(2.0)
    assert found["headrace_device_energy_joules_total"] == pytest.approx(2500)
    assert found["headrace_device_utilization_ratio"] == 0.97
    assert nvml.opened == 1


def test_the_live_page_gets_what_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    server = Server(monkeypatch, tmp_path)
    reading = Exposition(server.registry).reading
    assert gpu_now(reading) == {"name": "gpu"}
    monkeypatch.setitem(sys.modules, "pynvml", ScriptedNvml(gpm=False, **WHOLE))
    server.telemetry.watch(UUID)
    server.read()
    assert gpu_now(reading) == {
        "name": "gpu", "util": 0.97, "memory_used_bytes": 60 * GIB, "memory_bytes": 80 * GIB,
        "power_w": pytest.approx(512.3), "temperature_c": 61,
    }  # fmt: skip


def test_no_binding_and_no_card(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(monkeypatch, tmp_path)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with caplog.at_level(logging.WARNING, "headrace.telemetry"):
        server.telemetry.watch(UUID)
        server.read()
        monkeypatch.setitem(sys.modules, "pynvml", ScriptedNvml())
        server.telemetry.watch("another")
        server.read()
    assert "pip install 'nvidia-ml-py>=" in caplog.text
    assert "no GPU telemetry: Not Found" in caplog.text
    assert not [name for name in server.read() if "device" in name]


def test_a_fault_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A driver that goes mad is said once; the thread reads on, and ends when it is told to."""
    nvml, asked = ScriptedNvml(**WHOLE), threading.Semaphore(0)
    monkeypatch.setattr("headrace.observe.host.POWERCAP", tmp_path)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    running = Telemetry(dict, 0.001)
    running.watch(UUID)

    def mad(handle: str) -> Any:
        asked.release()
        raise OSError("the library is gone")

    monkeypatch.setattr(nvml, "nvmlDeviceGetPowerUsage", mad)
    with caplog.at_level(logging.WARNING, "headrace.telemetry"):
        running.start()
        assert all(asked.acquire(timeout=30) for _ in range(3))
        running.stop()
    assert not running.is_alive()
    assert caplog.text.count("telemetry cannot be read") == 1
    assert nvml.opened == 0
    assert issubclass(NVMLError, Exception)


def test_the_supervisor_can_still_choose_where_metrics_go() -> None:
    """prometheus_client looks for its folder when it is imported: nothing may do so before that is
    set."""
    code = "import headrace.supervisor, headrace.cli.main, sys; print(*sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert "prometheus_client" not in run.stdout.split()
