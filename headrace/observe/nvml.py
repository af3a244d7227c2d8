"""What a GPU says of itself, through NVML: how busy, how hot, how much power.

`pynvml` is nvidia-ml-py, NVIDIA's own binding. What a card or its driver cannot tell is None.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

# Bits of nvmlDeviceGetCurrentClocksThrottleReasons (nvml.h). Idle and a user's own setting are no
# reasons to worry, but they are what the card says.
THROTTLES = {
    "idle": 0x1,
    "application_clocks": 0x2,
    "power_cap": 0x4,
    "hardware_slowdown": 0x8,
    "sync_boost": 0x10,
    "thermal": 0x20,
    "hardware_thermal": 0x40,
    "power_brake": 0x80,
    "display_clocks": 0x100,
}
# Of GPM (nvml.h): what NVML counts between two samples, from Hopper on. Percent.
_GPM = {
    "graphics_active": 1,
    "sm_active": 2,
    "sm_occupancy": 3,
    "tensor_active": 5,
    "dram_active": 10,
}
_CLOCK_SM, _CLOCK_MEMORY, _CORE = 1, 2, 0  # NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU


class DeviceReading(NamedTuple):
    """One moment. Ratios run from 0 to 1; those of GPM are means since the reading before."""

    utilization: float | None = None  # share of time in which any kernel ran
    memory_utilization: float | None = None  # share of time in which memory was read or written
    memory_used_bytes: float | None = None
    memory_bytes: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    energy_j: float | None = None  # since the driver was loaded
    sm_clock_hz: float | None = None
    memory_clock_hz: float | None = None
    temperature_c: float | None = None
    throttles: int | None = None  # bits of THROTTLES
    graphics_active: float | None = None
    sm_active: float | None = None
    sm_occupancy: float | None = None  # resident warps to what fits
    tensor_active: float | None = None  # share of time in which tensor cores worked
    dram_active: float | None = None  # bandwidth to its theoretical maximum


class Device:
    """One card. `nvml` is the module pynvml, or what answers like it; `uuid` as torch has it.

    Raises nvml.NVMLError if there is no card of this uuid, or no driver.
    """

    def __init__(self, nvml: Any, uuid: str) -> None:
        self._nvml = nvml
        nvml.nvmlInit()
        self.uuid = f"GPU-{uuid}"
        self._handle = nvml.nvmlDeviceGetHandleByUUID(self.uuid)
        self.name = str(self._ask(nvml.nvmlDeviceGetName) or "")
        index = self._ask(nvml.nvmlDeviceGetIndex)
        self.index = "" if index is None else str(index)
        self._samples: list[Any] = []  # of GPM: the one before, and the one to take next
        support = self._ask(nvml.nvmlGpmQueryDeviceSupport)
        if support is not None and support.isSupportedDevice:
            with contextlib.suppress(nvml.NVMLError):
                self._samples = [nvml.nvmlGpmSampleAlloc() for _ in range(2)]
                nvml.nvmlGpmSampleGet(self._handle, self._samples[0])

    def read(self) -> DeviceReading:
        """What it says now."""
        nvml, ask = self._nvml, self._ask
        used = ask(nvml.nvmlDeviceGetUtilizationRates)
        memory = ask(nvml.nvmlDeviceGetMemoryInfo)
        power_mw, limit_mw = (
            ask(nvml.nvmlDeviceGetPowerUsage),
            ask(nvml.nvmlDeviceGetEnforcedPowerLimit),
        )
        energy_mj = ask(nvml.nvmlDeviceGetTotalEnergyConsumption)
        return DeviceReading(
            utilization=None if used is None else used.gpu / 100,
            memory_utilization=None if used is None else used.memory / 100,
            memory_used_bytes=None if memory is None else float(memory.used),
            memory_bytes=None if memory is None else float(memory.total),
            power_w=_scaled(power_mw, 1e-3),
            power_limit_w=_scaled(limit_mw, 1e-3),
            energy_j=_scaled(energy_mj, 1e-3),
            sm_clock_hz=_scaled(ask(nvml.nvmlDeviceGetClockInfo, _CLOCK_SM), 1e6),
            memory_clock_hz=_scaled(ask(nvml.nvmlDeviceGetClockInfo, _CLOCK_MEMORY), 1e6),
            temperature_c=_scaled(ask(nvml.nvmlDeviceGetTemperature, _CORE), 1.0),
            throttles=ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons),
            **self._activity(),
        )

    def close(self) -> None:
        """Let go of the driver."""
        with contextlib.suppress(self._nvml.NVMLError):
            for sample in self._samples:
                self._nvml.nvmlGpmSampleFree(sample)
            self._nvml.nvmlShutdown()

    def _activity(self) -> dict[str, float]:
        """What GPM counted since the last call."""
        nvml = self._nvml
        if not self._samples:
            return {}
        before, after = self._samples
        found: dict[str, float] = {}
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlGpmSampleGet(self._handle, after)
            asked = nvml.c_nvmlGpmMetricsGet_t()
            asked.version, asked.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, len(_GPM)
            asked.sample1, asked.sample2 = before, after
            for at, number in enumerate(_GPM.values()):
                asked.metrics[at].metricId = number
            nvml.nvmlGpmMetricsGet(asked)
            for name, metric in zip(_GPM, asked.metrics, strict=False):
                if metric.nvmlReturn == 0:
                    found[name] = metric.value / 100
            self._samples = [after, before]
        return found

    def _ask(self, question: Callable[..., Any], *args: Any) -> Any:
        try:
            return question(self._handle, *args)
        except self._nvml.NVMLError:
            return None


def _scaled(value: float | None, by: float) -> float | None:
    return None if value is None else value * by
