"""Log-probabilities of given tokens, and the most likely ones beside them.

    logprob(t) = z[t] - log(sum over i of exp(z[i])),    rank(t) = 1 + number of z[i] > z[t]

over the model's own logits z: before bias, penalties, masks and temperature. Sums are taken in
float64, a few rows at a time, so that no float64 copy of a batch of logits is ever made.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.messages import Logprobs

_ROWS_AT_ONCE = 8  # their float64 logits stay in the cache; rows do not touch each other


def report(logits: Tensor, ids: Sequence[int], counts: Sequence[int]) -> list[Logprobs]:
    """What is said of token ids[i], given the logits of row i, and of its counts[i] most likely.

    logits [n, vocab] float32, not changed; 0 <= counts[i].
    """
    out: list[Logprobs] = []
    for at in range(0, len(ids), _ROWS_AT_ONCE):
        end = at + _ROWS_AT_ONCE
        out += _report(logits[at:end], ids[at:end], counts[at:end])
    return out


def _report(logits: Tensor, ids: Sequence[int], counts: Sequence[int]) -> list[Logprobs]:
    norms = torch.logsumexp(logits.double(), -1)
    own = logits.gather(1, torch.tensor(ids)[:, None])
    ranks = ((logits > own).sum(-1) + 1).tolist()
    logprobs = (own[:, 0].double() - norms).tolist()
    most = min(max(counts), logits.shape[1])
    top_ids, top = largest(logits, most)
    tops = (top.double() - norms[:, None]).tolist()
    return [
        Logprobs(logprobs[i], ranks[i], top_ids[i][:count], tops[i][:count])
        for i, count in enumerate(counts)
    ]


def largest(logits: Tensor, count: int) -> tuple[list[list[int]], Tensor]:
    """The `count` largest of each row, lowest id first among equals: ids, and values [n, count]."""
    if not count:
        return [[] for _ in range(logits.shape[0])], logits[:, :0]
    # One more than asked: an equal just past the edge may have a lower id.
    found = torch.topk(logits, min(count + 1, logits.shape[1]), dim=-1)
    ids, values = found.indices[:, :count], found.values
    for row in (values[:, 1:] == values[:, :-1]).any(-1).nonzero()[:, 0].tolist():
        candidates = (logits[row] >= values[row, count - 1]).nonzero()[:, 0]  # ascending ids
        order = torch.sort(logits[row, candidates], descending=True, stable=True).indices
        ids[row] = candidates[order[:count]]
    return ids.tolist(), values[:, :count]
