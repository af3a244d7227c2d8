"""Spans to an OpenTelemetry collector, by OTLP over HTTP; the extra `tracing` brings what it needs.

Spans wait in a queue of fixed length and are sent by a thread of their own. One that finds the
queue full is dropped and counted, so a slow or dead collector costs spans, and never a request.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headrace import __version__
from headrace.errors import SetupError
from headrace.extras import install
from headrace.observe.trace_context import TraceContext

if TYPE_CHECKING:
    from opentelemetry.trace import Span
    from prometheus_client import CollectorRegistry

TRACES = "/v1/traces"
QUEUE_SPANS = 4096
BATCH_SPANS = 512
PERIOD_S = 1.0  # spans wait so long for others
TIMEOUT_S = 5.0  # of one export, all tries
LAST_S = 2.0  # for the last spans when the process ends
Value = str | int | float | bool | Sequence[str]


def check_installed() -> None:
    """Raises SetupError where the extra is missing."""
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError:
        raise SetupError(f"otlp_endpoint needs OpenTelemetry: {install('tracing')}") from None


class Trace:
    """One request's span of this process, from `Tracer.begin` to `end`. Times are
    time.monotonic()."""

    __slots__ = ("_offset_ns", "_span", "_tracer")

    def __init__(self, tracer: Any, span: Span, offset_ns: int) -> None:
        """offset_ns: from time.monotonic() to the time of day, the same for all of its parts."""
        self._tracer, self._span, self._offset_ns = tracer, span, offset_ns

    @property
    def id(self) -> str:
        """The trace's, as logs have it."""
        return f"{self._span.get_span_context().trace_id:032x}"

    @property
    def sampled(self) -> bool:
        """Whether anybody will see what is said of it."""
        return self._span.is_recording()

    def headers(self) -> list[tuple[bytes, bytes]]:
        """`traceparent` and `tracestate` for whom this process asks: their spans are children."""
        context = self._span.get_span_context()
        parent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"
        out = [(b"traceparent", parent.encode())]
        if state := context.trace_state.to_header():
            out.append((b"tracestate", state.encode("latin-1")))
        return out

    def rename(self, name: str) -> None:
        """It turned out to be something more special."""
        self._span.update_name(name)

    def tell(self, attributes: Mapping[str, Value]) -> None:
        """Facts about it."""
        self._span.set_attributes(attributes)

    def event(self, name: str, at_s: float) -> None:
        """Something happened."""
        self._span.add_event(name, timestamp=self._ns(at_s))

    def child(
        self, name: str, begun_s: float, ended_s: float, attributes: Mapping[str, Value]
    ) -> None:
        """A part of it that is over."""
        from opentelemetry.trace import set_span_in_context

        span = self._tracer.start_span(
            name,
            context=set_span_in_context(self._span),
            start_time=self._ns(begun_s),
            attributes=attributes,
        )
        span.end(self._ns(max(begun_s, ended_s)))

    def begin(self, name: str, attributes: Mapping[str, Value]) -> Trace:
        """A part of it that another process will have spans in: ask with its `headers`."""
        from opentelemetry.trace import SpanKind, set_span_in_context

        span = self._tracer.start_span(
            name,
            context=set_span_in_context(self._span),
            kind=SpanKind.CLIENT,
            attributes=attributes,
        )
        return Trace(self._tracer, span, self._offset_ns)

    def end(self, error: str = "", *, failed: bool = True) -> None:
        """It is over. error: the code of what ended it early; failed: the fault was not the
        caller's."""
        from opentelemetry.trace import StatusCode

        if error:
            self._span.set_attribute("error.type", error)
            if failed:
                self._span.set_status(StatusCode.ERROR)
        self._span.end()

    def _ns(self, at_s: float) -> int:
        return int(at_s * 1e9) + self._offset_ns


class Tracer:
    """Makes the spans of one process. Raises SetupError where the extra is missing.

    endpoint: of the collector, with or without /v1/traces. ratio: of traces that begin here, how
    many are recorded; those that a caller began are recorded if it says so.
    """

    def __init__(
        self, service: str, endpoint: str, ratio: float, registry: CollectorRegistry
    ) -> None:
        check_installed()
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

        from headrace.observe.span_outlet import Books, Exporter, Processor

        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # we say it, once
        facts = {"service.version": __version__, "service.instance.id": str(os.getpid())}
        if "OTEL_SERVICE_NAME" not in os.environ:
            facts["service.name"] = service
        self._provider = TracerProvider(
            ParentBased(TraceIdRatioBased(ratio)),
            Resource.create(facts),
            shutdown_on_exit=False,
        )
        url = endpoint if endpoint.endswith(TRACES) else endpoint.rstrip("/") + TRACES
        books = Books(QUEUE_SPANS, registry)
        self._exporter = Exporter(url, TIMEOUT_S, books)
        self._provider.add_span_processor(
            Processor(self._exporter, books, batch=BATCH_SPANS, most=QUEUE_SPANS, period_s=PERIOD_S)
        )
        self._tracer = self._provider.get_tracer("headrace", __version__)

    def begin(
        self,
        name: str,
        parent: TraceContext | None,
        begun_s: float,
        attributes: Mapping[str, Value],
    ) -> Trace:
        """A request came at `begun_s` of time.monotonic()."""
        from opentelemetry.trace import SpanKind

        offset_ns = time.time_ns() - time.monotonic_ns()
        span = self._tracer.start_span(
            name,
            context=_otel_context(parent),
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=int(begun_s * 1e9) + offset_ns,
        )
        return Trace(self._tracer, span, offset_ns)

    def close(self) -> None:
        """Send what waits, for at most `LAST_S`; then whatever is being tried is cut short."""
        last = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        last.start()
        last.join(LAST_S)
        self._exporter.shutdown()
        last.join(LAST_S)


def _otel_context(parent: TraceContext | None) -> Any:
    from opentelemetry.context import Context
    from opentelemetry.trace import (
        NonRecordingSpan,
        SpanContext,
        TraceFlags,
        TraceState,
        set_span_in_context,
    )

    if parent is None:
        return Context()
    context = SpanContext(
        parent.trace_id,
        parent.span_id,
        is_remote=True,
        trace_flags=TraceFlags(parent.flags & TraceFlags.SAMPLED),
        trace_state=TraceState.from_header([parent.state]) if parent.state else None,
    )
    return set_span_in_context(NonRecordingSpan(context), Context())
