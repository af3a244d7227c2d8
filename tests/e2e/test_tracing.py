"""One trace from the gateway to the stages of the server behind it."""

from __future__ import annotations

import http.client
import json
from typing import Any

from tests.collector import Collector, Got
from tests.e2e.serving import PATIENCE_S, Server
from tests.e2e.test_gateway import GatewayProcess

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
STAGES = {"prepare", "tokenize", "queue", "prefill", "decode", "stream"}
BODY = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 6,
        "ignore_eos": True}  # fmt: skip


def post(port: int, body: dict[str, Any], parents: list[str]) -> tuple[int, bytes]:
    """With so many `traceparent`."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    raw = json.dumps(body).encode()
    try:
        connection.putrequest("POST", "/v1/chat/completions")
        connection.putheader("content-length", str(len(raw)))
        for parent in parents:
            connection.putheader("traceparent", parent)
        connection.endheaders(raw)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def by_name(spans: list[Got], trace_id: str) -> dict[str, Got]:
    own = [span for span in spans if span.trace_id == trace_id]
    named = {span.name: span for span in own}
    assert len(named) == len(own), "a span twice"
    return named


def test_one_trace_through_gateway_and_server() -> None:
    with (
        Collector() as collector,
        Server(fake_step_ms=1.0, otlp_endpoint=collector.url) as server,
        GatewayProcess("--worker", server.url, "--otlp-endpoint", collector.url) as gateway,
    ):
        gateway.wait_up(1)
        parents = [f"00-{TRACE[:-1]}{stream:d}-{CALLER}-01" for stream in (False, True)]
        for stream in (False, True):
            assert post(gateway.port, {**BODY, "stream": stream}, [parents[stream]])[0] == 200
        # Two parents are none: a trace of its own begins.
        assert post(gateway.port, {**BODY, "max_tokens": -1}, parents)[0] == 400
        spans = collector.wait(9 + 9 + 3)
        name = "headrace_trace_spans_total"  # counted when the collector's answer is read
        server.wait(lambda: server.metric(name, outcome="exported") == 15, "all are counted")
        assert server.metric(name, outcome="dropped") == 0
        log = server.log_path.read_text()
    for stream in (False, True):
        named = by_name(spans, f"{TRACE[:-1]}{stream:d}")
        front, worker, root = (
            named.pop(name) for name in ("gateway /v1/chat/completions", "worker", "chat fake")
        )
        assert set(named) == STAGES
        assert (front.parent_id, worker.parent_id) == (CALLER, front.span_id)
        assert root.parent_id == worker.span_id
        assert {span.parent_id for span in named.values()} == {root.span_id}
        assert (front.service, root.service) == ("headrace-gateway", "headrace")
        assert (front.kind, worker.kind, root.kind) == (2, 3, 2)
        assert front.attributes["gen_ai.request.id"] == root.attributes["gen_ai.request.id"]
        assert worker.attributes["headrace.worker"] == server.url
        assert root.attributes["gen_ai.usage.output_tokens"] > 0
        assert front.attributes["headrace.attempts"] == 1
        assert f"trace={root.trace_id}" in log
    (fresh,) = {span.trace_id for span in spans} - {f"{TRACE[:-1]}{n}" for n in (0, 1)}
    named = by_name(spans, fresh)
    assert named["gateway /v1/chat/completions"].parent_id == ""
    assert named["chat fake"].attributes["error.type"] == "400"
    assert not any(span.failed for span in named.values()), "the caller's fault"
