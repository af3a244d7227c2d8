"""What draws on a GPU looked like, for rows that are recorded: `messages.Tap`.

The likeliest logits of a row are found on the device, by operations queued behind its sampler, and
come back with the step's tokens: nobody waits for them in the step, and no other row is touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.messages import Sampling, StageView, Tap

MOST = 64  # draws of a step that are shown
STAGES = 2  # the model's logits, and what was made of them before temperature
TOP = 10
NOTE = (
    "this backend's kernels show the model's logits, and what rules, penalties, the grammar's mask "
    "and top_n_sigma made of them together, under the name of the last of these; not what "
    "temperature and the other filters left, nor the uniform number"
)


class Queued(NamedTuple):
    """Where the values of a draw will lie."""

    place: int
    draw: int
    sampling: Sampling
    stages: list[str]


class Taps:
    """Pinned memory for `slots` steps in flight; `begin` a step, `note`, then `read` it later."""

    def __init__(self, slots: int, vocab: int, device: torch.device) -> None:
        pinned, shape = device.type == "cuda", (slots, MOST, STAGES)
        self._top = min(TOP, vocab)
        self._values = torch.zeros((*shape, self._top), dtype=torch.float32, pin_memory=pinned)
        self._ids = torch.zeros((*shape, self._top), dtype=torch.int64, pin_memory=pinned)
        self._kept = torch.zeros(shape, dtype=torch.int64, pin_memory=pinned)
        self._queued: list[dict[int, Queued]] = [{} for _ in range(slots)]  # by draw
        self._slot = 0

    def begin(self, slot: int, into: Sequence[int], recorded: dict[int, Sampling]) -> None:
        """A step whose draws go into rows `into`; `recorded`: row -> how it draws."""
        self._slot = slot
        mine = [j for j, row in enumerate(into) if row in recorded] if recorded else []
        self._queued[slot] = {
            j: Queued(place, j, recorded[into[j]], []) for place, j in enumerate(mine[:MOST])
        }

    @property
    def draws(self) -> Sequence[int]:
        """Of the step that was begun last, those that are shown."""
        return list(self._queued[self._slot])

    def note(self, draw: int, stage: str, logits: Tensor) -> None:
        """What draw `draw` has now: logits [vocab]. Queued on the current stream."""
        slot, queued = self._slot, self._queued[self._slot].get(draw)
        if queued is None:
            return
        at = slot, queued.place, len(queued.stages)
        values, ids = torch.topk(logits.float(), self._top)
        self._values[at].copy_(values, non_blocking=True)
        self._ids[at].copy_(ids, non_blocking=True)
        self._kept[at].copy_((logits > -torch.inf).sum(), non_blocking=True)
        queued.stages.append(stage)

    def note_edited(self, draw: int, logits: Tensor, *, masked: bool, sigma: bool) -> None:
        """What was made of it before temperature. masked: it has a grammar's mask; sigma: it was
        cut by top_n_sigma."""
        queued = self._queued[self._slot].get(draw)
        if queued is not None and (stage := _last_edit(queued.sampling, masked, sigma)):
            self.note(draw, stage, logits)

    def read(self, slot: int) -> list[Tap]:
        """Of a step that has ended."""
        return [
            Tap(
                one.draw,
                one.sampling.temperature == 0.0,
                -1.0,
                [self._stage(slot, one.place, i, name) for i, name in enumerate(one.stages)],
            )
            for one in self._queued[slot].values()
        ]

    def _stage(self, slot: int, place: int, i: int, name: str) -> StageView:
        kept = int(self._kept[slot, place, i])
        count = min(kept, self._top)
        ids, values = self._ids[slot, place, i, :count], self._values[slot, place, i, :count]
        return StageView(name, kept, ids.tolist(), values.tolist())


def _last_edit(sampling: Sampling, masked: bool, sigma: bool) -> str:
    """The last stage that changed a row's logits before temperature; "" if none did."""
    if sigma:
        return "top_n_sigma"
    if masked:
        return "mask"
    if any(part is not None for part in (sampling.repetition, sampling.dry, sampling.lz)):
        return "penalties"
    return "rules" if sampling.rules is not None else ""
