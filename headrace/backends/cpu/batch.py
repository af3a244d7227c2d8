"""One step on the processor: a batch of rows -> logits of the rows that are drawn from; no torch.

`forward.TorchForward` runs the decoder on torch; `native.NativeForward` replays it on the C++
kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

AGAIN_BYTES = 32 * 2**20  # of logits that `again` makes at once


Logits = npt.NDArray[np.float32]  # [rows, vocab_size]
Ids = npt.NDArray[np.int64]


class Batch(msgspec.Struct, frozen=True):
    """The forward rows of one step, one after another.

    ids [T] int64; tables [KV groups, device rows, width] int64 block ids; forward row i is the
    sequence in device row rows[i] and computes positions [starts[i], starts[i] + counts[i]);
    forward rows in `unwritten` find their KV in the cache; the last tokens of forward rows in
    `chosen` (each once) get logits. `whole`: the others may be asked for `again`, and all for
    `states`.
    """

    ids: Ids
    tables: Ids
    rows: list[int]
    starts: list[int]
    counts: list[int]
    unwritten: list[int]
    chosen: list[int]
    whole: bool = False
    prompts: Sequence[int] = ()

    def last_tokens(self) -> list[int]:
        """The token of each row in `chosen`."""
        ends = list(accumulate(self.counts))
        return [ends[i] - 1 for i in self.chosen]


class Peaks(msgspec.Struct, frozen=True):
    """Of each row of logits: the first largest (any, if not finite), and whether all are finite.

    best [n] int64, finite [n] bool. May be overwritten by the next call.
    """

    best: npt.NDArray[np.int64]
    finite: npt.NDArray[np.bool_]


class Forward(Protocol):
    """Computes batches over a KV store that it was given."""

    def logits(self, batch: Batch) -> Logits | None:
        """[len(chosen), vocab_size] float32, the caller's to change until the next call; None if
        no row is chosen."""

    def peaks(self, logits: Logits) -> Peaks:
        """Of what `logits` returned last, before it was changed."""

    @property
    def most_again(self) -> int:
        """Tokens that one call of `again` takes."""

    def again(self, tokens: Sequence[int]) -> Logits:
        """Logits of more tokens of the last batch, a `whole` one: [n, vocab_size] float32, until
        the next call.

        tokens: ascending places in the batch, at most `most_again`. May overwrite what `logits`
        returned.
        """

    def states(self, first: int, count: int) -> Logits:
        """Hidden states of tokens [first, first + count) of the last batch, a `whole` one, after
        the last norm: [count, width] float32."""

    def scores(self, states: Logits) -> Logits:
        """What the classification head says of hidden states: [..., labels] float32."""

    def counters(self) -> Mapping[str, int]:
        """See `engine.protocol.Runner`."""

    def close(self) -> None:
        """Free threads and memory."""
