"""Prometheus metrics of one process; several processes are added up at exposition.

With PROMETHEUS_MULTIPROC_DIR set before this module is imported, every process writes its values
into that folder and any of them can show the sum; without it, one process shows its own.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Mapping
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from headrace.observe.usage_metrics import UsageMetrics

MULTIPROC = "PROMETHEUS_MULTIPROC_DIR"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

FINE = (
    0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1,
    0.15, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80, 160, 640,
)  # fmt: skip
WORK = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1, 5)
VLLM_TTFT = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40,
    80, 160, 640, 2560,
)  # fmt: skip

REGISTRY = CollectorRegistry()


class Stats(Protocol):
    """What the engine counts: four gauges, then totals.

    `finished` is reason -> requests, `runner` what its runner alone can count: event -> times.
    """

    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def kv_blocks(self) -> int: ...
    @property
    def kv_used(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def preemptions(self) -> int: ...
    @property
    def recomputed_tokens(self) -> int: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def generation_tokens(self) -> int: ...
    @property
    def started(self) -> int: ...
    @property
    def finished(self) -> Mapping[str, int]: ...
    @property
    def runner(self) -> Mapping[str, int]: ...
    @property
    def kv_events(self) -> Mapping[str, int]: ...
    @property
    def busy_s(self) -> float: ...
    @property
    def unclaimed_s(self) -> float: ...


class EngineMetrics:
    """The engine's gauges and counters. `update` after each turn; equal values cost a compare."""

    GAUGES = (
        ("running", "headrace_requests_running", "requests that hold a row"),
        ("waiting", "headrace_requests_waiting", "requests in the queue"),
        ("kv_blocks", "headrace_kv_blocks", "KV blocks in the pool"),
        ("kv_used", "headrace_kv_blocks_used", "KV blocks that a request holds"),
        ("running", "vllm:num_requests_running", "requests that hold a row"),
        ("waiting", "vllm:num_requests_waiting", "requests in the queue"),
    )
    COUNTERS = (
        ("steps", "headrace_steps", "steps finished"),
        ("preemptions", "headrace_preemptions", "requests that lost their KV blocks"),
        ("recomputed_tokens", "headrace_recomputed_tokens", "tokens computed again after that"),
        ("prompt_tokens", "headrace_prompt_tokens", "prompt tokens of admitted requests"),
        ("cached_tokens", "headrace_cached_tokens", "prompt tokens found in the prefix cache"),
        ("generation_tokens", "headrace_generation_tokens", "tokens generated"),
        ("started", "headrace_requests_started", "requests that the engine took"),
        ("busy_s", "headrace_busy_seconds", "time the device worked"),
        (
            "unclaimed_s",
            "headrace_unclaimed_seconds",
            "of that, for requests of HTTP processes that died: in no usage record",
        ),
    )

    def __init__(
        self, model_name: str, block_size: int, registry: CollectorRegistry = REGISTRY
    ) -> None:
        self._model_name = model_name
        self._block_size = str(block_size)
        self._gauges = [
            (field, _gauge(name, text, registry, ["model_name"]).labels(model_name))
            for field, name, text in self.GAUGES
        ]
        self._counters = [
            (field, Counter(name, text, ["model_name"], registry=registry).labels(model_name))
            for field, name, text in self.COUNTERS
        ]
        self._usage = _gauge(
            "vllm:kv_cache_usage_perc", "share of KV blocks in use, 0 to 1", registry,
            ["model_name"],
        ).labels(model_name)  # fmt: skip
        self._config = _gauge(
            "vllm:cache_config_info", "always 1; the labels hold the facts", registry,
            ["model_name", "block_size", "num_gpu_blocks"],
        )  # fmt: skip
        self._registry = registry
        self._by_label = [
            ("finished", _Labelled(
                "headrace_requests_finished", "requests that the engine ended, by reason",
                "reason", model_name, registry,
            )),
            ("runner", _Labelled(
                "headrace_runner_events", "what the runner did, by its own names for it",
                "event", model_name, registry,
            )),
            ("kv_events", _Labelled(
                "headrace_kv_events", "batches of KV events published or dropped, and replays",
                "event", model_name, registry,
            )),
        ]  # fmt: skip
        self._last: dict[str, float] = {}

    def describe_kernels(self, labels: Mapping[str, str]) -> None:
        """What computes and why; `labels` are the fields of `messages.KernelsInfo`."""
        gauge = _gauge(
            "headrace_kernels_info", "always 1; the labels say what computes and why",
            self._registry, ["model_name", *labels],
        )  # fmt: skip
        gauge.labels(self._model_name, *labels.values()).set(1)

    def update(self, stats: Stats) -> None:
        """Write what changed since the last call."""
        last = self._last
        if stats.kv_blocks != last.get("kv_blocks"):
            self._config.labels(self._model_name, self._block_size, str(stats.kv_blocks)).set(1)
        if stats.kv_used != last.get("kv_used") and stats.kv_blocks:
            self._usage.set(stats.kv_used / stats.kv_blocks)
        new: dict[str, float] = {}
        for field, gauge in self._gauges:
            value = new[field] = getattr(stats, field)
            if value != last.get(field):
                gauge.set(value)
        for field, counter in self._counters:
            value = new[field] = getattr(stats, field)
            if value > last.get(field, 0):
                counter.inc(value - last.get(field, 0))
        self._last = new
        for field, labelled in self._by_label:
            labelled.update(getattr(stats, field))


