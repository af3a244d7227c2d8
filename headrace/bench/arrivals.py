"""When the requests of an open loop are sent, whatever the server does meanwhile.

Gaps follow a gamma law of mean 1/rate with shape `burstiness`: 1 is a Poisson process, below 1
comes in clumps, above 1 is more even, infinity is a metronome. As in `vllm bench serve` all times
are stretched together so that the last of n falls on n/rate: the offered rate is exact.
"""

from __future__ import annotations

import math
import random


def arrival_times_s(
    rate: float, count: int, *, burstiness: float, burst: int, key: str
) -> list[float]:
    """`count` times from 0 on, rising, at `rate` a second; `burst` at a time share one.

    The same `key` draws the same times. Times are seconds from the start of the level.
    """
    assert min(rate, burstiness, burst) > 0, "checked where the options are read"
    source = random.Random(key)
    groups = math.ceil(count / burst)
    times_s, now_s = [], 0.0
    for _ in range(groups):
        now_s += 1.0 if math.isinf(burstiness) else source.gammavariate(burstiness, 1 / burstiness)
        times_s.append(now_s)
    stretch = groups * burst / rate / now_s if now_s > 0 else 0.0
    return [times_s[index // burst] * stretch for index in range(count)]
