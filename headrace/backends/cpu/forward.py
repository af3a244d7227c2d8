"""The decoder on torch's own operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from headrace.backends.cpu import batch as sizes
from headrace.backends.cpu.attention import Scratch, StepAttention
from headrace.backends.cpu.batch import Batch, Logits, Peaks
from headrace.backends.cpu.kv_store import KvStore
from headrace.backends.cpu.ops import TorchOps, Turns, Wanted
from headrace.models.layers import Decoder
from headrace.models.loads import ExpertLoads


class TorchForward:
    """See `batch.Forward`."""

    def __init__(self, model: Decoder, store: KvStore) -> None:
        self._model, self._store = model, store
        self._scratch = Scratch(store.head_dim, model.dtype)
        self._last: tuple[Tensor, TorchOps] | None = None  # of the last batch, for `again`
        self.loads = ExpertLoads(model.spec, torch.device("cpu"))

    @torch.inference_mode()
    def logits(self, batch: Batch) -> Logits | None:
        """See `Forward`."""
        tables = torch.from_numpy(batch.tables)
        step = StepAttention(
            self._store,
            self._scratch,
            tables[:, batch.rows],
            batch.starts,
            batch.counts,
            batch.unwritten,
        )
        turns = self._turns(batch, step.positions)
        tokens = batch.last_tokens()
        wanted = None
        self._last = None
        if len(tokens) < batch.ids.size and not batch.whole:
            wanted = Wanted(tokens, self._alone(batch) if tokens else step)
        ops = TorchOps(torch.from_numpy(batch.ids), step, turns, wanted, self.loads.tally)
        hidden = self._model(ops)
        if batch.whole:
            self._last = hidden, ops
        if wanted is None:
            hidden = hidden[tokens]
        return self._model.logits(hidden, ops).numpy() if tokens else None

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
        return StepAttention(
            self._store, self._scratch, torch.from_numpy(batch.tables)[:, rows], lasts, ones, every
        )

    def peaks(self, logits: Logits) -> Peaks:
        """See `Forward`."""
        low, high = torch.from_numpy(logits).aminmax(dim=-1)  # NaN passes through
        finite = torch.isfinite(low) & torch.isfinite(high)
        return Peaks(logits.argmax(-1), finite.numpy())

    @property
    def most_again(self) -> int:
        """See `Forward`."""
        return max(1, sizes.AGAIN_BYTES // (4 * self._model.spec.vocab_size))

    @torch.inference_mode()
    def again(self, tokens: Sequence[int]) -> Logits:
        """See `Forward`."""
        assert self._last is not None, "again() follows logits() of a whole batch"
        hidden, ops = self._last
        return self._model.logits(hidden[list(tokens)], ops).numpy()

    @torch.inference_mode()
    def states(self, first: int, count: int) -> Logits:
        """See `Forward`."""
        assert self._last is not None, "states() follows logits() of a whole batch"
        normed: Tensor = self._model.norm(self._last[0][first : first + count])
        return normed.float().numpy()

    @torch.inference_mode()
    def scores(self, states: Logits) -> Logits:
        """See `Forward`."""
        return self._model.scores(torch.from_numpy(states)).numpy()

    def counters(self) -> Mapping[str, int]:
        """What the experts of a mixture got."""
        return self.loads.counters()

    def close(self) -> None:
        """Drop the model."""
        del self._model, self._store, self._scratch, self._last
