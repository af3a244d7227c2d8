"""The draws of a step on a GPU: logits -> tokens, and what is reported of them.

Rows that only draw read the model's logits where they are. Rows that change them (rules, penalties,
masks, top_n_sigma, typical_p) are gathered behind the others: each gets a float32 row of its own,
`WIDE_ROWS` at a time, and is drawn from there. So neither kind pays for the other, and a step
without the second launches what it always did and sends nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace.backends.cuda.buffers import Buffers
from headrace.backends.cuda.kv_store import IdSlots
from headrace.backends.cuda.mask_upload import MaskUpload
from headrace.backends.cuda.upload import Upload
from headrace.engine.protocol import Masks
from headrace.kernels import edited, sampling
from headrace.kernels.draw_params import KINDS, Kind
from headrace.kernels.logprobs import ENTRY, LogprobScratch, logprobs
from headrace.messages import StepPlan
from headrace.runner.device_state import DeviceState
from headrace.runner.step_input import StepInput
from headrace.runner.taps import Taps

WIDE_ROWS = 256  # edited rows at a time: 1.2 MB each at 152064 tokens
_COLUMNS = (
    6  # token, device row, row of logits, mask; of asks: place among the draws, row of logits
)


class Queued(NamedTuple):
    """What was queued for a plan's draws."""

    order: list[int]  # tokens[i] answers draw order[i]
    asked: list[tuple[int, int]]  # (draw, how many most likely ones): entries[i] answers asked[i]
    refused: list[int]  # draws that fail, whatever was drawn
    edited: set[int]  # draws whose logits were not the model's