class _Labelled:
    """A counter with one label, whose totals are kept elsewhere."""

    def __init__(
        self, name: str, text: str, label: str, model_name: str, registry: CollectorRegistry
    ) -> None:
        self._counter = Counter(name, text, ["model_name", label], registry=registry)
        self._model_name = model_name
        self._last: dict[str, int] = {}

    def update(self, totals: Mapping[str, int]) -> None:
        """Raise the series to `totals`; one at 0 is shown from the first time it is named."""
        for key, total in totals.items():
            before = self._last.get(key)
            if before is None or total > before:
                self._counter.labels(self._model_name, key).inc(total - (before or 0))
                self._last[key] = total


class BatchedHistogram(Histogram):
    """A histogram for observations that come once a token: kept here, written in batches."""

    def _metric_init(self) -> None:
        super()._metric_init()
        self._pending = [0] * len(self._buckets)
        self._pending_sum = 0.0

    def note(self, value: float) -> None:
        """As `observe`; shown after the next `flush`."""
        self._pending[bisect_left(self._upper_bounds, value)] += 1
        self._pending_sum += value

    def flush(self) -> None:
        """Write what was noted."""
        for bucket, count in zip(self._buckets, self._pending, strict=True):
            if count:
                bucket.inc(count)
        self._sum.inc(self._pending_sum)
        self._pending = [0] * len(self._buckets)
        self._pending_sum = 0.0


class ApiMetrics:
    """What one HTTP process measures."""

    def __init__(self, model_name: str, registry: CollectorRegistry = REGISTRY) -> None:
        self._model_name = model_name
        self.registry = registry
        self.usage = UsageMetrics(model_name, registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...] = FINE) -> Histogram:
            metric = Histogram(name, text, ["model_name"], registry=registry, buckets=buckets)
            return metric.labels(model_name)

        self._requests = Counter(
            "headrace_requests",
            "HTTP requests, by endpoint and status",
            ["model_name", "endpoint", "status"],
            registry=registry,
        )
        self._hooks = Counter(
            "headrace_hooks",
            "what hooks said, by kind and outcome",
            ["model_name", "kind", "outcome"],
            registry=registry,
        )
        self.queue_s = histogram("headrace_queue_seconds", "submit to first scheduled")
        self.prefill_s = histogram("headrace_prefill_seconds", "first scheduled to first token")
        self.decode_s = histogram("headrace_decode_seconds", "first token to last token")
        self.ttft_s = histogram("headrace_ttft_seconds", "HTTP arrival to first token")
        self.e2e_s = histogram("headrace_e2e_seconds", "HTTP arrival to the end of the request")
        self.inter_token_s = BatchedHistogram(
            "headrace_inter_token_seconds",
            "token to next token",
            ["model_name"],
            registry=registry,
            buckets=FINE,
        ).labels(model_name)
        self.tokenize_s = histogram(
            "headrace_tokenize_seconds", "template and tokenisation of one request", WORK
        )
        self.vllm_ttft_s = histogram(
            "vllm:time_to_first_token_seconds", "HTTP arrival to first token", VLLM_TTFT
        )

    def count_request(self, endpoint: str, status: int) -> None:
        """One HTTP request ended (status 499: the client went away)."""
        self._requests.labels(self._model_name, endpoint, str(status)).inc()

    def count_hook(self, kind: str, outcome: str) -> None:
        """A hook of that kind had its say."""
        self._hooks.labels(self._model_name, kind, outcome).inc()

    def expose(self) -> bytes:
        """The text for /metrics: all processes added up, or this one. Takes milliseconds."""
        self.inter_token_s.flush()
        return expose(self.registry)


def expose(registry: CollectorRegistry = REGISTRY) -> bytes:
    """Prometheus text of `registry`, or of every process when they share a folder."""
    if os.environ.get(MULTIPROC):
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    return generate_latest(registry)


def _gauge(name: str, text: str, registry: CollectorRegistry, labels: list[str]) -> Gauge:
    # mostrecent: only the engine process writes these, and after a restart the new one counts.
    return Gauge(name, text, labels, registry=registry, multiprocess_mode="mostrecent")
