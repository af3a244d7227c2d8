"""What /metrics says: this process's registry, or all processes of the server added up."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from headrace.observe.aliases import BY_SOURCE
from headrace.observe.metrics_page import Page, Reading

MULTIPROC = "PROMETHEUS_MULTIPROC_DIR"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Exposition:
    """One process's view of /metrics.

    With PROMETHEUS_MULTIPROC_DIR set before prometheus_client was imported, every process writes
    its values into that folder, and any of them shows the sum; else this one shows its own.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        folder = os.environ.get(MULTIPROC)
        self._page = Page(Path(folder)) if folder else None
        self._registry = registry

    def text(self) -> bytes:
        """Prometheus' text format. Any thread."""
        return self._page.text() if self._page else generate_latest(_Aliased(self._registry))

    def reading(self, name: str) -> Reading | None:
        """See `Page.reading`."""
        if self._page:
            return self._page.reading(name)
        return next((_reading(x) for x in self._registry.collect() if x.name == name), None)


class _Aliased(Collector):
    """The families of a registry, each under all of its names."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        """As the registry's, and the aliases."""
        for family in self._registry.collect():
            yield family
            for alias in BY_SOURCE.get(family.name, ()):
                twin = Metric(alias.name, family.documentation, family.type)
                for sample in family.samples:
                    labels = alias.labels(sample.labels)
                    if labels is not None:
                        suffix = sample.name.removeprefix(family.name)
                        twin.add_sample(alias.name + suffix, labels, sample.value)
                yield twin


def _reading(family: Metric) -> Reading | None:
    if family.type != "histogram":
        shown = [s.value for s in family.samples if not s.name.endswith("_created")]
        return Reading(family.type, sum(shown)) if shown else None
    cumulative: dict[float, float] = {}
    total = 0.0
    for sample in family.samples:
        if sample.name.endswith("_bucket"):
            bound = float(sample.labels["le"])
            cumulative[bound] = cumulative.get(bound, 0.0) + sample.value
        elif sample.name.endswith("_sum"):
            total += sample.value
    bounds = tuple(sorted(cumulative))
    values = [cumulative[bound] for bound in bounds]
    counts = tuple(n - before for n, before in zip(values, [0.0, *values], strict=False))
    return Reading("histogram", sum(counts), bounds, counts, total) if bounds else None
