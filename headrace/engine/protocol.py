"""The one seam between the engine (no torch) and whatever computes a step.

Implementations: `backends.fake.FakeRunner` (no torch, checks its own KV) and `runner.TorchRunner`.
`tests/backend/` runs one suite against each.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from headrace.messages import StepPlan, StepResult


class Capacity(msgspec.Struct, frozen=True):
    """What a loaded runner offers; facts, not settings."""

    kv_blocks: list[int]  # [kv group] blocks in the pool
    block_size: int
    max_rows: int  # device rows: sequences that can run at once
    max_model_len: int  # tokens of one sequence, prompt and output
    vocab_size: int  # draws are always < vocab_size (padding of the output layer is masked)


class Ticket(Protocol):
    """A step in flight."""

    def finish(self, masks: None = None) -> None:
        """Enqueue the sampler. Call once, after `launch`; grammar masks will come here."""

    def result(self) -> StepResult:
        """Wait for the step and return its tokens. Call once, after `finish`.

        Raises whatever broke the whole step; a fault of one draw is in `StepResult.failed`.
        """


class Runner(Protocol):
    """Runs plans in the order of their launches; at most two may be in flight."""

    @property
    def capacity(self) -> Capacity: ...

    def launch(self, plan: StepPlan) -> Ticket:
        """Start the forward pass and return at once where the device allows it.

        Changes: the device tables and KV blocks that the plan names, and nothing else.
        Needs: the plan's blocks are not written by any other live sequence.
        Raises whatever broke the whole step. The engine then ends every sequence that owns a row,
        and the next plan names all their rows in `leaves`, also rows that are already free.
        """

    def close(self) -> None:
        """Free the device. No ticket may be open."""
