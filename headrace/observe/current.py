"""What metrics say now: a number, or the quantiles of a histogram, by the name in /metrics."""

from __future__ import annotations

import math
import os
from collections.abc import Collection

from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

from headrace.observe.metrics import MULTIPROC, REGISTRY

QUANTILES = (("p50", 0.5), ("p99", 0.99))


def current(
    names: Collection[str], registry: CollectorRegistry = REGISTRY
) -> dict[str, float | dict[str, float | str | None]]:
    """Name -> the sum over its series; of a histogram {"p50", "p99", "count", "unit"}. Names that
    are not there are left out. All processes added up, or this one. Takes milliseconds.
    """
    if os.environ.get(MULTIPROC):
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    out: dict[str, float | dict[str, float | str | None]] = {}
    for family in registry.collect():
        name = family.name + ("_total" if family.type == "counter" else "")
        if name not in names:
            continue
        if family.type == "histogram":
            buckets: dict[float, float] = {}
            for sample in family.samples:
                if sample.name == f"{name}_bucket":
                    edge = float(sample.labels["le"])
                    buckets[edge] = buckets.get(edge, 0.0) + sample.value
            count = buckets.get(math.inf, 0.0)
            unit = "s" if name.endswith("_seconds") else ""
            out[name] = {
                "count": count,
                "unit": unit,
                **{label: quantile(buckets, share) for label, share in QUANTILES},
            }
        else:
            out[name] = sum(s.value for s in family.samples if s.name == name)
    return out


def quantile(buckets: dict[float, float], share: float) -> float | None:
    """As Prometheus' histogram_quantile: linear within the bucket that holds it; None if empty.

    buckets: upper edge -> observations at or below it; one edge is infinite.
    """
    wanted = share * buckets.get(math.inf, 0.0)
    low_edge, low = 0.0, 0.0
    for edge in sorted(buckets):
        if buckets[edge] >= wanted > 0:
            if math.isinf(edge):
                return low_edge
            inside = (wanted - low) / (buckets[edge] - low) if buckets[edge] > low else 1.0
            return low_edge + (edge - low_edge) * inside
        low_edge, low = edge, buckets[edge]
    return None