class Draws:
    """Kernels and memory of the draws of one model; all is queued on the current stream."""

    def __init__(
        self,
        state: DeviceState,
        slots: IdSlots,
        buffers: Buffers,
        vocab: int,
        *,
        with_pdl: bool,
    ) -> None:
        draws, device = buffers.logits.shape[0], buffers.logits.device
        self._state, self._pdl = state, with_pdl
        self._scratch = sampling.Scratch.allocate(draws, vocab, device)
        self._wide = edited.Wide.allocate(min(draws, WIDE_ROWS), vocab, device)
        self._rows = edited.Rows(state.edits, state.arena, slots.tables, slots.ids)
        self._numbers = torch.arange(draws, dtype=torch.int32, device=device)
        self._columns = torch.zeros((_COLUMNS, draws), dtype=torch.int32, device=device)
        self._send_columns = Upload((_COLUMNS, draws), device)
        self._sent = np.zeros((_COLUMNS, 0), np.int32)
        self._masks = MaskUpload(draws, vocab, device)
        self.logprob_scratch = LogprobScratch.allocate(draws, vocab, device)
        self.entries = torch.zeros((draws, ENTRY), dtype=torch.int32, device=device)

    def queue(
        self,
        plan: StepPlan,
        source: StepInput,
        logits: Tensor,
        tokens: Tensor,
        masks: Masks | None,
        taps: Taps | None = None,
    ) -> Queued:
        """tokens [draws] int32 and, for rows that ask, `entries` are filled, in `Queued`'s order.

        source: the step's columns; logits: the model's, as `source.drawn` counts them. taps: are
        shown what those draws look like that they were begun for.
        """
        for j in taps.draws if taps is not None else ():
            assert taps is not None, "draws are its own"
            taps.note(j, "logits", logits[int(source.drawn[2, j])])
        state, into = self._state, plan.draw_into
        refused = [j for j, row in enumerate(into) if row in state.refused] if state.refused else []
        slots = {} if masks is None else {draw: at for at, draw in enumerate(masks.draws)}
        changed, asked = list[int](), list[tuple[int, int]]()
        if slots or state.edited:
            changed = [j for j, row in enumerate(into) if row in state.edited or j in slots]
        if state.logprobs:
            asked = [
                (j, state.logprobs[row]) for j, row in enumerate(into) if row in state.logprobs
            ]
        if not changed and not asked:
            self._draw_plain(source, logits, tokens, state.kind(into))
            return Queued(list(range(len(into))), [], refused, set())
        rest = set(changed)
        plain = [j for j in range(len(into)) if j not in rest]
        order = plain + changed
        if masks is not None:
            self._masks.send(masks)
        self._upload_columns(source, order, slots, [j for j, _ in asked])
        if plain:
            some, kind = slice(0, len(plain)), state.kind([into[j] for j in plain])
            self._draw(source, logits, self._columns[2, some], tokens, some, kind)
        for begin in range(len(plain), len(order), self._wide.logits.shape[0]):
            some = slice(begin, min(begin + self._wide.logits.shape[0], len(order)))
            rows = [into[j] for j in order[some]]
            cut = [state.cuts_at_sigma(row) for row in rows]
            self._edit(source, logits, some, sigma=any(cut))
            for i, j in enumerate(order[some] if taps is not None else ()):
                assert taps is not None, "or there is nothing to show"
                taps.note_edited(j, self._wide.logits[i], masked=j in slots, sigma=cut[i])
            self._draw_edited(source, tokens, some, state.kind(rows))
        if masks is not None:
            self._masks.read()
        if asked:
            self._report(logits, tokens, len(asked), listed=any(most for _, most in asked))
        return Queued(order, asked, refused, rest)

    def _upload_columns(
        self, source: StepInput, order: list[int], slots: dict[int, int], asked: list[int]
    ) -> None:
        """Nothing is sent where the device has them already."""
        draws = len(order)
        columns = np.zeros((_COLUMNS, draws), np.int32)
        columns[:3] = source.drawn[:, order]
        columns[3] = [slots.get(j, -1) for j in order]
        place: npt.NDArray[np.int64] = np.argsort(order)
        columns[4, : len(asked)] = place[asked]
        columns[5, : len(asked)] = source.drawn[2, asked]
        if columns.shape == self._sent.shape and (columns == self._sent).all():
            return
        self._sent = columns
        self._send_columns.slot()[:, :draws] = columns
        self._send_columns.send(self._columns, _COLUMNS)

    def _draw_plain(self, source: StepInput, logits: Tensor, tokens: Tensor, kind: Kind) -> None:
        draws = tokens.shape[0]
        sampling.sample(
            logits,
            source.draw_logits[:draws],
            self._state.params,
            source.positions,
            source.draw_tokens[:draws],
            source.draw_rows[:draws],
            self._state.last,
            tokens,
            kind=kind,
            scratch=self._scratch,
            with_pdl=self._pdl,
        )

    def _draw(
        self,
        source: StepInput,
        logits: Tensor,
        rows: Tensor,
        tokens: Tensor,
        some: slice,
        kind: Kind,
    ) -> None:
        """The draws that stand in `some` of our columns, from these rows of logits."""
        sampling.sample(
            logits,
            rows,
            self._state.params,
            source.positions,
            self._columns[0, some],
            self._columns[1, some],
            self._state.last,
            tokens[some],
            kind=kind,
            scratch=self._scratch,
            edits=self._state.edits,
            with_pdl=self._pdl,
        )

    def _edit(self, source: StepInput, logits: Tensor, some: slice, *, sigma: bool) -> None:
        columns = self._columns[:4, some]
        edited.edit(
            logits,
            self._masks.current,
            source.positions,
            edited.Draws(columns[2], columns[0], columns[1], columns[3]),
            self._rows,
            self._wide,
            sigma=sigma,
            with_pdl=self._pdl,
        )

    def _draw_edited(self, source: StepInput, tokens: Tensor, some: slice, kind: Kind) -> None:
        numbers = self._numbers[: some.stop - some.start]
        self._draw(source, self._wide.logits, numbers, tokens, some, kind)

    def _report(self, logits: Tensor, tokens: Tensor, count: int, *, listed: bool) -> None:
        logprobs(
            logits,
            self._columns[5, :count],
            tokens,
            self._columns[4, :count],
            self.entries[:count],
            listed=listed,
            scratch=self.logprob_scratch,
            with_pdl=self._pdl,
        )

    def compile(self, source: StepInput, logits: Tensor) -> None:
        """Launch every kernel that a step can need, for `kernels.launch.compiling`."""
        tokens = torch.zeros(logits.shape[0], dtype=torch.int32, device=logits.device)
        some = slice(0, self._wide.logits.shape[0])
        for kind in reversed(KINDS):
            if kind != "typical":
                self._draw_plain(source, logits, tokens, kind)
            self._edit(source, logits, some, sigma=True)
            self._draw_edited(source, tokens, some, kind)
        for listed in (True, False):
            self._report(logits, tokens, logits.shape[0], listed=listed)

    @property
    def size_bytes(self) -> int:
        """Device memory of all of it, but for some small columns."""
        scratches = (self._scratch, self.logprob_scratch)
        tensors = [t for part in scratches for t in vars(part).values() if isinstance(t, Tensor)]
        tensors.append(self.entries)
        return (
            self._wide.size_bytes
            + self._masks.size_bytes
            + sum(t.numel() * t.element_size() for t in tensors)
        )
