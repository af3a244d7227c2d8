"""Telemetry: each second, what the server's processes, its machine and its GPU say of themselves.

A thread of the supervisor, which computes nothing, asks: a slow driver delays no step.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge

from headrace.extras import install
from headrace.observe import host
from headrace.observe.exposition import Exposition
from headrace.observe.nvml import THROTTLES, Device, DeviceReading

log = logging.getLogger("headrace.telemetry")

WINDOW_S = 30.0  # joules per token is over so long
NAN = float("nan")  # a gauge that is NaN is not shown
STOP_S = 2.0
MIB = 2.0**20


class _Shown(NamedTuple):
    """A field of `DeviceReading`: our name and its text, dcgm-exporter's name, ours to its unit."""

    field: str
    name: str
    text: str
    dcgm: str = ""
    factor: float = 1.0


DEVICE = (
    _Shown("utilization", "utilization_ratio", "share of time in which any kernel ran",
           "DCGM_FI_DEV_GPU_UTIL", 100),
    _Shown("memory_utilization", "memory_utilization_ratio",
           "share of time in which memory was read or written", "DCGM_FI_DEV_MEM_COPY_UTIL", 100),
    _Shown("memory_used_bytes", "memory_used_bytes", "memory in use, by all programs",
           "DCGM_FI_DEV_FB_USED", 1 / MIB),
    _Shown("memory_bytes", "memory_bytes", "memory in all"),
    _Shown("power_w", "power_watts", "power drawn", "DCGM_FI_DEV_POWER_USAGE"),
    _Shown("power_limit_w", "power_limit_watts", "power it may draw"),
    _Shown("sm_clock_hz", "sm_clock_hertz", "clock of the multiprocessors",
           "DCGM_FI_DEV_SM_CLOCK", 1e-6),
    _Shown("memory_clock_hz", "memory_clock_hertz", "clock of the memory",
           "DCGM_FI_DEV_MEM_CLOCK", 1e-6),
    _Shown("temperature_c", "temperature_celsius", "of the chip", "DCGM_FI_DEV_GPU_TEMP"),
    _Shown("graphics_active", "engine_active_ratio", "share of time in which it computed",
           "DCGM_FI_PROF_GR_ENGINE_ACTIVE"),
    _Shown("sm_active", "sm_active_ratio", "share of multiprocessors that worked",
           "DCGM_FI_PROF_SM_ACTIVE"),
    _Shown("sm_occupancy", "sm_occupancy_ratio", "resident warps to what fits",
           "DCGM_FI_PROF_SM_OCCUPANCY"),
    _Shown("tensor_active", "tensor_active_ratio", "share of time in which tensor cores worked",
           "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE"),
    _Shown("dram_active", "dram_active_ratio", "memory bandwidth to its maximum",
           "DCGM_FI_PROF_DRAM_ACTIVE"),
)  # fmt: skip


