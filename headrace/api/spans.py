"""A request's record as spans: OpenTelemetry's names for generative AI, and our stages.

One span of the server a request; the stages that it went through are its children. Attributes hold
counts, parameters and times, never text. Names: opentelemetry.io/docs/specs/semconv/gen-ai, and for
times those that vLLM's traces have (`gen_ai.latency.*`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from headrace.api.record import Record
from headrace.observe.trace_context import trace_context
from headrace.observe.tracing import Trace, Tracer, Value

PROVIDER = "headrace"
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
# OpenTelemetry's name <- that of `metering.parameters_of`
PARAMETERS = {
    "gen_ai.request.max_tokens": "max_tokens",
    "gen_ai.request.temperature": "temperature",
    "gen_ai.request.top_p": "top_p",
    "gen_ai.request.top_k": "top_k",
    "gen_ai.request.seed": "seed",
    "gen_ai.request.choice.count": "n",
}
PENALTIES = {
    "gen_ai.request.frequency_penalty": "frequency",
    "gen_ai.request.presence_penalty": "presence",
}


def begin_trace(
    tracer: Tracer,
    headers: Iterable[tuple[bytes, bytes]],
    path: str,
    request_id: str,
    arrived_s: float,
) -> Trace:
    """A request of the model came."""
    facts: dict[str, Value] = {
        "http.request.method": "POST",
        "http.route": path,
        "url.path": path,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.operation.name": operation_of(path),
        "gen_ai.request.id": request_id,
    }
    return tracer.begin(f"POST {path}", trace_context(headers), arrived_s, facts)


def operation_of(path: str) -> str:
    """OpenTelemetry's word for what a path does; its own name where there is none."""
    return OPERATIONS.get(path, path.strip("/"))


def end_trace(trace: Trace, record: Record | None, status: int) -> None:
    """Its last byte leaves now. record: a done one; None: it was refused at the door."""
    if record is None:
        trace.tell({"http.response.status_code": status})
    elif trace.sampled:
        trace.rename(f"{operation_of(record.endpoint)} {record.model}")
        trace.tell(_facts(record))
        for name, at_s in (
            ("first_token", record.first_token_s),
            *(("preempted", at_s) for at_s in record.preempted_s),
        ):
            if at_s:
                trace.event(name, at_s)
        _stages(trace, record)
    error = record.error if record is not None else ""
    trace.end(error or (str(status) if status >= 400 else ""), failed=status >= 500)


def _stages(trace: Trace, record: Record) -> None:
    """Each from the moment before it to its own; those that did not come are left out."""
    begun_s = record.arrived_s
    prepared_s = record.rendered_s or record.parsed_s
    for number, name, from_s, to_s in (
        (2, "prepare", begun_s, prepared_s),
        (3, "tokenize", prepared_s or begun_s, record.tokenized_s),
        (5, "queue", record.submitted_s, record.scheduled_s),
        (6, "prefill", record.scheduled_s, record.first_token_s),
        (9, "decode", record.first_token_s, record.last_token_s),
        (11, "stream", record.last_token_s, record.done_s),
    ):
        if from_s and to_s:
            trace.child(name, from_s, to_s, {"headrace.stage": number})


def _facts(record: Record) -> dict[str, Value]:
    facts: dict[str, Value] = {
        "http.response.status_code": record.status,
        "gen_ai.request.model": record.model,
        "gen_ai.latency.e2e": record.done_s - record.arrived_s,
    }
    if record.submitted_s:
        facts |= {
            "gen_ai.response.model": record.model,
            "gen_ai.usage.input_tokens": record.prompt_tokens,
            "gen_ai.usage.output_tokens": record.output_tokens,
            "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
            "headrace.device_seconds": record.device_s,
            "headrace.preemptions": len(record.preempted_s),
        }
    params: dict[str, Any] = record.params
    facts |= {theirs: params[ours] for theirs, ours in PARAMETERS.items() if ours in params}
    penalties = params.get("repetition") or {}
    facts |= {theirs: penalties[ours] for theirs, ours in PENALTIES.items() if penalties.get(ours)}
    if finishes := [finish for finish in record.finishes if finish]:
        facts["gen_ai.response.finish_reasons"] = finishes
    if record.reasoning_tokens:
        facts["gen_ai.usage.reasoning.output_tokens"] = record.reasoning_tokens
    if record.first_token_s:
        facts |= {
            "gen_ai.latency.time_to_first_token": record.first_token_s - record.arrived_s,
            "gen_ai.latency.time_in_queue": record.queue_s,
            "gen_ai.latency.time_in_model_prefill": record.prefill_s,
            "gen_ai.latency.time_in_model_decode": record.last_token_s - record.first_token_s,
        }
    return facts
