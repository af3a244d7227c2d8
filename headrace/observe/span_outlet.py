"""The way of spans to a collector: a queue of fixed length, a thread that sends, and the counts of
what became of them. Needs the extra `tracing`; imported by `tracing.Tracer` alone.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from prometheus_client import CollectorRegistry, Counter

log = logging.getLogger("headrace.tracing")


class Books:
    """Spans that wait or are being sent, and what became of the others. Any thread."""

    def __init__(self, most: int, registry: CollectorRegistry) -> None:
        outcomes = Counter(
            "headrace_trace_spans",
            "spans by what became of them: exported, failed, or dropped for the queue was full",
            ["outcome"],
            registry=registry,
        )
        self._counts = {name: outcomes.labels(name) for name in ("exported", "failed", "dropped")}
        self._most, self._waiting = most, 0
        self._lock = threading.Lock()

    def enter(self) -> bool:
        """One more waits; False: there is no room, it is dropped."""
        with self._lock:
            room = self._waiting < self._most
            self._waiting += room
        if not room:
            self._counts["dropped"].inc()
        return room

    def leave(self, count: int, *, exported: bool) -> None:
        """So many were sent, or given up."""
        with self._lock:
            self._waiting -= count
        self._counts["exported" if exported else "failed"].inc(count)


class Exporter(SpanExporter):
    """OTLP over HTTP, keeping the books; says once that a collector takes no spans."""

    def __init__(self, url: str, timeout_s: float, books: Books) -> None:
        self._url, self._books = url, books
        self._inner = OTLPSpanExporter(url, timeout=timeout_s)
        self._broken = self._ended = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send, with tries for as long as the timeout."""
        result = SpanExportResult.FAILURE
        try:
            result = self._inner.export(spans)
        finally:
            fine = result is SpanExportResult.SUCCESS
            self._books.leave(len(spans), exported=fine)
            if fine == self._broken:
                self._broken = not fine
                log.warning("%s %s spans", self._url, "takes" if fine else "does not take")
        return result

    def shutdown(self) -> None:
        """Try no more, whatever is on its way."""
        if not self._ended:
            self._ended = True
            self._inner.shutdown()  # type: ignore[no-untyped-call]


class Processor(BatchSpanProcessor):
    """Refuses a span where the queue would push an older one out."""

    def __init__(
        self, exporter: Exporter, books: Books, *, batch: int, most: int, period_s: float
    ) -> None:
        super().__init__(
            exporter,
            max_queue_size=most + batch,  # never full
            schedule_delay_millis=period_s * 1000,
            max_export_batch_size=batch,
        )
        self._books = books

    def on_end(self, span: ReadableSpan) -> None:
        """Never waits."""
        if self._books.enter():
            super().on_end(span)