class DeviceMetrics:
    """Series of one card, under our names and under those of NVIDIA's dcgm-exporter."""

    LABELS = ("device", "uuid", "name")
    DCGM_LABELS = ("gpu", "UUID", "device", "modelName", "Hostname")

    def __init__(self, registry: CollectorRegistry) -> None:
        self._gauges = [
            (shown, _gauge(f"headrace_device_{shown.name}", shown.text, registry, self.LABELS))
            for shown in DEVICE
        ]
        self._dcgm = [
            (shown, _gauge(shown.dcgm, f"{shown.text}, as dcgm-exporter has it", registry,
                           self.DCGM_LABELS))
            for shown in DEVICE if shown.dcgm
        ]  # fmt: skip
        self._energy = Counter(
            "headrace_device_energy_joules", "drawn since the server is ready", self.LABELS,
            registry=registry,
        )  # fmt: skip
        self._dcgm_free = _gauge(
            "DCGM_FI_DEV_FB_FREE", "memory that is not in use, in MiB", registry, self.DCGM_LABELS
        )
        self._dcgm_energy = _gauge(
            "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "in mJ, since the driver was loaded", registry,
            self.DCGM_LABELS,
        )  # fmt: skip
        self._dcgm_throttles = _gauge(
            "DCGM_FI_DEV_CLOCK_THROTTLE_REASONS", "bits of NVML's throttle reasons", registry,
            self.DCGM_LABELS,
        )  # fmt: skip
        self._throttled = _gauge(
            "headrace_device_throttled", "1 = its clocks are held down, for this reason", registry,
            (*self.LABELS, "reason"),
        )  # fmt: skip
        self._energy_j: float | None = None

    def write(self, device: Device, reading: DeviceReading) -> float:
        """Show a reading; returns the joules that were drawn since the one before."""
        own = (device.index, device.uuid, device.name)
        theirs = (*own[:2], f"nvidia{device.index}", device.name, socket.gethostname())
        for shown, gauge in self._gauges:
            gauge.labels(*own).set(_value(getattr(reading, shown.field)))
        for shown, gauge in self._dcgm:
            gauge.labels(*theirs).set(_value(getattr(reading, shown.field)) * shown.factor)
        free = _value(reading.memory_bytes) - _value(reading.memory_used_bytes)
        self._dcgm_free.labels(*theirs).set(free / MIB)
        self._dcgm_energy.labels(*theirs).set(_value(reading.energy_j) * 1e3)
        self._dcgm_throttles.labels(*theirs).set(_value(reading.throttles))
        for reason, bit in THROTTLES.items():
            bits = reading.throttles
            held = NAN if bits is None else float(bool(bits & bit))
            self._throttled.labels(*own, reason).set(held)
        if reading.energy_j is None:
            return 0.0
        grown = max(0.0, reading.energy_j - (self._energy_j or reading.energy_j))
        self._energy_j = reading.energy_j
        self._energy.labels(*own).inc(grown)
        return grown


class HostMetrics:
    """Series of the machine and of the server's processes on it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return _gauge(f"headrace_{name}", text, registry, labels)

        self._cpu_s = Counter(
            "headrace_process_cpu_seconds", "processor time of a process of the server",
            ["process"], registry=registry,
        )  # fmt: skip
        self._cores = gauge("process_cpu_cores", "cores that it kept busy last second", "process")
        self._rss = gauge("process_resident_bytes", "its memory", "process")
        self._memory = gauge("host_memory_bytes", "memory of the machine")
        self._available = gauge("host_memory_available_bytes", "that programs could still get")
        self._busy = gauge("host_cpu_ratio", "share of all cores that worked last second")
        self._energy = Counter(
            "headrace_host_energy_joules", "drawn by processors, where RAPL can be read", ["zone"],
            registry=registry,
        )  # fmt: skip
        self._processes, self._rapl = host.Processes(), host.Rapl()
        self._last: dict[str, tuple[int, float]] = {}  # process -> its id, its processor time

    def write(self, pids: Mapping[str, int], elapsed_s: float) -> float:
        """Show how things are; returns the joules that processors drew since the last call."""
        for name, pid in pids.items():
            self._write_process(name, pid, elapsed_s)
        for name in self._last.keys() - pids.keys():
            del self._last[name]
            self._cores.labels(name).set(NAN)
            self._rss.labels(name).set(NAN)
        total, available = host.memory()
        self._memory.set(total)
        self._available.set(available)
        self._busy.set(host.cpu_ratio())
        grown = self._rapl.read()
        for zone, joules in grown.items():
            self._energy.labels(zone).inc(joules)
        return sum(grown.values())

    def _write_process(self, name: str, pid: int, elapsed_s: float) -> None:
        reading = self._processes.read(pid)
        if reading is None:  # it ended just now: the supervisor will see to it
            return
        known, before_s = self._last.get(name, (pid, 0.0))
        grown_s = reading.cpu_s - (before_s if known == pid else 0.0)
        self._last[name] = (pid, reading.cpu_s)
        self._cpu_s.labels(name).inc(max(0.0, grown_s))
        self._cores.labels(name).set(grown_s / elapsed_s if elapsed_s else NAN)
        self._rss.labels(name).set(reading.rss_bytes)


class TokenEnergy:
    """Joules per generated token, over the last `WINDOW_S`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._gauge = _gauge(
            "headrace_joules_per_token",
            "energy to tokens generated, over the last 30 s; source: device, or host (processors)",
            registry, ["source"],
        )  # fmt: skip
        self._moments: dict[str, deque[tuple[float, float, float]]] = {}
        self._joules: dict[str, float] = {}

    def write(self, source: str, grown_j: float, tokens: float, now_s: float) -> None:
        """grown_j: since the last call; tokens: generated so far."""
        joules = self._joules[source] = self._joules.get(source, 0.0) + grown_j
        moments = self._moments.setdefault(source, deque())
        moments.append((now_s, joules, tokens))
        while moments[0][0] < now_s - WINDOW_S:
            moments.popleft()
        _, first_j, first_tokens = moments[0]
        made = tokens - first_tokens
        known = made > 0 and joules > first_j
        self._gauge.labels(source).set((joules - first_j) / made if known else NAN)


