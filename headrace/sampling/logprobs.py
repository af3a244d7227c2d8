"""Log-probabilities of given tokens, and the most likely ones beside them.

    logprob(t) = z[t] - log(sum over i of exp(z[i])),    rank(t) = 1 + number of z[i] > z[t]

over the model's own logits z: before bias, penalties, masks and temperature. Sums are taken in
float64, row by row, so that no float64 copy of a batch of logits is ever made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.messages import Logprobs
from headrace.sampling.history import Ids

Floats = npt.NDArray[np.float32]


def report(logits: Floats, ids: Sequence[int], counts: Sequence[int]) -> list[Logprobs]:
    """What is said of token ids[i], given the logits of row i, and of its counts[i] most likely.

    logits [n, vocab] float32, not changed; 0 <= counts[i].
    """
    return [_of_row(*row) for row in zip(logits, ids, counts, strict=True)]


def _of_row(row: Floats, token: int, count: int) -> Logprobs:
    wide = row.astype(np.float64)
    norm = log_sum(wide)
    top = largest(row, count)
    rank = 1 + int(np.count_nonzero(row > row[token]))
    return Logprobs(float(wide[token]) - norm, rank, top.tolist(), (wide[top] - norm).tolist())


def log_sum(row: npt.NDArray[np.float64]) -> float:
    """log(sum of exp(row))."""
    peak = float(row.max())
    return peak + float(np.log(np.exp(row - peak).sum()))


def largest(row: npt.NDArray[Any], count: int) -> Ids:
    """Ids of the `count` largest of row [vocab], fewer if it has fewer; lowest id first among
    equals."""
    if not count:
        return np.arange(0)
    return largest_first(row, min(count, row.size))[:count]


def largest_first(row: npt.NDArray[Any], count: int) -> Ids:
    """Ids of the `count` largest of row [vocab], 1 <= count <= vocab, and of all that equal the
    last of them, by falling value; among equals the lowest id comes first."""
    at, ids = row.size - count, np.arange(row.size)
    if at > 0:
        ids = np.flatnonzero(row >= np.partition(row, at)[at])
    return ids[np.argsort(-row[ids], kind="stable")]
