"""Spans, through the real exporter, to a collector in this process."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from headrace.api.record import Record
from headrace.api.spans import begin_trace, end_trace
from headrace.config import load
from headrace.errors import ConfigError, SetupError
from headrace.observe import tracing
from headrace.observe.trace_context import TraceContext, trace_context
from headrace.observe.tracing import Tracer
from tests.collector import Collector

PARENT = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
KNOWN = TraceContext(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331, 1)


def count(registry: CollectorRegistry, outcome: str) -> float:
    return registry.get_sample_value("headrace_trace_spans_total", {"outcome": outcome}) or 0.0


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "PERIOD_S", 0.02)


def record_of(trace_id: str = "") -> Record:
    caller = SimpleNamespace(
        request_id="r1",
        path="/v1/chat/completions",
        key="",
        arrived_s=time.monotonic() - 1.0,
        trace_id=trace_id,
    )
    return Record(caller, "m", "0", None)


def test_a_request_and_its_stages() -> None:
    registry = CollectorRegistry()
    with Collector() as collector:
        tracer = Tracer("headrace", collector.url, 1.0, registry)
        record = record_of()
        headers = [(b"traceparent", PARENT), (b"tracestate", b"vendor=1")]
        trace = begin_trace(tracer, headers, record.endpoint, record.id, record.arrived_s)
        assert trace.id == KNOWN.id
        passed_on = dict(trace.headers())
        context = trace_context(passed_on.items())
        assert context is not None
        assert (context.trace_id, context.flags) == (KNOWN.trace_id, 1)
        assert context.span_id != KNOWN.span_id
        assert passed_on[b"tracestate"] == b"vendor=1"
        at_s = record.arrived_s
        record.parsed_s, record.rendered_s, record.tokenized_s = at_s + 0.1, at_s + 0.2, at_s + 0.3
        bill = SimpleNamespace(
            queue_s=0.05,
            prefill_s=0.1,
            compute_s=0.2,
            preempted_s=[at_s + 0.6],
            charged=lambda: None,
            parameters={
                "max_tokens": 7,
                "temperature": 0.5,
                "seed": -(2**63),
                "n": 2,
                "repetition": {"presence": 0.25},
            },
        )
        record.submitted([[1, 2, 3]], 2, bill)
        record.submitted_s = at_s + 0.35
        record.follow(
            SimpleNamespace(first_token_s=at_s + 0.5, last_token_s=at_s + 0.9, cached_tokens=2),
            SimpleNamespace(output_tokens=9, reasoning_tokens=4, finishes=["stop", "length"]),
        )
        record.done(200, "")
        end_trace(trace, record, 200)
        spans = {span.name: span for span in collector.wait(7)}
        tracer.close()
    root = spans.pop("chat m")
    assert (root.trace_id, root.parent_id) == (KNOWN.id, f"{KNOWN.span_id:016x}")
    assert (root.kind, root.service, root.failed) == (2, "headrace", False)
    assert sorted(root.events) == ["first_token", "preempted"]
    assert list(spans) == ["prepare", "tokenize", "queue", "prefill", "decode", "stream"]
    for span in spans.values():
        assert (span.trace_id, span.parent_id, span.kind) == (root.trace_id, root.span_id, 1)
        assert root.start_ns <= span.start_ns <= span.end_ns <= root.end_ns + 10**6
    took_s = {name: (span.end_ns - span.start_ns) / 1e9 for name, span in spans.items()}
    for name, wanted_s in (("prepare", 0.2), ("tokenize", 0.1), ("queue", 0.05), ("decode", 0.4)):
        assert took_s[name] == pytest.approx(wanted_s, abs=1e-6)
    wanted = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "headrace",
        "gen_ai.request.model": "m",
        "gen_ai.request.id": "r1",
        "gen_ai.request.max_tokens": 7,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.presence_penalty": 0.25,
        "gen_ai.request.seed": -(2**63),
        "gen_ai.request.choice.count": 2,
        "gen_ai.response.finish_reasons": ["stop", "length"],
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 9,
        "gen_ai.usage.cache_read.input_tokens": 2,
        "gen_ai.usage.reasoning.output_tokens": 4,
        "http.response.status_code": 200,
        "headrace.preemptions": 1,
    }
    assert wanted.items() <= root.attributes.items()
    assert root.attributes["gen_ai.latency.time_to_first_token"] == pytest.approx(0.5)
    assert spans["prefill"].attributes == {"headrace.stage": 6}
    assert count(registry, "exported") == 7  # `close` waits for the last answer


@pytest.mark.parametrize(
    ("status", "code", "failed"), [(400, "", False), (499, "client_gone", False), (503, "", True)]
)
def test_how_it_ended(status: int, code: str, failed: bool) -> None:
    with Collector() as collector:
        tracer = Tracer("headrace", collector.url, 1.0, CollectorRegistry())
        record = record_of()
        trace = begin_trace(tracer, [], record.endpoint, record.id, record.arrived_s)
        record.done(status, code)
        end_trace(trace, record, status)
        (span,) = collector.wait(1)
        tracer.close()
    assert span.parent_id == ""
    assert span.failed is failed
    assert span.attributes["error.type"] == code or str(status)
    assert "gen_ai.usage.input_tokens" not in span.attributes


@pytest.mark.parametrize(
    ("ratio", "flags", "sampled"), [(0.0, None, False), (0.0, b"01", True), (1.0, b"00", False)]
)
def test_the_caller_decides_else_the_ratio(
    ratio: float, flags: bytes | None, sampled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "LAST_S", 0.02)
    tracer = Tracer("headrace", "http://127.0.0.1:9", ratio, CollectorRegistry())
    headers = [] if flags is None else [(b"traceparent", PARENT[:-2] + flags)]
    trace = begin_trace(tracer, headers, "/v1/completions", "r", time.monotonic())
    assert trace.sampled is sampled
    told = trace_context(trace.headers())  # passed on, recorded or not
    assert told is not None
    assert told.flags & 1 == int(sampled)  # another says that the id is random
    end_trace(trace, None, 200)
    tracer.close()


def test_a_collector_that_hangs_costs_spans_and_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "QUEUE_SPANS", 10)
    monkeypatch.setattr(tracing, "BATCH_SPANS", 5)
    monkeypatch.setattr(tracing, "LAST_S", 0.05)
    registry = CollectorRegistry()
    with Collector() as collector:
        collector.may_answer.clear()
        tracer = Tracer("headrace", collector.url, 1.0, registry)
        for _ in range(25):
            end_trace(begin_trace(tracer, [], "/v1/completions", "r", time.monotonic()), None, 200)
        assert count(registry, "dropped") == 15  # those that wait or are being sent are 10
        collector.may_answer.set()
        collector.wait(10)
        until(lambda: count(registry, "exported") == 10)
        end_trace(begin_trace(tracer, [], "/v1/completions", "r", time.monotonic()), None, 200)
        collector.wait(11)
        tracer.close()


def test_a_collector_that_is_not_there_is_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracing, "TIMEOUT_S", 0.1)
    registry = CollectorRegistry()
    tracer = Tracer("headrace", "http://127.0.0.1:9/v1/traces", 1.0, registry)
    for sent in (1, 2):
        end_trace(begin_trace(tracer, [], "/v1/completions", "r", time.monotonic()), None, 200)
        until(lambda sent=sent: count(registry, "failed") == sent)  # type: ignore[misc]
    tracer.close()
    said = [entry.getMessage() for entry in caplog.records if "does not take" in entry.message]
    assert said == ["http://127.0.0.1:9/v1/traces does not take spans"]  # once


def test_without_the_extra_the_start_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(SetupError, match=r"pip install .*opentelemetry-sdk"):
        tracing.check_installed()


@pytest.mark.parametrize("url", ["localhost:4318", "ftp://x", "http://", "http://a b"])
def test_an_endpoint_that_is_none(url: str) -> None:
    with pytest.raises(ConfigError, match="otlp_endpoint"):
        load({"otlp_endpoint": url}, {})