class Telemetry(threading.Thread):
    """Reads every `period_s` seconds until `stop`.

    pids: name -> id of the server's processes, now. PROMETHEUS_MULTIPROC_DIR must be set before
    this module is imported, for others to show what it writes.
    """

    def __init__(
        self,
        pids: Callable[[], Mapping[str, int]],
        period_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(name="telemetry", daemon=True)
        self._pids, self._period_s, self._clock = pids, period_s, clock
        self._stopped = threading.Event()
        self._registry = CollectorRegistry()
        self._exposition = Exposition(self._registry)
        self._host = HostMetrics(self._registry)
        self._devices = DeviceMetrics(self._registry)
        self._per_token = TokenEnergy(self._registry)
        self._wanted = self._opened = ""  # uuid of the GPU
        self._device: Device | None = None
        self._read_s = 0.0

    def watch(self, uuid: str) -> None:
        """The engine computes on this GPU. What keeps us from reading it is said in the log.

        The thread opens it with its next reading: a driver may take its time for that, too.
        """
        self._wanted = uuid

    def _open(self, uuid: str) -> None:
        self._opened = uuid
        try:
            import pynvml
        except ImportError:
            log.warning("no GPU telemetry without nvidia-ml-py: %s", install("gpu"))
            return
        try:
            self._device = Device(pynvml, uuid)
        except pynvml.NVMLError as error:
            log.warning("no GPU telemetry: %s", error)

    def run(self) -> None:
        broken = False
        while not self._stopped.wait(self._period_s):
            try:
                self.read()
            except Exception:  # whatever it is, the server goes on, and so do we
                if not broken:
                    log.warning("telemetry cannot be read", exc_info=True)
                broken = True
        if self._device is not None:
            self._device.close()

    def read(self) -> None:
        """Once."""
        if self._wanted != self._opened:
            self._open(self._wanted)
        now_s = self._clock()
        elapsed_s, self._read_s = now_s - self._read_s if self._read_s else 0.0, now_s
        drawn = {"host": self._host.write(self._pids(), elapsed_s)}
        device = self._device
        if device is not None:
            drawn["device"] = self._devices.write(device, device.read())
        if not any(drawn.values()):
            return
        found = self._exposition.reading("headrace_generation_tokens")
        for source, joules in drawn.items():
            self._per_token.write(source, joules, found.value if found else 0.0, now_s)

    def stop(self) -> None:
        """End the thread; one that hangs in a driver ends with the process."""
        self._stopped.set()
        self.join(STOP_S)


def _value(value: float | None) -> float:
    return NAN if value is None else float(value)


def _gauge(name: str, text: str, registry: CollectorRegistry, labels: Any) -> Gauge:
    return Gauge(name, text, labels, registry=registry, multiprocess_mode="livemostrecent")
