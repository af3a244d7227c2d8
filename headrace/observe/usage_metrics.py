"""Totals of the usage records of one HTTP process, for /metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter


class UsageMetrics:
    """Counters that rise with every record, whether a log is kept or not."""

    def __init__(self, model_name: str, registry: CollectorRegistry) -> None:
        self._model_name = model_name
        self._series: dict[tuple[Counter | str, ...], Counter] = {}

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
        self._add(self._requests, outcome)
        for kind, count in tokens.items():
            self._add(self._tokens, kind, by=count)
        self._add(self._compute, by=compute_s)
        self._add(self._cost, currency, by=cost)

    def _add(self, counter: Counter, *labels: str, by: float = 1.0) -> None:
        """A series is shown from the first time it is named, and found by one lookup later."""
        series = self._series.get((counter, *labels))
        if series is None:
            series = self._series[counter, *labels] = counter.labels(self._model_name, *labels)
        if by:
            series.inc(by)

    def count_error(self) -> None:
        """A record could not be written."""
        self._errors.labels(self._model_name).inc()
