"""Where a sequence said before what it says last: the repeats that dry and lz look at."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headrace.sampling.history import Ids


def suffix_matches(s: Ids, longest: int) -> npt.NDArray[np.int64]:
    """[len(s)]: at i the largest k <= longest with s[i-k : i] == s[len(s)-k :].

    As `reference.match_length`. Time: len(s), and the sum of the matches.
    """
    n = s.size
    out = np.zeros(n, np.int64)
    if n < 2 or longest < 1:
        return out
    ends = np.flatnonzero(s[:-1] == s[-1]) + 1
    for k in range(1, longest):
        out[ends] = k
        ends = ends[ends > k]
        ends = ends[s[ends - 1 - k] == s[n - 1 - k]]
        if not ends.size:
            return out
    out[ends] = longest
    return out


def largest_each(ids: Ids, keys: npt.NDArray[np.int64]) -> tuple[Ids, npt.NDArray[np.int64]]:
    """The distinct ids, ascending, and the largest key of each."""
    order = np.lexsort((keys, ids))
    ids, keys = ids[order], keys[order]
    last = np.append(ids[1:] != ids[:-1], True)[: ids.size]
    return ids[last], keys[last]
