"""What /metrics of the gateway says. Numbers are kept as plain dicts and lists, for a request
changes a dozen of them: prometheus_client writes them out when somebody asks. Gauges are read then.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from headrace.gateway.fleet import Fleet
from headrace.gateway.queue import Queue
from headrace.gateway.worker import Worker
from headrace.observe.histogram import FINE, WORK

# Gauges that do not add up.
ALIKE = ("_worker_up", "_worker_breaker_open", "_worker_index", "_dns_workers", "_dns_age_seconds")

NAME = "headrace_gateway"


class Count:
    """A counter. Its children are found by one dict lookup. For one thread."""

    __slots__ = ("_labels", "_name", "_text", "values")

    def __init__(self, name: str, text: str, labels: Sequence[str]) -> None:
        self._name, self._text, self._labels = f"{NAME}_{name}", text, tuple(labels)
        self.values: dict[tuple[str, ...], float] = {} if labels else {(): 0.0}

    def add(self, *labels: str, by: float = 1.0) -> None:
        """Count something under its labels, in the order of their names."""
        values = self.values
        if labels in values:
            values[labels] += by
        else:
            values[labels] = by

    def metric(self) -> Metric:
        """As prometheus_client writes it."""
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for labels, value in self.values.items():
            assert len(labels) == len(self._labels), f"{self._name}: {labels}"
            family.add_metric(labels, value)
        return family


class Spread:
    """A histogram with fixed bounds. For one thread."""

    __slots__ = ("_bounds", "_name", "_text", "counts", "sum")

    def __init__(self, name: str, text: str, bounds: tuple[float, ...]) -> None:
        self._name, self._text, self._bounds = f"{NAME}_{name}", text, bounds
        self.counts = [0] * (len(bounds) + 1)  # [bucket], each alone
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """One more."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def metric(self) -> Metric:
        """As prometheus_client writes it: buckets hold all below their bound."""
        names = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        total, buckets = 0, []
        for name, count in zip(names, self.counts, strict=True):
            total += count
            buckets.append((name, float(total)))
        family = HistogramMetricFamily(self._name, self._text)
        family.add_metric([], buckets, self.sum)
        return family


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
        yield from self._names()
        yield from self._events()

    def _names(self) -> Iterator[Metric]:
        """Names that workers come from."""
        asked = CounterMetricFamily(
            f"{NAME}_dns_lookups", "answers of DNS, by what they were", labels=["source", "outcome"]
        )
        found = GaugeMetricFamily(
            f"{NAME}_dns_workers", "workers that the name stands for", labels=["source"]
        )
        age = GaugeMetricFamily(
            f"{NAME}_dns_age_seconds", "since the answer that they are of", labels=["source"]
        )
        now_s = time.monotonic()
        for name in self._fleet.registry.names:
            for outcome, count in name.counts.items():
                asked.add_metric([name.url, outcome], count)
            found.add_metric([name.url], len(name.targets))
            age.add_metric([name.url], name.age_s(now_s))
        yield from (asked, found, age)

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


class _Numbers(Collector):
    def __init__(self) -> None:
        self.all: list[Count | Spread] = []

    def collect(self) -> Iterator[Metric]:
        for number in self.all:
            yield number.metric()


class GatewayMetrics:
    """Counters and histograms of one gateway process."""

    def __init__(self, fleet: Fleet, queue: Queue) -> None:
        self.registry = registry = CollectorRegistry()
        numbers = _Numbers()

        def counter(name: str, text: str, *labels: str) -> Count:
            made = Count(name, text, labels)
            numbers.all.append(made)
            return made

        def histogram(name: str, text: str, buckets: tuple[float, ...] = FINE) -> Spread:
            made = Spread(name, text, buckets)
            numbers.all.append(made)
            return made

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
        self.tokenised = counter(
            "tokenised",
            "prompts: ids were made here, the worker has to, or it was busy",
            "outcome",
        )
        self.misses = counter(
            "silent_misses", "a cached prefix was predicted, none was found", "state"
        )
        self.predictions = counter(
            "predictions", "predicted cached tokens against those found", "state", "outcome"
        )
        self.lint_prompts = counter("lint_prompts", "prompts that lint looked at", "tenant")
        self.lint_prompt_tokens = counter("lint_prompt_tokens", "tokens of these", "tenant")
        self.lint_lost_tokens = counter(
            "lint_lost_tokens",
            "of these, what a stable order would have found in a cache, by what differs",
            "tenant",
            "kind",
        )
        self.queue_s = histogram("queue_seconds", "wait for a worker with room")
        self.decide_s = histogram("decide_seconds", "body read to worker chosen", WORK)
        self.ttfb_s = histogram("first_byte_seconds", "request whole to first byte of the answer")
        self.e2e_s = histogram("request_seconds", "request whole to the end of the answer")
        registry.register(_FleetGauges(fleet, queue))
        registry.register(numbers)

    def linted(self, tenant: str, prompt_tokens: int, kind: str, lost_tokens: int) -> None:
        """A prompt was looked at."""
        self.lint_prompts.add(tenant)
        self.lint_prompt_tokens.add(tenant, by=prompt_tokens)
        if lost_tokens:
            self.lint_lost_tokens.add(tenant, kind, by=lost_tokens)

    def expose(self) -> bytes:
        """The text for /metrics."""
        return generate_latest(self.registry)


class _Merged(Collector):
    def __init__(self, texts: Iterable[bytes]) -> None:
        self._texts = list(texts)

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
        for text in self._texts:
            for family in text_string_to_metric_families(text.decode()):
                families.setdefault(family.name, family)
                into = values.setdefault(family.name, {})
                for sample in family.samples:
                    key = (sample.name, tuple(sample.labels.items()))
                    if family.name.endswith(ALIKE):
                        into[key] = max(into.get(key, 0.0), sample.value)
                    else:
                        into[key] = into.get(key, 0.0) + sample.value
        for name, family in families.items():
            family.samples = [
                Sample(sample, dict(labels), value)
                for (sample, labels), value in values[name].items()
            ]
            yield family


def merged(texts: Iterable[bytes]) -> bytes:
    """The text for /metrics of several processes, from that of each."""
    registry = CollectorRegistry()
    registry.register(_Merged(texts))
    return generate_latest(registry)
