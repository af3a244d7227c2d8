"""What the stamps of one request, and of many, add up to. Pure arithmetic; no clock, no network.

    TTFT  = first chunk with content - send            (the chat role chunk has no content)
    E2E   = end of the answer - send
    TPOT  = (E2E - TTFT) / (output tokens - 1)         one value a request, so request-weighted
    ICL   = gap between two content chunks             pooled over all requests
    ITL   = gap between two tokens                     pooled over all requests: token-weighted
    tok/s = output tokens of good requests / (last end - first send), ramp-up and drain included
    req/s = good requests / (last end - first send)

A chunk may carry several tokens, and then its gap is no token gap. ITL therefore places the
request's tokens at equal steps over its chunks and interpolates their stamps: with one token a
chunk that is the chunk gap itself, and for any chunking the gaps of a request add up to
last chunk - first chunk over (output tokens - 1) of them.

Percentiles interpolate linearly between the two nearest ranks. Requests that failed are counted,
and are in no other figure.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec
import numpy as np


class Record(msgspec.Struct, kw_only=True):
    """One request as its client saw it. Seconds on one monotonic clock."""

    sent_s: float
    chunks_s: list[float] = []  # arrival of each chunk that had content
    end_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    counted_by: Literal["usage", "chunks"] = "usage"  # where output_tokens is from
    finish_reason: str = ""
    error: str = ""  # "" = answered in full


class Summary(msgspec.Struct, frozen=True):
    """Of `count` >= 1 values: arithmetic mean and percentiles."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """One concurrency level, summed up."""

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
    client_cores: float | None = None  # the same of this process: near 1.0 it is the bottleneck


def ttft_s(record: Record) -> float | None:
    """None for a request without a content chunk (not streamed, or an empty answer)."""
    return record.chunks_s[0] - record.sent_s if record.chunks_s else None


def e2e_s(record: Record) -> float:
    return record.end_s - record.sent_s


def tpot_s(record: Record) -> float | None:
    """None for requests of at most one token."""
    first = ttft_s(record)
    if first is None or record.output_tokens < 2:
        return None
    return (e2e_s(record) - first) / (record.output_tokens - 1)


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


def summarise(values: Iterable[float | None]) -> Summary | None:
    """None stands for "this request has no such value": left out; None when nothing is left."""
    known = np.array([value for value in values if value is not None], dtype=np.float64)
    if not known.size:
        return None
    p50, p90, p99 = (float(x) for x in np.percentile(known, [50, 90, 99], method="linear"))
    return Summary(int(known.size), float(known.mean()), p50, p90, p99)


def level(
    records: Sequence[Record],
    concurrency: int,
    *,
    server_cores: float | None = None,
    client_cores: float | None = None,
) -> Level:
    """Sum up one level. Needs at least one record."""
    assert records, "a level without a request has no duration"
    good = [record for record in records if not record.error]
    duration_s = max(r.end_s for r in records) - min(r.sent_s for r in records)
    output_tokens = sum(r.output_tokens for r in good)
    return Level(
        concurrency=concurrency,
        requests=len(records),
        errors=dict(Counter(r.error for r in records if r.error)),
        duration_s=duration_s,
        e2e_s=summarise(e2e_s(r) for r in good),
        ttft_s=summarise(ttft_s(r) for r in good),
        tpot_s=summarise(tpot_s(r) for r in good),
        itl_s=summarise(gap for r in good for gap in token_gaps_s(r)),
        icl_s=summarise(gap for r in good for gap in chunk_gaps_s(r)),
        output_tokens_per_s=output_tokens / duration_s if duration_s > 0 else 0.0,
        requests_per_s=len(good) / duration_s if duration_s > 0 else 0.0,
        prompt_tokens=sum(r.prompt_tokens for r in good),
        cached_tokens=sum(r.cached_tokens for r in good),
        output_tokens=output_tokens,
        counted_by_chunks=sum(r.counted_by == "chunks" for r in good),
        in_flight=sum(e2e_s(r) for r in records) / duration_s if duration_s > 0 else 0.0,
        server_cores=server_cores,
        client_cores=client_cores,
    )
