"""What /metrics of the gateway says. Gauges are read from the fleet when somebody asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headrace.gateway.fleet import Fleet
from headrace.gateway.queue import Queue
from headrace.gateway.worker import Worker
from headrace.observe.histogram import FINE, WORK

NAME = "headrace_gateway"


class _FleetGauges(Collector):
    def __init__(self, fleet: Fleet, queue: Queue) -> None:
        self._fleet, self._queue = fleet, queue

    def collect(self) -> Iterator[Metric]:
        """One sample a worker, and the size of the index."""
        gauges: dict[str, tuple[str, Callable[[Worker], float]]] = {
            "worker_up": ("1 = it may take requests", lambda w: w.up and not w.draining),
            "worker_requests": ("requests placed there and not ended", lambda w: len(w.leases)),
            "worker_pending_tokens": ("uncached prompt tokens ahead", lambda w: w.pending_tokens),
            "worker_decode_tokens": ("tokens of contexts that decode", lambda w: w.decode_tokens),
            "worker_breaker_open": ("1 = too many failures", lambda w: w.breaker.state != "closed"),
        }
        for name, (text, read) in gauges.items():
            family = GaugeMetricFamily(f"{NAME}_{name}", text, labels=["worker"])
            for worker in self._fleet.workers.values():
                family.add_metric([worker.name], float(read(worker)))
            yield family
        waiting = GaugeMetricFamily(f"{NAME}_queue_length", "requests that wait for a worker")
        waiting.add_metric([], len(self._queue))
        yield waiting
        held = GaugeMetricFamily(f"{NAME}_index_bytes", "memory of the prefix index, at most")
        held.add_metric([], self._fleet.index.used_bytes)
        yield held
        yield from self._events()

    def _events(self) -> Iterator[Metric]:
        """What workers say of their caches."""
        beliefs = self._fleet.beliefs
        held = GaugeMetricFamily(f"{NAME}_block_index_bytes", "memory of what workers say, at most")
        held.add_metric([], beliefs.blocks.used_bytes)
        yield held
        states = GaugeMetricFamily(
            f"{NAME}_worker_index",
            "1 = this is how much is known of what the worker holds: exact, degraded, fallback",
            labels=["worker", "state"],
        )
        events = CounterMetricFamily(
            f"{NAME}_kv_events", "batches of KV events, by what became of them",
            labels=["worker", "event"],
        )  # fmt: skip
        for name in self._fleet.workers:
            state = beliefs.state(name)
            for each in ("exact", "degraded", "fallback"):
                states.add_metric([name, each], float(each == state))
            feed = beliefs.feed(name)
            for event, count in (feed.counts if feed is not None else {}).items():
                events.add_metric([name, event], count)
        yield states
        yield events


class GatewayMetrics:
    """Counters and histograms of one gateway process."""

    def __init__(self, fleet: Fleet, queue: Queue) -> None:
        self.registry = registry = CollectorRegistry()
        self._children: dict[tuple[object, ...], Counter] = {}
        registry.register(_FleetGauges(fleet, queue))

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"{NAME}_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...] = FINE) -> Histogram:
            return Histogram(f"{NAME}_{name}", text, registry=registry, buckets=buckets)

        self.requests = counter("requests", "requests, by status (499: client gone)", "status")
        self.limited = counter("limited", "requests over a limit of their tenant", "tenant")
        self.placements = counter("placements", "decisions", "worker", "reason")
        self.retries = counter("retries", "other attempts after a failed one")
        self.failures = counter("worker_failures", "failed attempts", "worker", "kind")
        self.stream_errors = counter("stream_errors", "errors inside streams", "worker")
        self.endless = counter(
            "streams_without_end", "streams that ended without a terminal event", "worker"
        )
        self.tokens = counter(
            "tokens", "prompt, output, cached (as workers say) and predicted cached", "kind"
        )
        self.misses = counter(
            "silent_misses", "a cached prefix was predicted, none was found", "state"
        )
        self.predictions = counter(
            "predictions", "predicted cached tokens against those found", "state", "outcome"
        )
        self.queue_s = histogram("queue_seconds", "wait for a worker with room")
        self.decide_s = histogram("decide_seconds", "body read to worker chosen", WORK)
        self.ttfb_s = histogram("first_byte_seconds", "request whole to first byte of the answer")
        self.e2e_s = histogram("request_seconds", "request whole to the end of the answer")

    def count(self, counter: Counter, *labels: str, by: float = 1.0) -> None:
        """Add to a counter with labels; finding its child costs a dict lookup here."""
        key = (counter, *labels)
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = counter.labels(*labels)
        child.inc(by)

    def expose(self) -> bytes:
        """The text for /metrics."""
        return generate_latest(self.registry)
