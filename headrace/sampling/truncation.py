"""Top-k, top-p and min-p: which tokens stay. Dropped tokens get -inf.

logits are [draws, vocab] float64 throughout, and only rows that use a filter are touched by it.
Among equal logits the lowest ids stay, so a result never depends on a sort's order.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from headrace.sampling.params import Columns

_LOOKS = (256, 4096)  # candidates that top-p sorts before it sorts the whole vocabulary


def keep_largest(logits: Tensor, counts: Tensor) -> Tensor:
    """The counts[i] largest of row i, 1 <= counts[i] <= vocab; the rest become -inf, in place."""
    candidates = torch.topk(logits, int(counts.max()), dim=-1).values
    return _keep_above(logits, counts, candidates)


def _keep_above(logits: Tensor, counts: Tensor, candidates: Tensor) -> Tensor:
    """As `keep_largest`, with the row's largest logits already sorted in `candidates`."""
    edge = candidates.gather(1, counts[:, None] - 1)
    above, equal = logits > edge, logits == edge
    room = counts[:, None] - above.sum(-1, keepdim=True)
    if (equal.sum(-1, keepdim=True) > room).any():  # more equals than places: lowest ids first
        equal &= equal.cumsum(-1) <= room
    return logits.masked_fill_((above | equal).logical_not_(), -torch.inf)


class TopK:
    """The k most likely tokens; 0, or k >= vocab, keeps all."""

    name = "top_k"

    def rows(self, columns: Columns, vocab: int) -> list[int]:
        used = (columns.top_k > 0) & (columns.top_k < vocab)
        return [int(row) for row in np.flatnonzero(used)]

    def apply(self, logits: Tensor, columns: Columns) -> Tensor:
        return keep_largest(logits, torch.from_numpy(columns.top_k))


class TopP:
    """The fewest most likely tokens whose probabilities reach p; at least one.

    Nucleus sampling: https://arxiv.org/abs/1904.09751. A token stays if the ones before it sum to
    less than p.
    """

    name = "top_p"

    def rows(self, columns: Columns, vocab: int) -> list[int]:
        return [int(row) for row in np.flatnonzero(columns.top_p < 1.0)]

    def apply(self, logits: Tensor, columns: Columns) -> Tensor:
        top_p = torch.from_numpy(columns.top_p)[:, None]
        peak = logits.amax(-1, keepdim=True)
        # cumsum, not sum: it adds a row up in the same order whatever the batch.
        total = (logits - peak).exp_().cumsum(-1)[:, -1:]
        out = torch.empty_like(logits)
        left = torch.arange(logits.shape[0])
        for looked_at in (*(n for n in _LOOKS if n < logits.shape[1]), logits.shape[1]):
            rows = logits[left]
            candidates = torch.topk(rows, looked_at, dim=-1).values
            mass = (candidates - peak[left]).exp_().cumsum(-1)
            wanted = top_p[left] * total[left]
            before = torch.cat((torch.zeros_like(wanted), mass[:, :-1]), dim=-1)
            counts = (before < wanted).sum(-1).clamp(min=1)
            # Certain when the nucleus ends inside the candidates, or they are everything.
            done = (mass[:, -1] >= wanted[:, 0]) | (looked_at == logits.shape[1])
            out[left[done]] = _keep_above(rows[done], counts[done], candidates[done])
            left = left[~done]
            if not left.numel():
                break
        return out


class MinP:
    """Tokens at least min_p times as likely as the most likely one.

    https://arxiv.org/abs/2407.01082
    """

    name = "min_p"

    def rows(self, columns: Columns, vocab: int) -> list[int]:
        return [int(row) for row in np.flatnonzero(columns.min_p > 0.0)]

    def apply(self, logits: Tensor, columns: Columns) -> Tensor:
        ratio = (logits - logits.amax(-1, keepdim=True)).exp_()
        return logits.masked_fill_(ratio < torch.from_numpy(columns.min_p)[:, None], -torch.inf)
