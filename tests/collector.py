"""An OpenTelemetry collector in this process: OTLP over HTTP, what came is kept."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Got(NamedTuple):
    """A span."""

    name: str
    service: str
    trace_id: str
    span_id: str
    parent_id: str  # "" = none
    kind: int  # 1 internal, 2 server, 3 client
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: list[str]
    failed: bool


class Collector:
    """`with Collector() as collector:`; spans are exported to `collector.url`."""

    def __init__(self) -> None:
        self.spans: list[Got] = []
        self.may_answer = threading.Event()  # cleared: exports hang
        self.may_answer.set()
        self._changed = threading.Condition()

    def __enter__(self) -> Collector:
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                raw = self.rfile.read(int(self.headers["content-length"]))
                collector.may_answer.wait()
                collector.take(raw)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.may_answer.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def take(self, raw: bytes) -> None:
        """An export."""
        request = ExportTraceServiceRequest.FromString(raw)
        with self._changed:
            for resource in request.resource_spans:
                service = _plain(resource.resource.attributes)["service.name"]
                for scope in resource.scope_spans:
                    self.spans += [_got(span, service) for span in scope.spans]
            self._changed.notify_all()

    def wait(self, count: int, timeout_s: float = 30.0) -> list[Got]:
        """All spans, once there are so many."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.spans) >= count, timeout_s), self.spans
            return list(self.spans)


def _got(span: Any, service: str) -> Got:
    return Got(
        span.name,
        service,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.kind,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        _plain(span.attributes),
        [event.name for event in span.events],
        span.status.code == 2,
    )


def _plain(attributes: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind)
