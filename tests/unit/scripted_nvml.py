"""A driver that says what a test wrote down: the functions of pynvml that `observe.nvml` calls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

UUID = "5a3f1c9e-0000-1111-2222-333344445555"


class NVMLError(Exception):
    """As pynvml's."""


class ScriptedNvml:
    """`says` maps a question to its answer; what is not in it is not supported."""

    NVMLError = NVMLError
    NVML_GPM_METRICS_GET_VERSION = 1

    def __init__(self, *, gpm: bool = True, **says: Any) -> None:
        self.gpm = gpm
        self.activity = {1: 99.0, 2: 80.0, 3: 40.0, 5: 25.0, 10: 60.0}  # by GPM's number, percent
        self.says: dict[str, Any] = says
        self.opened = 0
        self.samples = 0

    def nvmlInit(self) -> None:
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != f"GPU-{UUID}":
            raise NVMLError("Not Found")
        return "handle"

    def _answer(self, what: str, handle: str) -> Any:
        assert handle == "handle"
        if what not in self.says:
            raise NVMLError("Not Supported")
        return self.says[what]

    def nvmlDeviceGetName(self, handle: str) -> Any:
        return self._answer("name", handle)

    def nvmlDeviceGetIndex(self, handle: str) -> Any:
        return self._answer("index", handle)

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        return self._answer("utilization", handle)

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        return self._answer("memory", handle)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> Any:
        return self._answer("power", handle)

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: str) -> Any:
        return self._answer("limit", handle)

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> Any:
        return self._answer("energy", handle)

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> Any:
        return self._answer({1: "sm_clock", 2: "memory_clock"}[kind], handle)

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> Any:
        assert sensor == 0
        return self._answer("temperature", handle)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> Any:
        return self._answer("throttles", handle)

    def nvmlGpmQueryDeviceSupport(self, handle: str) -> Any:
        return SimpleNamespace(isSupportedDevice=int(self.gpm))

    def nvmlGpmSampleAlloc(self) -> Any:
        self.samples += 1
        return SimpleNamespace(taken=0)

    def nvmlGpmSampleFree(self, sample: Any) -> None:
        self.samples -= 1

    def nvmlGpmSampleGet(self, handle: str, sample: Any) -> Any:
        sample.taken += 1
        return sample

    def c_nvmlGpmMetricsGet_t(self) -> Any:
        return SimpleNamespace(metrics=[SimpleNamespace(nvmlReturn=0) for _ in range(10)])

    def nvmlGpmMetricsGet(self, asked: Any) -> Any:
        assert asked.version == 1
        assert asked.sample1 is not asked.sample2
        for metric in asked.metrics[: asked.numMetrics]:
            known = metric.metricId in self.activity
            metric.nvmlReturn = 0 if known else 3
            metric.value = self.activity.get(metric.metricId, 0.0)
        return asked
