"""One request's spans: the gateway's own, its wait, and each worker that was asked. The worker's
spans become children of the last, for it is asked with that span as its parent."""

from __future__ import annotations

import time

import msgspec

from headrace.gateway.connection import Request
from headrace.gateway.kept import route_of
from headrace.gateway.sse import Usage
from headrace.observe.trace_context import PARENT, STATE, trace_context
from headrace.observe.tracing import Trace, Tracer, Value

_OURS = (PARENT, STATE)


class RequestSpans:
    """From the request's arrival to `ended`. Times are time.monotonic()."""

    def __init__(self, tracer: Tracer, request: Request, name: str, since_s: float) -> None:
        """name: the request's id."""
        route = route_of(request.path)
        facts: dict[str, Value] = {
            "http.request.method": request.method.decode("latin-1"),
            "http.route": route,
            "url.path": request.path,
            "gen_ai.request.id": name,
        }
        parent = trace_context(request.headers)
        self._trace = tracer.begin(f"gateway {route}", parent, since_s, facts)
        self._attempt: Trace | None = None
        self._attempts = 0

    def attempt(self, request: Request, worker: str, model: str) -> Request:
        """The request as `worker` gets it. An attempt before this one has failed."""
        self._end_attempt("retried")
        self._attempts += 1
        if model:
            self._trace.tell({"gen_ai.request.model": model})
        self._attempt = self._trace.begin("worker", {"headrace.worker": worker})
        kept = [pair for pair in request.headers if pair[0] not in _OURS]
        return msgspec.structs.replace(request, headers=[*kept, *self._attempt.headers()])

    def waited(self, since_s: float) -> None:
        """For a worker with room, until now."""
        self._trace.child("wait", since_s, time.monotonic(), {"headrace.stage": 1})

    def ended(self, status: int, usage: Usage | None) -> None:
        """The client has its answer, or is gone."""
        error = str(status) if status >= 400 else ""
        self._end_attempt(error, failed=status >= 500)
        facts: dict[str, Value] = {
            "http.response.status_code": status,
            "headrace.attempts": self._attempts,
        }
        if usage is not None and usage.prompt_tokens >= 0:
            facts["gen_ai.usage.input_tokens"] = usage.prompt_tokens
            facts["gen_ai.usage.output_tokens"] = max(0, usage.output_tokens)
        self._trace.tell(facts)
        self._trace.end(error, failed=status >= 500)

    def _end_attempt(self, error: str, *, failed: bool = True) -> None:
        if self._attempt is not None:
            self._attempt.end(error, failed=failed)
            self._attempt = None
