"""What one request's record, and of many, add up to. Pure arithmetic; no clock, no network.

FORMULAS below are the definitions, printed with every report. A chunk may carry several tokens,
and then its gap is no token gap. ITL therefore places the request's tokens at equal steps over its
chunks and interpolates their stamps: with one token a chunk that is the chunk gap itself, and for
any chunking the gaps of a request add up to last chunk - first chunk over (output tokens - 1).

Percentiles interpolate linearly between the two nearest ranks. Requests that failed, were shed
(429, 503) or were dropped by the client are counted, each apart, and are in no other figure.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np

FORMULAS = {
    "TTFT": "first chunk with content or reasoning - send (the chat role chunk has neither)",
    "TTFC": "first chunk with content that is not reasoning - send",
    "E2E": "end of the answer - send",
    "TPOT": "(E2E - TTFT) / (output tokens - 1), one value a request: request-weighted",
    "ITL": "gap between two tokens, pooled over all requests: token-weighted",
    "ICL": "gap between two chunks with content, pooled over all requests",
    "normalised": "E2E / output tokens, one value a request",
    "tok/s": "output tokens of good requests / (last end - first send), ramp-up and drain included",
    "steady tok/s": "output tokens that came between the first end and the last send / that time",
    "req/s": "good requests / (last end - first send)",
    "offered": "planned arrivals / planned time, later turns of their sessions included",
    "achieved": "good requests that ended while requests were being sent / that time",
    "goodput": "good requests within every --slo / (last end - first send); itl: a request's mean",
    "lag": "send - planned time: the generator's own delay (open loop)",
    "percentiles": "linear between the two nearest ranks",
}


class Record(msgspec.Struct, kw_only=True):
    """One request as its client saw it. Seconds on one monotonic clock."""

    sent_s: float = 0.0
    chunks_s: list[float] = []  # arrival of each chunk that had content or reasoning
    end_s: float = 0.0  # 0: still open
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    counted_by: Literal["usage", "chunks"] = "usage"  # where output_tokens is from
    finish_reason: str = ""
    error: str = ""  # "" = answered in full, or dropped by the client
    told: str = ""  # the server's own words about the error, where it sent any
    shed: bool = False  # the error is a refusal for load
    cancelled: bool = False  # the client dropped it, as planned
    content_s: float | None = None  # arrival of the first chunk that was not reasoning
    planned_s: float | None = None  # when an open loop meant to send it
    session: int = 0
    turn: int = 0

    @property
    def good(self) -> bool:
        return not self.error and not self.cancelled


class Summary(msgspec.Struct, frozen=True):
    """Of `count` >= 1 values: arithmetic mean and percentiles."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float | None = None  # None in reports of before it was kept


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """How the requests of one level arrive. `concurrency` alone: a closed loop."""

    concurrency: int = 0  # sessions open at once; of an open loop the most, 0 = no limit
    rate: float | None = None  # sessions a second: an open loop
    burstiness: float = 1.0  # see arrivals.py; 0: evenly spaced
    burst: int = 1  # sessions that come at one time
    duration_s: float | None = None  # None: as many as the workload says
    trace: bool = False  # an open loop at the workload's trace's own times

    @property
    def is_open(self) -> bool:
        return self.rate is not None or self.trace


class ServerMetric(msgspec.Struct, frozen=True):
    """A series of the server's /metrics during one level, labels summed."""

    kind: str  # counter or gauge
    mean: float  # of a gauge; of a counter its growth a second
    max: float  # of a gauge; of a counter its growth


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """One level of load, summed up."""

    concurrency: int
    requests: int
    errors: dict[str, int]
    duration_s: float
    e2e_s: Summary | None  # None: no request had one, here and below
    ttft_s: Summary | None
    tpot_s: Summary | None
    itl_s: Summary | None
    icl_s: Summary | None
    output_tokens_per_s: float
    requests_per_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    counted_by_chunks: int  # requests whose server sent no usage
    in_flight: float  # mean number of open requests: sum of E2E / duration
    server_cores: float | None = None  # CPU seconds a second of the server's process tree
    client_cores: float | None = None  # the same of the busiest generator process
    rate: float | None = None  # of an open loop: sessions a second as asked for
    open_loop: bool = False
    sheds: dict[str, int] = {}
    cancelled: int = 0
    unsent: int = 0  # requests of sessions that broke at an earlier request
    ttfc_s: Summary | None = None
    normalised_s: Summary | None = None
    total_tokens_per_s: float = 0.0  # prompt and output tokens of good requests
    steady_tokens_per_s: float | None = None
    offered_per_s: float | None = None
    achieved_per_s: float | None = None
    saturated: bool = False
    goodput_per_s: float | None = None  # None: no --slo was given
    good_share: float | None = None  # of all requests that the client did not drop
    lag_s: Summary | None = None
    loop_delay_s: Summary | None = None  # how late the generator's own loop was, each 50 ms
    server: dict[str, ServerMetric] = {}

    @property
    def label(self) -> str:
        """`8` of a closed loop, `12.5/s` of an open one, `trace`."""
        if self.rate is not None:
            return f"{self.rate:.4g}/s"
        return "trace" if self.open_loop else str(self.concurrency)


def ttft_s(record: Record) -> float | None:
    """None for a request without a content chunk (not streamed, or an empty answer)."""
    return record.chunks_s[0] - record.sent_s if record.chunks_s else None


def ttfc_s(record: Record) -> float | None:
    """None for an answer without content; equals TTFT where nothing was thought first."""
    return None if record.content_s is None else record.content_s - record.sent_s


