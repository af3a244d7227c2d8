"""What a server takes where a plan says the least: steps at several loads, and one prompt."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import msgspec

from headrace.bench.load import Target
from headrace.bench.measure import Meter
from headrace.bench.stats import Level, Shape, Summary
from headrace.bench.workload import Workload
from headrace.errors import EngineError

PROMPTS = 3  # of those that are measured alone


class Seen(msgspec.Struct, frozen=True):
    """`decode`: the time of an output token behind the first (TPOT), the median of `batch` answers
    that stream at once; `tokens` is how many each has behind it on average. `prefill`: the median
    time to the first token of a prompt of `tokens`, alone."""

    kind: str
    batch: int
    tokens: int
    seconds: float


async def measure_beside(
    target: Target, batches: Sequence[int], prompt_tokens: int, output_tokens: int
) -> list[Seen]:
    """Every batch once, all its requests begun together, then prompts one by one. No prompt is
    sent twice, so that no prefix cache helps. Raises EngineError where a request fails."""
    nonce = secrets.token_hex(4)
    found = []
    for batch in batches:
        load = Workload(
            requests=batch, prompt_tokens=prompt_tokens, max_tokens=output_tokens, nonce=nonce
        )
        level = await _level(target, load, batch)
        behind = level.prompt_tokens / level.requests + output_tokens / 2
        found.append(
            Seen("decode", batch, round(behind), _median(level.tpot_s, "second token").p50)
        )
    load = Workload(requests=PROMPTS, prompt_tokens=prompt_tokens, max_tokens=1, nonce=nonce)
    level = await _level(target, load, 1)
    tokens = round(level.prompt_tokens / level.requests)
    return [*found, Seen("prefill", 1, tokens, _median(level.ttft_s, "first token").p50)]


async def _level(target: Target, load: Workload, batch: int) -> Level:
    meter = Meter(target, load)
    await meter.warm_up(1)
    level = await meter.level(Shape(concurrency=batch))
    if level.errors:
        raise EngineError(f"{target.url}: requests failed: {level.errors}")
    return level


def _median(summary: Summary | None, what: str) -> Summary:
    if summary is None:
        raise EngineError(f"the answers have no {what}: were they streamed, with 2 tokens or more?")
    return summary
