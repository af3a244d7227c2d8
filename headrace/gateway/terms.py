"""What a score is made of: the terms that a policy adds up, told again for people.

A policy keeps its scores alone, for it runs at every request. Whoever asks for a decision gets the
terms from what it was made from, by the same rules; tests hold that they add up to the scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import msgspec

from headrace.gateway.view import Choice, FleetView, Knobs, WorkerView


class Term(msgspec.Struct, frozen=True):
    """One summand of a score: `value * weight`."""

    name: str
    value: float
    weight: float

    @property
    def adds(self) -> float:
        """Its share of the score."""
        return self.value * self.weight


class Decided(msgspec.Struct, frozen=True):
    """A choice and what it was made from."""

    view: FleetView
    choice: Choice
    prompt_tokens: int
    cached_tokens: tuple[int, ...]  # by worker of the view


def _load(worker: WorkerView, knobs: Knobs, weight: float) -> list[Term]:
    return [
        Term("pending uncached tokens", worker.pending_tokens, weight),
        Term("decoding tokens", worker.decode_tokens, weight * knobs.decode_weight),
    ]


def _by_tokens(made: Decided, at: int, knobs: Knobs) -> list[Term]:
    """All of its own prompt counts, wherever it goes."""
    worker = made.view.workers[at]
    own = Term("own tokens", max(1, made.prompt_tokens), 1.0 / worker.warm)
    return [*_load(worker, knobs, 1.0 / worker.warm), own]


def _token_cost(made: Decided, at: int, knobs: Knobs) -> list[Term]:
    if made.choice.cold or not knobs.affinity:
        return _by_tokens(made, at, knobs)
    worker = made.view.workers[at]
    uncached = max(1, made.prompt_tokens) - made.cached_tokens[at]
    own = Term("own uncached tokens", uncached, knobs.affinity / worker.warm)
    return [*_load(worker, knobs, (1.0 - knobs.affinity) / worker.warm), own]


def _requests(made: Decided, at: int, knobs: Knobs) -> list[Term]:
    worker = made.view.workers[at]
    return [
        Term("requests there", worker.requests, 1.0 / worker.warm),
        Term("this one", 1.0, 1.0 / worker.warm),
    ]


def _p2c(made: Decided, at: int, knobs: Knobs) -> list[Term]:
    return _requests(made, at, knobs) if len(made.view.workers) > 1 else []


def _plain_requests(made: Decided, at: int, knobs: Knobs) -> list[Term]:
    return [Term("requests there", made.view.workers[at].requests, 1.0)]


def _prefix_affinity(made: Decided, at: int, knobs: Knobs) -> list[Term]:
    if made.choice.reason != "prefix":
        return _plain_requests(made, at, knobs)
    return [Term("own uncached tokens", made.prompt_tokens - made.cached_tokens[at], 1.0)]


def _weighted(made: Decided, at: int, knobs: Knobs) -> list[Term]:
    """The best has the most points, so they count against the score."""
    waiting = [worker.waiting for worker in made.view.workers]
    most, fewest = max(waiting), min(waiting)
    worker = made.view.workers[at]
    queue = (most - worker.waiting) / (most - fewest) if most > fewest else 1.0
    held = made.cached_tokens[at] / made.prompt_tokens if made.prompt_tokens else 0.0
    return [
        Term("short queue", queue, -knobs.queue_weight * worker.warm),
        Term("free KV memory", worker.free_kv, -knobs.kv_weight * worker.warm),
        Term("share of the prompt held", held, -knobs.prefix_weight * worker.warm),
    ]


def _turn(made: Decided, at: int, knobs: Knobs) -> list[Term]:
    return [Term("number of its last request", made.view.workers[at].last_placed, 1.0)]


def _session(made: Decided, at: int, knobs: Knobs) -> list[Term]:
    if made.choice.reason != "session":
        return _token_cost(made, at, knobs)
    return [Term("hash of session and worker", -made.choice.scores[at], -1.0)]


def _none(made: Decided, at: int, knobs: Knobs) -> list[Term]:
    return []


TERMS: Mapping[str, Callable[[Decided, int, Knobs], list[Term]]] = {
    "token_cost": _token_cost,
    "random": _none,
    "round_robin": _turn,
    "least_requests": _requests,
    "least_tokens": _by_tokens,
    "p2c": _p2c,
    "prefix_affinity": _prefix_affinity,
    "weighted": _weighted,
    "chwbl": _plain_requests,
    "session": _session,
}


def terms_of(policy: str, made: Decided, at: int, knobs: Knobs) -> Sequence[Term]:
    """The terms of one candidate's score; none where the score says nothing (a draw alone, a
    worker that was not looked at)."""
    if not math.isfinite(made.choice.scores[at]):
        return ()
    return TERMS[policy](made, at, knobs)
