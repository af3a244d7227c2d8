"""Hidden states of the fake model: each state names a vector, of short binary fractions, so that
sums are exact in whatever order they are made.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from headrace.messages import Pool

WIDTH = 8
LABELS = 3  # of its classification head

Floats = npt.NDArray[np.float32]  # little-endian wherever it runs
_FLOAT = np.dtype("<f4")


def hidden(state: int) -> Floats:
    """[WIDTH]: the bytes of the state as numbers in [-1, 1)."""
    raw = np.frombuffer(state.to_bytes(WIDTH, "little"), np.int8)
    vector: Floats = (raw / 128).astype(_FLOAT)
    return vector


def pooled(kind: Pool, states: Sequence[int]) -> Floats:
    """What a forward row yields; states: after each of its tokens. Scores are the differences of
    the first numbers of the last hidden state."""
    if kind == "sum":
        total: Floats = np.sum([hidden(state) for state in states], axis=0, dtype=_FLOAT)
        return total
    last = hidden(states[-1])
    return last if kind == "last" else last[1 : 1 + LABELS] - last[:LABELS]
