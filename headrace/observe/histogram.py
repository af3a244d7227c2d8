"""Histograms that are cheap to feed, and their bounds.

Times have every bound that vLLM's metrics have, so that queries for one of them find it, and finer
ones below: a small model answers in milliseconds.
"""

from __future__ import annotations

from bisect import bisect_left

from prometheus_client import CollectorRegistry, Histogram

_FINE = (
    0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1,
    0.15, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80, 160, 640,
)  # fmt: skip
# Of vllm:time_to_first_token_seconds, of its token times, and of its times of whole requests.
_VLLM_TTFT = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40,
    80, 160, 640, 2560,
)  # fmt: skip
_VLLM_TOKEN = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
_VLLM_REQUEST = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip


def _joined(*lists: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(sorted({float(bound) for bounds in lists for bound in bounds}))


FINE = _joined(_FINE)
TTFT = _joined(_FINE, _VLLM_TTFT)
TOKEN = _joined(_FINE, _VLLM_TOKEN)
REQUEST = _joined(_FINE, _VLLM_REQUEST)
WORK = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1, 5)
STEP = _joined(WORK, (0.00001, 0.00002, 0.0015, 0.002, 0.003, 0.004, 0.0075, 0.015, 0.02, 0.25))
TOKENS = (*(m * 10.0**e for e in range(6) for m in (1, 2, 5)), 1e6)  # vLLM's 1-2-5 series
STEP_TOKENS = (1.0, *(2.0**e for e in range(3, 15)))  # vLLM's: 1, 8, 16, ...
CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 128.0)


class BatchedHistogram(Histogram):
    """A histogram for what comes once a token or a step: kept here, written in batches. What comes
    once a request is written at once. One thread."""

    def _metric_init(self) -> None:
        super()._metric_init()
        self._pending = [0] * len(self._buckets)
        self._pending_sum = 0.0
        self._noted = False

    def write(self, value: float) -> None:
        """As `observe`, which walks along the bounds."""
        self._buckets[bisect_left(self._upper_bounds, value)].inc(1)
        self._sum.inc(value)

    def note(self, value: float, times: int = 1) -> None:
        """As `observe`, so many times; shown after the next `flush`."""
        self._pending[bisect_left(self._upper_bounds, value)] += times
        self._pending_sum += value * times
        self._noted = True

    def flush(self) -> None:
        """Write what was noted."""
        if not self._noted:
            return
        for i, (bucket, count) in enumerate(zip(self._buckets, self._pending, strict=True)):
            if count:
                bucket.inc(count)
                self._pending[i] = 0
        self._sum.inc(self._pending_sum)
        self._pending_sum, self._noted = 0.0, False


class Histograms:
    """The histograms of one process for one model, flushed together."""

    def __init__(self, model_name: str, registry: CollectorRegistry) -> None:
        self._model_name, self._registry = model_name, registry
        self._made: list[BatchedHistogram] = []

    def make(self, name: str, text: str, bounds: tuple[float, ...]) -> BatchedHistogram:
        """A new one, labelled with the model's name."""
        metric = BatchedHistogram(
            name, text, ["model_name"], registry=self._registry, buckets=bounds
        ).labels(self._model_name)
        self._made.append(metric)
        return metric

    def flush(self) -> None:
        """Write what was noted."""
        for metric in self._made:
            metric.flush()
