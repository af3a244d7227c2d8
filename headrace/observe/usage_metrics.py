"""Totals of the usage records of one HTTP process, for /metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter


class UsageMetrics:
    """Counters that rise with every record, whether a log is kept or not."""

    def __init__(self, model_name: str, registry: CollectorRegistry) -> None:
        self._model_name = model_name

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, ["model_name", *labels], registry=registry)

        self._requests = counter(
            "headrace_usage_requests", "requests metered: ok, aborted or failed", "outcome"
        )
        self._tokens = counter(
            "headrace_usage_tokens",
            "tokens metered; input includes cached, output includes reasoning",
            "kind",
        )
        self._compute = counter(
            "headrace_usage_compute_seconds", "device seconds attributed to metered requests"
        )
        self._cost = counter(
            "headrace_usage_cost", "what metered requests cost by the price sheet", "currency"
        )
        self._errors = counter(
            "headrace_usage_log_errors", "usage records that could not be written at once"
        )

    def count(
        self, outcome: str, tokens: dict[str, int], compute_s: float, cost: float, currency: str
    ) -> None:
        """One record. tokens: by kind."""
        name = self._model_name
        self._requests.labels(name, outcome).inc()
        for kind, count in tokens.items():
            self._tokens.labels(name, kind).inc(count)
        self._compute.labels(name).inc(compute_s)
        self._cost.labels(name, currency).inc(cost)

    def count_error(self) -> None:
        """A record could not be written."""
        self._errors.labels(self._model_name).inc()
