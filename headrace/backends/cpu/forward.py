"""One step on the processor: a batch of rows -> logits of the rows that are drawn from.

`TorchForward` runs the decoder on torch; `native.NativeForward` replays it on the C++ kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace.backends.cpu.attention import Scratch, StepAttention
from headrace.backends.cpu.kv_store import KvStore
from headrace.backends.cpu.ops import TorchOps, Turns, Wanted
from headrace.models.layers import Decoder
from headrace.models.loads import ExpertLoads

AGAIN_BYTES = 32 * 2**20  # of logits that `again` makes at once


class Batch(msgspec.Struct, frozen=True):
    """The forward rows of one step, one after another.

    ids [T] int64; tables [device rows, width] int64 block ids; forward row i is the sequence in
    device row rows[i] and computes positions [starts[i], starts[i] + counts[i]); forward rows in
    `unwritten` find their KV in the cache; the last tokens of forward rows in `chosen`
    (each once) get logits. `whole`: the others may be asked for `again`, and all for `states`.
    """

    ids: Tensor
    tables: Tensor
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

    def logits(self, batch: Batch) -> Tensor | None:
        """[len(chosen), vocab_size] float32, the caller's to change until the next call; None if
        no row is chosen."""

    def peaks(self, logits: Tensor) -> Peaks:
        """Of what `logits` returned last, before it was changed."""

    @property
    def most_again(self) -> int:
        """Tokens that one call of `again` takes."""

    def again(self, tokens: Sequence[int]) -> Tensor:
        """Logits of more tokens of the last batch, a `whole` one: [n, vocab_size] float32, until
        the next call.

        tokens: ascending places in the batch, at most `most_again`. May overwrite what `logits`
        returned.
        """

    def states(self, first: int, count: int) -> Tensor:
        """Hidden states of tokens [first, first + count) of the last batch, a `whole` one, after
        the last norm: [count, width] float32."""

    def scores(self, states: Tensor) -> Tensor:
        """What the classification head says of hidden states: [..., labels] float32."""

    def counters(self) -> Mapping[str, int]:
        """See `engine.protocol.Runner`."""

    def close(self) -> None:
        """Free threads and memory."""


class TorchForward:
    """The decoder on torch's own operators."""

    def __init__(self, model: Decoder, store: KvStore) -> None:
        self._model, self._store = model, store
        self._scratch = Scratch(store.head_dim, model.dtype)
        self._last: tuple[Tensor, TorchOps] | None = None  # of the last batch, for `again`
        self.loads = ExpertLoads(model.spec, torch.device("cpu"))

    def logits(self, batch: Batch) -> Tensor | None:
        """See `Forward`."""
        step = StepAttention(
            self._store,
            self._scratch,
            batch.tables[batch.rows],
            batch.starts,
            batch.counts,
            batch.unwritten,
        )
        turns = self._turns(batch, step.positions)
        tokens = batch.last_tokens()
        wanted = None
        self._last = None
        if len(tokens) < batch.ids.numel() and not batch.whole:
            wanted = Wanted(tokens, self._alone(batch) if tokens else step)
        ops = TorchOps(batch.ids, step, turns, wanted, self.loads.tally)
        hidden = self._model(ops)
        if batch.whole:
            self._last = hidden, ops
        if wanted is None:
            hidden = hidden[tokens]
        return self._model.logits(hidden, ops) if tokens else None

    def _turns(self, batch: Batch, positions: Tensor) -> Turns:
        """cos and sin of every rotary embedding, at each token of the batch."""
        rotaries, lengths = self._model.rotaries.items(), None
        if self._model.spec.by_length is not None:
            counts = torch.tensor(batch.counts)
            ends = torch.tensor(batch.prompts or batch.starts) + (0 if batch.prompts else counts)
            lengths = torch.maximum(ends.repeat_interleave(counts), positions + 1)
        return {name: rotary(positions, self._model.dtype, lengths) for name, rotary in rotaries}

    def _alone(self, batch: Batch) -> StepAttention:
        """The last token of each chosen row as a row of its own, whose K and V are written."""
        rows = [batch.rows[i] for i in batch.chosen]
        lasts = [batch.starts[i] + batch.counts[i] - 1 for i in batch.chosen]
        ones, every = [1] * len(rows), range(len(rows))
        return StepAttention(self._store, self._scratch, batch.tables[rows], lasts, ones, every)

    def peaks(self, logits: Tensor) -> Peaks:
        """See `Forward`."""
        low, high = logits.aminmax(dim=-1)  # NaN passes through
        finite = torch.isfinite(low) & torch.isfinite(high)
        return Peaks(logits.argmax(-1).numpy(), finite.numpy())

    @property
    def most_again(self) -> int:
        """See `Forward`."""
        return max(1, AGAIN_BYTES // (4 * self._model.spec.vocab_size))

    def again(self, tokens: Sequence[int]) -> Tensor:
        """See `Forward`."""
        assert self._last is not None, "again() follows logits() of a whole batch"
        hidden, ops = self._last
        return self._model.logits(hidden[list(tokens)], ops)

    def states(self, first: int, count: int) -> Tensor:
        """See `Forward`."""
        assert self._last is not None, "states() follows logits() of a whole batch"
        normed: Tensor = self._model.norm(self._last[0][first : first + count])
        return normed.float()

    def scores(self, states: Tensor) -> Tensor:
        """See `Forward`."""
        return self._model.scores(states)

    def counters(self) -> Mapping[str, int]:
        """What the experts of a mixture got."""
        return self.loads.counters()

    def close(self) -> None:
        """Drop the model."""
        del self._model, self._store, self._scratch, self._last
