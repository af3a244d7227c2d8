"""Which worker gets a request: pure functions of a frozen view. No clock, no state, no chance.

Ties go to the worker that was chosen longest ago, so equal workers share evenly.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b

from headrace.gateway.view import Ask, Choice, FleetView, Knobs, WorkerView

Policy = Callable[[FleetView, Ask, Knobs], Choice]

RING_POINTS = 256  # of one worker on the ring of chwbl


def load(worker: WorkerView, knobs: Knobs) -> float:
    """The work that stands before a request that comes now, in prefill tokens."""
    return worker.pending_tokens + knobs.decode_weight * worker.decode_tokens


def predicted_ttft_s(worker: WorkerView, uncached_tokens: int, knobs: Knobs) -> float:
    """Seconds to the first token of a prompt with that many uncached tokens; 0 = not known."""
    if not worker.prefill_tokens_per_s:
        return 0.0
    return (load(worker, knobs) + uncached_tokens) / worker.prefill_tokens_per_s


def _lowest(scores: Sequence[float], workers: Sequence[WorkerView], *, cold: bool = False) -> int:
    """The index of the lowest score; among equals the one that was chosen longest ago."""
    best = min(scores)
    if scores.count(best) == 1:
        return scores.index(best)
    chosen, longest_ago = -1, (0, 0)
    for i, score in enumerate(scores):
        if score == best:
            worker = workers[i]
            since = (worker.last_cold if cold else 0, worker.last_placed)
            if chosen < 0 or since < longest_ago:
                chosen, longest_ago = i, since
    return chosen


def random(view: FleetView, ask: Ask, knobs: Knobs) -> Choice:
    """Any worker, each as likely as the next."""
    return Choice(int(ask.draw * len(view.workers)), "draw", (0.0,) * len(view.workers))


def round_robin(view: FleetView, ask: Ask, knobs: Knobs) -> Choice:
    """The one that was chosen longest ago."""
    scores = tuple(float(worker.last_placed) for worker in view.workers)
    return Choice(_lowest(scores, view.workers), "turn", scores)


def least_requests(view: FleetView, ask: Ask, knobs: Knobs) -> Choice:
    """The one with the fewest requests; one that warms up counts each as several."""
    scores = tuple((worker.requests + 1) / worker.warm for worker in view.workers)
    return Choice(_lowest(scores, view.workers), "load", scores)


def least_tokens(view: FleetView, ask: Ask, knobs: Knobs) -> Choice:
    """The one with the least work in tokens, whatever it holds of this prompt."""
    own = max(1, ask.prompt_tokens)
    scores = tuple((load(worker, knobs) + own) / worker.warm for worker in view.workers)
    return Choice(_lowest(scores, view.workers), "load", scores)


def p2c(view: FleetView, ask: Ask, knobs: Knobs) -> Choice:
    """The less busy of two drawn workers."""
    n = len(view.workers)
    if n == 1:
        return Choice(0, "load", (0.0,))
    first, rest = divmod(ask.draw * n, 1.0)
    one = int(first)
    other = (one + 1 + int(rest * (n - 1))) % n
    scores = [math.inf] * n
    for i in (one, other):
        scores[i] = (view.workers[i].requests + 1) / view.workers[i].warm
    return Choice(_lowest(scores, view.workers), "load", tuple(scores))


def prefix_affinity(view: FleetView, ask: Ask, knobs: Knobs) -> Choice:
    """SGLang's rule: the longest holder above a share of the prompt, unless requests are
    unevenly spread by an absolute AND a relative measure; else the fewest requests.
    """
    counts = [worker.requests for worker in view.workers]
    scores = tuple(map(float, counts))
    uneven = max(counts) - min(counts) > knobs.balance_abs
    if uneven and max(counts) > knobs.balance_rel * min(counts):
        return Choice(_lowest(scores, view.workers), "balance", scores)
    longest = max(ask.cached_tokens)
    if longest > knobs.cache_threshold * ask.prompt_tokens:
        scores = tuple(float(ask.prompt_tokens - cached) for cached in ask.cached_tokens)
        return Choice(_lowest(scores, view.workers), "prefix", scores)
    return Choice(_lowest(scores, view.workers), "load", scores, cold=True)


def weighted(view: FleetView, ask: Ask, knobs: Knobs) -> Choice:
    """The scorers of the Gateway API inference extension: queue, KV use and prefix, weighted.

    queue = (max - own) / (max - min) over waiting requests (1 where all are equal); KV = 1 - use;
    prefix = held share of the prompt. The score here is the negative of their sum.
    """
    waiting = [worker.waiting for worker in view.workers]
    most, fewest = max(waiting), min(waiting)
    scores = []
    for worker, cached in zip(view.workers, ask.cached_tokens, strict=True):
        queue = (most - worker.waiting) / (most - fewest) if most > fewest else 1.0
        held = cached / ask.prompt_tokens if ask.prompt_tokens else 0.0
        total = knobs.queue_weight * queue + knobs.kv_weight * worker.free_kv
        scores.append(-(total + knobs.prefix_weight * held) * worker.warm)
    return Choice(_lowest(scores, view.workers), "score", tuple(scores))


@lru_cache(maxsize=16)
def _ring(names: tuple[str, ...]) -> tuple[list[int], list[int]]:
    """Points of the ring in order, and the worker of each."""
    points = sorted(
        (_point(f"{name}#{k}".encode()), i)
        for i, name in enumerate(names)
        for k in range(RING_POINTS)
    )
    return [point for point, _ in points], [i for _, i in points]


def _point(text: bytes) -> int:
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big")


def chwbl(view: FleetView, ask: Ask, knobs: Knobs) -> Choice:
    """Consistent hashing with bounded loads (arXiv 1608.01350): the first worker on the ring
    behind the prompt's beginning that is below `load_factor` times the mean.
    """
    points, owners = _ring(tuple(worker.name for worker in view.workers))
    n = len(view.workers)
    bound = math.ceil(knobs.load_factor * (1 + sum(w.requests for w in view.workers)) / n)
    at = bisect.bisect(points, _point(ask.prefix_key))
    scores = tuple(float(worker.requests) for worker in view.workers)
    seen: set[int] = set()
    for step in range(len(owners)):
        index = owners[(at + step) % len(owners)]
        if view.workers[index].requests < bound:
            return Choice(index, "overflow" if seen else "hash", scores)
        seen.add(index)
    raise AssertionError("one worker is always below the bound, for it is above the mean")


def session(view: FleetView, ask: Ask, knobs: Knobs) -> Choice:
    """The same worker for the same session, by rendezvous hashing: a worker that comes or goes
    moves only the sessions it gets or had. Without a session, `token_cost`.
    """
    if not ask.session:
        return token_cost(view, ask, knobs)
    text = ask.session.encode()
    scores = tuple(
        -float(_point(b"%d:%b%b" % (len(text), text, worker.name.encode())))
        for worker in view.workers
    )
    return Choice(_lowest(scores, view.workers), "session", scores)


def token_cost(view: FleetView, ask: Ask, knobs: Knobs) -> Choice:
    """The least work until this prompt's first token, in tokens:

        (1 - affinity) * (pending uncached tokens + decode load) + affinity * own uncached tokens

    At 0.5 a cached token and a waiting token weigh the same. At 0.75 a cached one weighs three
    times as much, for a prefix computed once more also takes memory from others. A holder that is
    busier than its cached tokens are worth loses to another worker, which then holds it too. A
    prompt that nobody holds to a share worth going for is placed by load, among equals where a
    cold prompt went longest ago. One that warms up counts its cost several times.
    """
    own = max(1, ask.prompt_tokens)
    longest = max(ask.cached_tokens)
    cold = longest <= knobs.cold_share * own
    if cold or not knobs.affinity:
        scores = tuple([(load(worker, knobs) + own) / worker.warm for worker in view.workers])
        return Choice(_lowest(scores, view.workers, cold=True), "cold", scores, cold=cold)
    a = knobs.affinity
    scores = tuple(
        [
            ((1.0 - a) * load(worker, knobs) + a * (own - cached)) / worker.warm
            for worker, cached in zip(view.workers, ask.cached_tokens, strict=True)
        ]
    )
    index = _lowest(scores, view.workers)
    if ask.cached_tokens[index] == longest:
        return Choice(index, "prefix", scores)
    return Choice(index, "holder is busy", scores, replicates=True)


POLICIES: Mapping[str, Policy] = {
    "token_cost": token_cost,
    "random": random,
    "round_robin": round_robin,
    "least_requests": least_requests,
    "least_tokens": least_tokens,
    "p2c": p2c,
    "prefix_affinity": prefix_affinity,
    "weighted": weighted,
    "chwbl": chwbl,
    "session": session,
}
