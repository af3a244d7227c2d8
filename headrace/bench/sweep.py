"""A sweep: one session at a time, as many as there are, then rates between the two."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from headrace.bench.stats import Level, Shape


def rates_between(floor: float, ceiling: float, count: int) -> list[float]:
    """`count` rates evenly spaced above `floor`, the last of them `ceiling`."""
    return [floor + (ceiling - floor) * step / count for step in range(1, count + 1)]


async def sweep(
    measure: Callable[[Shape], Awaitable[Level]],
    levels: int,
    most: int,
    open_shape: Shape,
    asks_a_session: int,
) -> None:
    """`levels` levels, at least 3: closed loops of 1 and `most`, then open loops.

    Ends behind the first that is over-saturated: higher rates would only queue longer. Nothing
    more is measured where the server is no faster with `most` than with one.
    """
    closed = Shape(concurrency=1, duration_s=open_shape.duration_s)
    floor = await measure(closed)
    ceiling = await measure(msgspec.structs.replace(closed, concurrency=most))
    slow = floor.requests_per_s / asks_a_session
    fast = ceiling.requests_per_s / asks_a_session
    if fast <= slow:
        return
    for rate in rates_between(slow, fast, levels - 2):
        level = await measure(msgspec.structs.replace(open_shape, rate=rate))
        if level.saturated:
            return
