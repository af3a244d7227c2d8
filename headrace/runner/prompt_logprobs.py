"""Log-probabilities of prompt tokens on a GPU: the output layer over slices of a step's tokens.

A slice is as many tokens as the buffer of logits has rows, so no tensor grows with the prompt but
the entries: 168 bytes a token of the largest step, on the device and in each pinned slot.
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import torch

from headrace.backends.cuda.upload import Upload
from headrace.kernels.logprobs import ENTRY, logprobs
from headrace.messages import StepPlan
from headrace.runner.forward import Forward


class PromptLogprobs:
    """For steps of at most `tokens` tokens of one model."""

    def __init__(self, forward: Forward, tokens: int) -> None:
        self._forward = forward
        device = forward.device
        self._columns = torch.zeros((2, tokens), dtype=torch.int32, device=device)
        self._upload = Upload((2, tokens), device)
        self._numbers = torch.arange(tokens, dtype=torch.int32, device=device)
        self.entries = torch.zeros((tokens, ENTRY), dtype=torch.int32, device=device)

    def queue(self, plan: StepPlan) -> list[int]:
        """Fill `entries` for the plan's prompts, one after another; how many for each.

        Comes after the draws of the step that the model ran last: their logits are lost.
        """
        firsts = [0, *accumulate(plan.counts)]
        tokens: list[int] = []
        targets: list[int] = []
        counts = []
        for row, _, after in plan.prompts:
            ids = plan.ids[row]
            assert ids is not None, f"prompt of forward row {row} has no ids"
            asked = ids[1:] + [after] * (after >= 0)
            tokens += range(firsts[row], firsts[row] + len(asked))
            targets += asked
            counts.append(len(asked))
        if tokens:
            slot = self._upload.slot()
            slot[:, : len(tokens)] = np.array((tokens, targets), np.int32)
            self._upload.send(self._columns, 2)
            listed = any(most for _, most, _ in plan.prompts)
            self._slices(len(tokens), listed=listed)
        return counts

    def _slices(self, total: int, *, listed: bool) -> None:
        scratch, place = self._forward.sampler.logprob_scratch, self._forward.place
        room = place.buffers.logits.shape[0]
        for begin in range(0, total, room):
            end = min(begin + room, total)
            numbers = self._numbers[: end - begin]
            logprobs(
                self._forward.logits_of(self._columns[0, begin:end]),
                numbers,
                self._columns[1, begin:end],
                numbers,
                self.entries[begin:end],
                listed=listed,
                scratch=scratch,
                with_pdl=place.pdl,
            )
