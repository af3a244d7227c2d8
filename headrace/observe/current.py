"""What metrics say now: a number, or the quantiles of a histogram, by the name in /metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from itertools import accumulate

from headrace.observe.metrics_page import Reading

QUANTILES = (("p50", 0.5), ("p99", 0.99))


def current(
    names: Collection[str], reading: Callable[[str], Reading | None]
) -> dict[str, float | dict[str, float | str | None]]:
    """Name -> the sum over its series; of a histogram {"p50", "p99", "count", "unit"}. Names that
    are not there are left out. reading: `ApiMetrics.reading`.
    """
    out: dict[str, float | dict[str, float | str | None]] = {}
    for name in names:
        now = reading(name.removesuffix("_total"))
        if now is None:
            continue
        if now.kind != "histogram":
            out[name] = now.value
            continue
        buckets = dict(zip(now.bounds, accumulate(now.counts), strict=True))
        out[name] = {
            "count": now.value,
            "unit": "s" if name.endswith("_seconds") else "",
            **{label: quantile(buckets, share) for label, share in QUANTILES},
        }
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
