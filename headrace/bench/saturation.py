"""Is an open loop asking for more than the server can do? From the starts and ends so far."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from headrace.bench.stats import Record, ttft_s

ENOUGH = 30  # starts in the window that is looked at; fewer say nothing
T_ONE_SIDED = 2.467  # Student's t, 99 %, 28 degrees of freedom: the strictest that ENOUGH allows
LEFT_BEHIND = 0.05  # share of the arrivals of the window by which the queue must have grown


def saturated(records: Sequence[Record], now_s: float) -> bool:
    """Whether requests pile up: all three hold over the second half of the time so far.

    The number of open requests rises, the time to the first token rises (each a least-squares slope
    above 0 at 99 %), and at least one arrival in twenty was not served meanwhile. Slopes alone
    would also see a queue that is merely filling up to its steady length.
    """
    if not records:
        return False
    begin_s = (min(r.sent_s for r in records) + now_s) / 2
    window = [r for r in records if begin_s <= r.sent_s <= now_s]
    ended = np.sort([r.end_s for r in records if r.end_s])
    if len(window) < ENOUGH:
        return False
    served = int(np.searchsorted(ended, now_s) - np.searchsorted(ended, begin_s))
    if len(window) - served <= LEFT_BEHIND * len(window):
        return False
    starts = np.sort([r.sent_s for r in records])
    at = np.array([r.sent_s for r in window])
    open_ = np.searchsorted(starts, at, "right") - np.searchsorted(ended, at, "right")
    if not rises(at, open_):
        return False
    firsts = [(r.sent_s, first) for r in window if (first := ttft_s(r)) is not None]
    if len(firsts) < ENOUGH:  # nothing answers any more, or answers are not streamed
        return True
    return rises(np.array([x for x, _ in firsts]), np.array([y for _, y in firsts]))


def rises(x: np.ndarray, y: np.ndarray) -> bool:
    """Whether the least-squares slope of y over x is above 0 with 99 % confidence."""
    centred = x - x.mean()
    spread = float(centred @ centred)
    if spread == 0:
        return False
    slope = float(centred @ y) / spread
    rest = y - y.mean() - slope * centred
    error = math.sqrt(float(rest @ rest) / (len(x) - 2) / spread)
    return slope > T_ONE_SIDED * error
