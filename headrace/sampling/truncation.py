"""top_n_sigma, top_k, top_p, min_p, typical_p: which tokens stay. Dropped tokens get -inf.

logits are [draws, vocab] float64 throughout, and only rows that use a filter are touched by it.
Among equal logits the lowest ids stay, so a result never depends on a sort's order.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headrace.sampling.history import Ids
from headrace.sampling.logprobs import largest_first
from headrace.sampling.params import Columns
from headrace.sampling.shaping import Grid

Row = npt.NDArray[np.float64]

_LOOKS = (256, 4096)  # candidates that top-p sorts before it sorts the whole vocabulary
_FEW = 4096  # candidates that top-p looks at alone
_CERTAIN = 1.0 - 1e-9  # a sum of float64 over a vocabulary is off by less


def sums_of(weights: Grid) -> Row:
    """Of each row, in an order that does not depend on how many there are."""
    return np.array([row.sum() for row in weights])


def _keep(row: Row, ids: Ids) -> None:
    """All others become -inf, in place."""
    kept = row[ids]
    row[:] = -np.inf
    row[ids] = kept


def keep_largest(logits: Grid, counts: npt.NDArray[np.int64]) -> Grid:
    """The counts[i] largest of row i, 1 <= counts[i] <= vocab; the rest become -inf, in place."""
    for row, count in zip(logits, counts.tolist(), strict=True):
        _keep(row, largest_first(row, count)[:count])
    return logits


def keep_until(keys: Grid, weights: Grid, wanted: Row, logits: Grid) -> Grid:
    """By falling key, the fewest tokens whose weights reach wanted[i]; at least one.

    keys, weights, logits [rows, vocab], wanted [rows]. The other logits become -inf, in place;
    `logits` may be `keys`.
    """
    for i, row in enumerate(logits):
        _keep(row, _reach(keys[i], weights[i], float(wanted[i])))
    return logits


def _reach(keys: Row, weights: Row, wanted: float) -> Ids:
    """Of one row: the ids that `keep_until` keeps."""
    for looked_at in (*_LOOKS, keys.size):
        order = largest_first(keys, min(looked_at, keys.size))
        mass = weights[order].cumsum()
        if mass[-1] >= wanted:
            break
    return order[: int(np.searchsorted(mass[:-1], wanted)) + 1]


class TopNSigma:
    """Logits at or above max - n * sigma of the finite ones; see `reference.cut_n_sigma`."""

    name = "top_n_sigma"

    def rows(self, columns: Columns, vocab: int) -> list[int]:
        return [int(row) for row in np.flatnonzero(columns.top_n_sigma > 0.0)]

    def apply(self, logits: Grid, columns: Columns) -> Grid:
        for n, row in zip(columns.top_n_sigma, logits, strict=True):
            sigma = row[np.isfinite(row)].std()
            row[row < row.max() - n * sigma] = -np.inf
        return logits


class TopK:
    """The k most likely tokens; 0, or k >= vocab, keeps all."""

    name = "top_k"

    def rows(self, columns: Columns, vocab: int) -> list[int]:
        used = (columns.top_k > 0) & (columns.top_k < vocab)
        return [int(row) for row in np.flatnonzero(used)]

    def apply(self, logits: Grid, columns: Columns) -> Grid:
        return keep_largest(logits, columns.top_k)


class TopP:
    """The fewest most likely tokens whose probabilities reach p; at least one.

    Nucleus sampling: https://arxiv.org/abs/1904.09751. A token stays if the ones before it sum to
    less than p.
    """

    name = "top_p"

    def rows(self, columns: Columns, vocab: int) -> list[int]:
        return [int(row) for row in np.flatnonzero(columns.top_p < 1.0)]

    def apply(self, logits: Grid, columns: Columns) -> Grid:
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        totals = sums_of(weights)
        wanted = columns.top_p * totals
        floors = (totals - wanted) * (0.5 / logits.shape[1])
        for i in range(len(logits)):
            kept = _few_that_reach(logits[i], weights[i], float(wanted[i]), float(floors[i]))
            _keep(logits[i], _reach(logits[i], weights[i], wanted[i]) if kept is None else kept)
        return logits


def _few_that_reach(row: Row, weights: Row, target: float, floor: float) -> Ids | None:
    """What `_reach` gives, found among the tokens that weigh at least `floor`. All others weigh at
    most half of what is not wanted, so they are not needed; no sort looks at them.

    None: too many such tokens, or rounding could matter.
    """
    few = np.flatnonzero(weights >= floor)
    if few.size > _FEW:
        return None
    keys = row[few]
    order = np.argsort(-keys)
    mass = weights[few[order]].cumsum()
    if mass[-1] * _CERTAIN < target:
        return None
    count = int(np.searchsorted(mass, target)) + 1  # whose predecessors have less than `target`
    edge = keys[order[count - 1]]
    above, equal = keys > edge, keys == edge
    equal &= equal.cumsum() <= count - np.count_nonzero(above)  # lowest ids first
    kept: Ids = few[above | equal]
    return kept


class MinP:
    """Tokens at least min_p times as likely as the most likely one.

    https://arxiv.org/abs/2407.01082
    """

    name = "min_p"

    def rows(self, columns: Columns, vocab: int) -> list[int]:
        return [int(row) for row in np.flatnonzero(columns.min_p > 0.0)]

    def apply(self, logits: Grid, columns: Columns) -> Grid:
        ratio = np.exp(logits - logits.max(-1, keepdims=True))
        logits[ratio < columns.min_p[:, None]] = -np.inf
        return logits


class TypicalP:
    """Tokens whose surprise is nearest to the entropy, until they reach p; at least one.

    Locally typical sampling: https://arxiv.org/abs/2202.00666; see `reference.cut_typical_p`.
    """

    name = "typical_p"

    def rows(self, columns: Columns, vocab: int) -> list[int]:
        return [int(row) for row in np.flatnonzero(columns.typical_p < 1.0)]

    def apply(self, logits: Grid, columns: Columns) -> Grid:
        gone = logits == -np.inf
        shifted = logits - logits.max(-1, keepdims=True)
        weights = np.exp(shifted)
        totals = sums_of(weights)
        log_p = shifted - np.log(totals)[:, None]
        log_p[gone] = 0.0  # of weight 0, where the product below would be no number
        surprise = sums_of(log_p * weights) / totals
        keys = -np.abs(log_p - surprise[:, None])
        keys[gone] = -np.inf
        return keep_until(keys, weights, columns.typical_p * totals, logits)
