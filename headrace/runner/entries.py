"""What the device reports of a token, as the shapes that cross a queue."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headrace.kernels.logprobs import MOST
from headrace.messages import Logprobs


def unpack(entries: npt.NDArray[np.int32], most: list[int]) -> list[Logprobs]:
    """entries [n, ENTRY] of `kernels.logprobs`, the first most[i] of the most likely tokens."""
    floats = entries.view(np.float32)
    own, ranks = floats[:, 0].tolist(), entries[:, 1].tolist()
    ids, values = entries[:, 2 : 2 + MOST].tolist(), floats[:, 2 + MOST :].tolist()
    return [
        Logprobs(own[i], ranks[i], ids[i][:count], values[i][:count])
        for i, count in enumerate(most)
    ]
