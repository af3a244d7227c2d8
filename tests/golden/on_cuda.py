"""Logits of every position of prompts, from a CudaRunner: on a card, or in Triton's interpreter."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from headrace.messages import Join, Output
from tests.golden.stepping import GREEDY, plan, run

OVERWRITTEN = 640.0


class OnCuda:
    """Sequence i takes row i and the blocks from i * width on of each KV group. What no later
    position of a sequence reads is overwritten, as if others had got it."""

    def __init__(self, runner: Any, width: int) -> None:
        self._runner = runner
        self._forward = runner._forward
        self._step = 0
        self._taken: list[int] = []
        windows = runner.capacity.windows
        sequences = runner.capacity.kv_blocks[0] // len(windows) // width
        self._tables = torch.arange(len(windows) * sequences * width)
        self._tables = self._tables.view(len(windows), sequences, width)
        self.ends: list[int] | None = None  # of prefixes that are to be hit later

    @property
    def runner(self) -> Any:
        """With all of its rows free."""
        if self._taken:
            self._step += 1
            run(self._runner, plan(self._step, leaves=self._taken))
            self._taken = []
        return self._runner

    def logits(
        self, prompts: list[list[int]], chunk: int, starts: list[int] | None = None
    ) -> list[Tensor]:
        """Of every position from `starts` on, all prompts side by side, `chunk` tokens a step."""
        at = starts or [0] * len(prompts)
        found: list[list[Tensor]] = [[] for _ in prompts]
        columns: dict[str, Any] = {
            "leaves": self._taken,
            "joins": [
                Join(i, GREEDY, 0, self._tables[:, i].tolist(), prompt_tokens=len(prompt))
                for i, prompt in enumerate(prompts)
            ],
        }
        self._taken = list(range(len(prompts)))
        while left := [i for i, prompt in enumerate(prompts) if at[i] < len(prompt)]:
            part_of = {i: prompts[i][at[i] : at[i] + chunk] for i in left}
            rows = sorted(left, key=lambda i: len(part_of[i]) > 1)  # single tokens come first
            parts = [part_of[i] for i in rows]
            columns |= {
                "rows": rows,
                "starts": [at[i] for i in rows],
                "counts": [len(part) for part in parts],
                "ids": parts,
                "outputs": [Output.PROMPT_LOGPROBS] * len(parts),
                "prompts": [(j, 0, -1) for j in range(len(parts))],
            }
            for i, piece in zip(rows, self._run(columns), strict=True):
                found[i].append(piece)
                at[i] += piece.shape[0]
                self._pass_windows(i, at[i])
            columns = {}
        return [torch.cat(pieces) for pieces in found]

    def _run(self, columns: dict[str, Any]) -> list[Tensor]:
        self._step += 1
        ticket = self._runner.launch(plan(self._step, **columns))
        forward, counts = self._forward, columns["counts"]
        room = forward.place.buffers.logits.shape[0]
        pieces = []
        with torch.inference_mode(), forward.on_stream():
            every = torch.arange(sum(counts), dtype=torch.int32, device=forward.device)
            for first in range(0, len(every), room):
                pieces.append(forward.logits_of(every[first : first + room]).float().cpu().clone())
        ticket.finish()
        ticket.result()
        found, ends = torch.cat(pieces), accumulate(counts)
        return [found[end - count : end] for count, end in zip(counts, ends, strict=True)]

    def _pass_windows(self, sequence: int, computed: int) -> None:
        """Call when no step is in flight."""
        store, capacity = self._forward.store, self._runner.capacity
        if self.ends is not None:
            computed = min(computed, self.ends[sequence])
        with torch.inference_mode(), self._forward.on_stream():
            for group, window in enumerate(capacity.windows):
                gone = max(0, computed + 1 - window) // capacity.block_size if window else 0
                for cache in [*store.k, *store.v] if gone else []:
                    cache[self._tables[group, sequence, :gone].to(cache.device)] = OVERWRITTEN

    def close(self) -> None:
        self._runner.close()
