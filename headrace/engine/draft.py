"""Draft: one step while it is being planned. Flight: the step once planned, with who is in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.engine.request import Sequence
from headrace.engine.shares import Costs
from headrace.kv.cache import Grant
from headrace.messages import Grow, Join, Output, Pool, StepPlan

if TYPE_CHECKING:
    from headrace.engine.budget import Prediction
    from headrace.engine.recorder import StepNote


class Flight:
    """A plan and the sequences behind its columns; carried from launch to result.

    The first len(decoders) forward rows and draws belong to `decoders`, one each; forward row
    len(decoders) + i belongs to prefills[i], draw len(decoders) + j to drawers[j].
    """

    __slots__ = (
        "complete",
        "costs",
        "decoders",
        "drawers",
        "note",
        "plan",
        "prediction",
        "prefills",
        "read",
    )

    def __init__(
        self,
        plan: StepPlan,
        decoders: list[Sequence],
        prefills: list[Sequence],
        drawers: list[Sequence],
        read: list[Sequence],
    ) -> None:
        self.plan = plan
        self.decoders = decoders
        self.prefills = prefills
        self.drawers = drawers
        self.read = read  # nothing is drawn for them: they end when it has computed their prompts
        self.complete: list[Sequence] = []  # end with it, once their prompts' reports are passed on
        self.costs: Costs | None = None  # see `engine.shares.modelled`
        self.note: StepNote | None = None  # where somebody watches; see `engine.recorder`
        self.prediction: Prediction | None = None  # see `Budget`


class Draft:
    """Columns under construction. Decode rows go in first, then `chunk` by `chunk`."""

    __slots__ = (
        "_copies",
        "_counts",
        "_draw_from",
        "_draw_into",
        "_drawers",
        "_grows",
        "_ids",
        "_outputs",
        "_pools",
        "_prefills",
        "_prompts",
        "_read",
        "_unwritten",
        "decoders",
        "joins",
        "rows",
        "stalled",
        "starts",
    )

    def __init__(self) -> None:
        self.stalled = False  # a running sequence found no memory
        self.decoders: list[Sequence] = []
        self.rows: list[int] = []
        self.starts: list[int] = []
        self.joins: list[Join] = []
        self._prefills: list[Sequence] = []
        self._drawers: list[Sequence] = []
        self._read: list[Sequence] = []
        self._grows: list[Grow] = []
        self._copies: list[tuple[int, int]] = []
        self._counts: list[int] = []
        self._ids: list[list[int] | None] = []
        self._outputs: list[int] = []
        self._unwritten: list[int] = []
        self._draw_from: list[int] = []
        self._draw_into: list[int] = []
        self._prompts: list[tuple[int, int, int]] = []
        self._pools: list[tuple[int, Pool]] = []

    def join(self, sequence: Sequence) -> None:
        """The sequence takes its device row."""
        submit = sequence.request.submit
        sampling = submit.sampling
        self.joins.append(
            Join(
                sequence.row,
                sampling,
                sequence.choice,
                sequence.table.groups(),
                submit.adapter,
                sequence.prompt_tokens,
                sequence.tokens.copy() if sampling.needs_history else [],
                submit.record,
            )
        )

    def grow(self, row: int, grant: Grant) -> None:
        """The row's tables changed."""
        if grant.blocks:
            self._grows.append(Grow(row, 0, grant.first, grant.blocks))
        self._grows.extend(Grow(row, *changed) for changed in grant.more)
        self._copies.extend(grant.copies)

    def close_decodes(self) -> None:
        """Fill the columns that are the same for every decode row: one token, one draw each."""
        decodes = len(self.rows)
        self._counts = [1] * decodes
        self._ids = [None] * decodes
        self._outputs = [Output.SAMPLE] * decodes
        self._draw_from = list(range(decodes))
        self._draw_into = self.rows.copy()

    def chunk(self, sequence: Sequence, count: int, *, unwritten: bool, samples: bool) -> None:
        """`count` known tokens of `sequence` from its `planned` on."""
        start = sequence.planned
        output = Output.SAMPLE if samples and sequence.request.draws else Output.NONE
        if sequence.unscored:
            output = self._score(sequence, start + count, output)
        if sequence.pooling is not None:
            output = self._pool(sequence, complete=samples)
        if unwritten:
            self._unwritten.append(len(self.rows))
        self.rows.append(sequence.row)
        self.starts.append(start)
        self._counts.append(count)
        self._ids.append(sequence.tokens[start : start + count])
        self._outputs.append(output)
        self._prefills.append(sequence)

    def _score(self, sequence: Sequence, end: int, output: int) -> int:
        """The row added next reports what its prompt tokens are given, if that is news."""
        prompt = sequence.request.submit.prompt
        if min(end, len(prompt) - 1) <= sequence.scored:
            return output  # computed again after a preemption
        after = prompt[end] if end < len(prompt) else -1
        top = sequence.request.submit.prompt_logprobs
        self._prompts.append((len(self.rows), top, after))
        return Output.PROMPT_LOGPROBS

    def _pool(self, sequence: Sequence, *, complete: bool) -> int:
        """What the row added next yields of its hidden states: of all tokens, or of the last."""
        if sequence.pooling == "mean":
            self._pools.append((len(self.rows), "sum"))
        elif complete:
            assert sequence.pooling is not None, "a sequence that yields tokens"
            self._pools.append((len(self.rows), sequence.pooling))
        else:
            return Output.NONE
        return Output.POOL

    def draw(self, sequences: list[Sequence]) -> None:
        """One draw for each that yields tokens, from the forward row added last."""
        for sequence in sequences:
            if not sequence.request.draws:
                if sequence.pooling is None:
                    self._read.append(sequence)
                continue
            self._draw_from.append(len(self.rows) - 1)
            self._draw_into.append(sequence.row)
            self._drawers.append(sequence)

    def close(self, step: int, leaves: list[int]) -> Flight:
        """The finished step."""
        plan = StepPlan(
            step,
            leaves,
            self.joins,
            self._grows,
            [self._copies],
            self.rows,
            self.starts,
            self._counts,
            self._ids,
            self._outputs,
            self._unwritten,
            self._draw_from,
            self._draw_into,
            prompts=self._prompts,
            pools=self._pools,
        )
        return Flight(plan, self.decoders, self._prefills, self._drawers, self._read)
