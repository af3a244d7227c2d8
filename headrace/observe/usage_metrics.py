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
        """One record. tokens: by kind.

        The request is counted last, and its series made first, so that pages, which are read in the
        order in which series were made, show no request without what it used.
        """
        requests = self._named(self._requests, outcome)
        for kind, count in tokens.items():
            self._add(count, self._tokens, kind)
        self._add(compute_s, self._compute)
        self._add(cost, self._cost, currency)
        requests.inc()

    def _add(self, by: float, counter: Counter, *labels: str) -> None:
        series = self._named(counter, *labels)
        if by:
            series.inc(by)

    def _named(self, counter: Counter, *labels: str) -> Counter:
        """A series, shown from the first time it is named, and found by one lookup later."""
        series = self._series.get((counter, *labels))
        if series is None:
            series = self._series[counter, *labels] = counter.labels(self._model_name, *labels)
        return series

    def count_error(self) -> None:
        """A record could not be written."""
        self._errors.labels(self._model_name).inc()
