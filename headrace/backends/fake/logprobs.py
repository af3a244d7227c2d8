"""Log-probabilities of the fake model: those of its eight candidates at temperature 1.

A token's weight is the sum of 2**-i over the ranks i at which it is a candidate, and 2**-40 for
every other token, which no draw takes; probabilities are weights over their sum.
"""

from __future__ import annotations

import math

from headrace.backends.fake.model import CANDIDATES, VOCAB_SIZE, candidate
from headrace.messages import Logprobs

_OTHERS = 2.0**-40


def weights(state: int, eos: int | None) -> list[float]:
    """[id] -> weight of the token that follows `state`."""
    out = [_OTHERS] * VOCAB_SIZE
    mass: dict[int, float] = {}
    for rank in range(CANDIDATES):
        token = candidate(state, rank, eos)
        mass[token] = mass.get(token, 0.0) + 2.0**-rank
    for token, weight in mass.items():
        out[token] = weight
    return out


def report(state: int, token: int, count: int, eos: int | None) -> Logprobs:
    """What is said of `token` after `state`, and of the `count` most likely ones."""
    of = weights(state, eos)
    norm = math.log(math.fsum(of))
    order = sorted(range(VOCAB_SIZE), key=lambda i: (-of[i], i))[:count]
    rank = 1 + sum(weight > of[token] for weight in of)
    return Logprobs(
        math.log(of[token]) - norm, rank, order, [math.log(of[i]) - norm for i in order]
    )