def e2e_s(record: Record) -> float:
    """From the request's first byte to the end of its answer."""
    return record.end_s - record.sent_s


def tpot_s(record: Record) -> float | None:
    """None for requests of at most one token."""
    first = ttft_s(record)
    if first is None or record.output_tokens < 2:
        return None
    return (e2e_s(record) - first) / (record.output_tokens - 1)


def normalised_s(record: Record) -> float | None:
    """None for an answer without a token."""
    return e2e_s(record) / record.output_tokens if record.output_tokens else None


def chunk_gaps_s(record: Record) -> list[float]:
    """len(chunks) - 1 gaps."""
    return [later - earlier for earlier, later in itertools.pairwise(record.chunks_s)]


def token_gaps_s(record: Record) -> list[float]:
    """output_tokens - 1 gaps; see the head of this file. Empty below two chunks or two tokens."""
    chunks, tokens = record.chunks_s, record.output_tokens
    if len(chunks) < 2 or tokens < 2:
        return []
    places = np.linspace(0, len(chunks) - 1, tokens)
    stamps = np.interp(places, np.arange(len(chunks)), chunks)
    return [float(gap) for gap in np.diff(stamps)]


def mean_gap_s(record: Record) -> float | None:
    """The mean of `token_gaps_s`."""
    chunks, tokens = record.chunks_s, record.output_tokens
    return (chunks[-1] - chunks[0]) / (tokens - 1) if len(chunks) > 1 and tokens > 1 else None


SLOS = {
    "ttft": ttft_s,
    "ttfc": ttfc_s,
    "itl": mean_gap_s,
    "tpot": tpot_s,
    "e2e": e2e_s,
    "normalised": normalised_s,
}


def within(record: Record, slo_s: Mapping[str, float]) -> bool:
    """All limits kept. A request that has no such value (one token, no gap) keeps that limit."""
    values = ((SLOS[name](record), limit) for name, limit in slo_s.items())
    return all(value is None or value <= limit for value, limit in values)


def summarise(values: Iterable[float | None]) -> Summary | None:
    """None stands for "this request has no such value": left out; None when nothing is left."""
    known = np.array([value for value in values if value is not None], dtype=np.float64)
    if not known.size:
        return None
    p50, p90, p99 = (float(x) for x in np.percentile(known, [50, 90, 99], method="linear"))
    return Summary(int(known.size), float(known.mean()), p50, p90, p99, float(known.max()))


def steady_tokens_per_s(records: Sequence[Record]) -> float | None:
    """See FORMULAS. None where the last request was sent before the first ended."""
    begin_s, end_s = min(r.end_s for r in records), max(r.sent_s for r in records)
    if end_s <= begin_s:
        return None
    tokens = 0.0
    for record in records:
        if record.good and record.chunks_s:
            inside = sum(begin_s < stamp <= end_s for stamp in record.chunks_s)
            tokens += record.output_tokens * inside / len(record.chunks_s)
    return tokens / (end_s - begin_s)


def achieved_per_s(records: Sequence[Record], begin_s: float, end_s: float) -> float | None:
    """Good ends between two times, a second; None where no time passed."""
    if end_s <= begin_s:
        return None
    return sum(r.good and r.end_s <= end_s for r in records) / (end_s - begin_s)


def level(
    records: Sequence[Record],
    concurrency: int,
    *,
    slo_s: Mapping[str, float] | None = None,
    **more: Any,
) -> Level:
    """Sum up one level; `more` are fields of `Level` that records do not hold. Needs a record."""
    assert records, "a level without a request has no duration"
    good = [record for record in records if record.good]
    kept = [record for record in records if not record.cancelled]
    begin_s = min(r.sent_s for r in records)
    duration_s = max(r.end_s for r in records) - begin_s
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    output_tokens = sum(r.output_tokens for r in good)
    prompt_tokens = sum(r.prompt_tokens for r in good)
    if slo_s:
        inside = sum(within(record, slo_s) for record in good)
        more |= {"goodput_per_s": inside * per_s}
        more |= {"good_share": inside / len(kept)} if kept else {}
    return Level(
        concurrency=concurrency,
        requests=len(records),
        errors=dict(Counter(r.error for r in records if r.error and not r.shed)),
        sheds=dict(Counter(r.error for r in records if r.shed)),
        cancelled=sum(r.cancelled for r in records),
        duration_s=duration_s,
        e2e_s=summarise(e2e_s(r) for r in good),
        ttft_s=summarise(ttft_s(r) for r in good),
        ttfc_s=summarise(ttfc_s(r) for r in good),
        tpot_s=summarise(tpot_s(r) for r in good),
        itl_s=summarise(gap for r in good for gap in token_gaps_s(r)),
        icl_s=summarise(gap for r in good for gap in chunk_gaps_s(r)),
        normalised_s=summarise(normalised_s(r) for r in good),
        output_tokens_per_s=output_tokens * per_s,
        total_tokens_per_s=(output_tokens + prompt_tokens) * per_s,
        steady_tokens_per_s=steady_tokens_per_s(records),
        requests_per_s=len(good) * per_s,
        prompt_tokens=prompt_tokens,
        cached_tokens=sum(r.cached_tokens for r in good),
        output_tokens=output_tokens,
        counted_by_chunks=sum(r.counted_by == "chunks" for r in good),
        in_flight=sum(e2e_s(r) for r in records) * per_s,
        lag_s=summarise(None if r.planned_s is None else r.sent_s - r.planned_s for r in records),
        **more,
    )
