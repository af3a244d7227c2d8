"""top_n_sigma, top_k, top_p, min_p, typical_p: which tokens stay. Dropped tokens get -inf.

logits are [draws, vocab] float64 throughout, and only rows that use a filter are touched by it.
Among equal logits the lowest ids stay, so a result never depends on a sort's order.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from headrace.sampling.params import Columns

_LOOKS = (256, 4096)  # candidates that top-p sorts before it sorts the whole vocabulary
_FEW = 4096  # candidates that top-p looks at alone
_CERTAIN = 1.0 - 1e-9  # a sum of float64 over a vocabulary is off by less


def keep_largest(logits: Tensor, counts: Tensor) -> Tensor:
    """The counts[i] largest of row i, 1 <= counts[i] <= vocab; the rest become -inf, in place."""
    candidates = torch.topk(logits, int(counts.max()), dim=-1).values
    return logits.masked_fill_(_below(logits, counts, candidates), -torch.inf)


def _below(keys: Tensor, counts: Tensor, candidates: Tensor) -> Tensor:
    """What is not among the counts[i] largest keys of row i, whose largest stand in `candidates`,
    sorted; a mask like `keys`."""
    edge = candidates.gather(1, counts[:, None] - 1)
    above, equal = keys > edge, keys == edge
    room = counts[:, None] - above.sum(-1, keepdim=True)
    if (equal.sum(-1, keepdim=True) > room).any():  # more equals than places: lowest ids first
        equal &= equal.cumsum(-1) <= room
    return (above | equal).logical_not_()


def keep_until(keys: Tensor, weights: Tensor, wanted: Tensor, logits: Tensor) -> Tensor:
    """By falling key, the fewest tokens whose weights reach wanted[i]; at least one.

    keys, weights, logits [rows, vocab], wanted [rows, 1] -> logits of those that stay. Overwrites
    `logits`, which may be `keys`.
    """
    looks = [*(n for n in _LOOKS if n < keys.shape[1]), keys.shape[1]]
    counts, best, done = _count(keys, weights, wanted, looks[0])
    if done.all():
        return logits.masked_fill_(_below(keys, counts, best), -torch.inf)
    out = torch.empty_like(logits)
    left = torch.arange(keys.shape[0])
    for looked_at in [*looks[1:], 0]:
        ready = left[done]
        below = _below(keys[ready], counts[done], best[done])
        out[ready] = logits[ready].masked_fill_(below, -torch.inf)
        left = left[~done]
        if not left.numel():
            break
        counts, best, done = _count(keys[left], weights[left], wanted[left], looked_at)
    return out


def _count(
    keys: Tensor, weights: Tensor, wanted: Tensor, looked_at: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Of the `looked_at` largest keys of each row: how many reach `wanted`, the keys, sorted, and
    whether that is certain: they end inside these, or these are everything."""
    best = torch.topk(keys, looked_at, dim=-1)
    mass = weights.gather(1, best.indices).cumsum(-1)
    before = torch.cat((torch.zeros_like(wanted), mass[:, :-1]), dim=-1)
    counts = (before < wanted).sum(-1).clamp(min=1)
    done = (mass[:, -1] >= wanted[:, 0]) | (looked_at == keys.shape[1])
    return counts, best.values, done


class TopNSigma:
    """Logits at or above max - n * sigma of the finite ones; see `reference.cut_n_sigma`."""

    name = "top_n_sigma"

    def rows(self, columns: Columns, vocab: int) -> list[int]:
        return [int(row) for row in np.flatnonzero(columns.top_n_sigma > 0.0)]

    def apply(self, logits: Tensor, columns: Columns) -> Tensor:
        for n, row in zip(columns.top_n_sigma, logits.numpy(), strict=True):
            sigma = row[np.isfinite(row)].std()
            row[row < row.max() - n * sigma] = -np.inf
        return logits


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
        weights = (logits - logits.amax(-1, keepdim=True)).exp_()
        # cumsum, not sum: it adds a row up in the same order whatever the batch.
        total = weights.cumsum(-1)[:, -1:]
        wanted = torch.from_numpy(columns.top_p)[:, None] * total
        floors = (total - wanted) * (0.5 / logits.shape[1])
        left = [
            i for i in range(len(logits)) if not _keep_of_few(i, logits, weights, wanted, floors)
        ]
        if left:
            logits[left] = keep_until(logits[left], weights[left], wanted[left], logits[left])
        return logits


def _keep_of_few(i: int, logits: Tensor, weights: Tensor, wanted: Tensor, floors: Tensor) -> bool:
    """`keep_until` of row i, in place, among its tokens of at least floors[i]. All others weigh at
    most half of what is not wanted, so they are not needed; no sort looks at them.

    False, and nothing changed: too many such tokens, or rounding could matter.
    """
    row, target = weights[i].numpy(), wanted[i].item()
    few = np.flatnonzero(row >= floors[i].item())
    if few.size > _FEW:
        return False
    keys = logits[i].numpy()[few]
    order = np.argsort(-keys)
    mass = row[few[order]].cumsum()
    if mass[-1] * _CERTAIN < target:
        return False
    count = int(np.searchsorted(mass, target)) + 1  # whose predecessors have less than `target`
    edge = keys[order[count - 1]]
    above, equal = keys > edge, keys == edge
    equal &= equal.cumsum() <= count - np.count_nonzero(above)  # lowest ids first
    stay = few[above | equal]
    kept = logits[i].numpy()[stay]
    logits[i] = -torch.inf
    logits[i].numpy()[stay] = kept
    return True


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


class TypicalP:
    """Tokens whose surprise is nearest to the entropy, until they reach p; at least one.

    Locally typical sampling: https://arxiv.org/abs/2202.00666; see `reference.cut_typical_p`.
    """

    name = "typical_p"

    def rows(self, columns: Columns, vocab: int) -> list[int]:
        return [int(row) for row in np.flatnonzero(columns.typical_p < 1.0)]

    def apply(self, logits: Tensor, columns: Columns) -> Tensor:
        shifted = logits - logits.amax(-1, keepdim=True)
        weights = shifted.exp()
        total = weights.cumsum(-1)[:, -1:]
        log_p = shifted - total.log()
        gone = logits == -torch.inf
        surprise = (log_p * weights).masked_fill_(gone, 0.0).cumsum(-1)[:, -1:] / total
        keys = (log_p - surprise).abs_().neg_().masked_fill_(gone, -torch.inf)
        wanted = torch.from_numpy(columns.typical_p)[:, None] * total
        return keep_until(keys, weights, wanted, logits)
