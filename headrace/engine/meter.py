"""Meter: the device time of every step, on the accounts of the requests that it worked for.

A step costs the meter a few operations, however many rows decode: what one decode row owes for
itself and for each token that it reads is added to two running sums, and a sequence is charged the
difference between when it began to decode and when it left, ended or was left out.

A request learns what it owes with its Done, and by then a step that holds a row of it may be in
flight: the host learns of an end one step late. That row is prepaid: it is charged what it should
cost at the rate of the step before. When the step has landed, the difference is spread over the
rows of the next one. So nothing vanishes: at any moment, exactly,

    busy == billed - prepaid + carry + (what live requests and late rows owe)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from headrace.engine.draft import Flight
from headrace.engine.protocol import StepWork
from headrace.engine.request import Request, Sequence
from headrace.engine.shares import FS, Costs, Shares, modelled, split


class Airborne(Protocol):
    """A step between its launch and its result."""

    @property
    def flight(self) -> Flight: ...


class _Mark(NamedTuple):
    """The running sums when a sequence was last charged; in step k it reads first + k tokens."""

    rows_fs: int
    reads_fs: int
    weighted_fs: int
    first: int


class _Late(NamedTuple):
    """A request that ended while a step held a row of it."""

    newest: int  # that step
    request: Request
    charged_fs: int  # to its account, when it ended
    ahead_fs: int  # prepaid


class Meter:
    """Charges steps, settles requests; amounts are femtoseconds of device time. Loop thread only.

    in_air: steps launched and not landed, kept by the loop.
    """

    def __init__(self, work: StepWork, in_air: Iterable[Airborne]) -> None:
        self._work, self._in_air = work, in_air
        self._rate = 0.0  # femtoseconds of the step charged last, a second that the model has
        self._late: list[_Late] = []
        self._decoders: list[Sequence] = []  # of the step charged last
        self._marks: dict[Sequence, _Mark] = {}  # of these
        self._firsts = 0  # sum of their `first`
        self._steps = 0  # k: charged so far
        self._rows_fs = self._reads_fs = self._weighted_fs = 0  # sums of row, read and read * k
        self.busy_fs = 0
        self.billed_fs = 0
        self.unclaimed_fs = 0  # of that, to owners that are gone: nobody wrote it down
        self.prepaid_fs = 0  # of that, for steps in flight
        self.carry_fs = 0  # to be spread over the next step

    def charge(self, flight: Flight, busy_s: float) -> None:
        """A step has landed that took the device `busy_s` seconds."""
        costs, busy_fs = self._costs(flight), round(busy_s * FS)
        self.busy_fs += busy_fs
        self._rate = busy_fs / costs.total_s
        amount_fs = max(0, busy_fs + self.carry_fs)
        self.carry_fs += busy_fs - amount_fs
        decoders, prefills = flight.decoders, flight.prefills
        shares = split(costs, len(decoders), amount_fs)
        if decoders != self._decoders:
            self._follow(flight)
        reads = self._firsts + len(decoders) * self._steps
        assert costs.reads == reads, "a decoding sequence advances by one token a step"
        self._rows_fs += shares.row_fs
        self._reads_fs += shares.read_fs
        self._weighted_fs += shares.read_fs * self._steps
        self._steps += 1
        if prefills:
            self._charge_chunks(flight, shares)
        (decoders or prefills)[0].request.compute_fs += shares.rest_fs
        if self._late:
            self._true_up(flight.plan.step)

    def settle(self, request: Request) -> int:
        """What a request that ends now owes."""
        self._read(request)
        charged_fs, ahead_fs, newest = request.compute_fs, 0, 0
        for entry in self._in_air if request.ahead else ():
            ahead_fs += self._ahead(entry.flight, request)
            newest = entry.flight.plan.step
        if newest:
            self._late.append(_Late(newest, request, charged_fs, ahead_fs))
            self.prepaid_fs += ahead_fs
        self.billed_fs += charged_fs + ahead_fs
        return charged_fs + ahead_fs

    def _follow(self, flight: Flight) -> None:
        """Other sequences decode than in the step before: charge who left, mark who joined."""
        decoders, marks = flight.decoders, self._marks
        for sequence in marks.keys() - set(decoders):
            self._charge(sequence)
            self._firsts -= marks.pop(sequence).first
        for sequence, start in zip(decoders, flight.plan.starts, strict=False):
            if sequence not in marks:
                mark = self._mark(start + 1 - self._steps)
                marks[sequence] = mark
                self._firsts += mark.first
        self._decoders = decoders

    def _mark(self, first: int) -> _Mark:
        return _Mark(self._rows_fs, self._reads_fs, self._weighted_fs, first)

    def _charge(self, sequence: Sequence) -> None:
        """Bring the account of one that decodes up to date."""
        rows_fs, reads_fs, weighted_fs, first = self._marks[sequence]
        sequence.request.compute_fs += (
            self._rows_fs
            - rows_fs
            + first * (self._reads_fs - reads_fs)
            + self._weighted_fs
            - weighted_fs
        )
        self._marks[sequence] = self._mark(first)

    def _read(self, request: Request) -> None:
        """Bring the account of a request up to date."""
        for sequence in request.sequences:
            if sequence in self._marks:
                self._charge(sequence)

    def _charge_chunks(self, flight: Flight, shares: Shares) -> None:
        plan, decodes = flight.plan, len(flight.decoders)
        for i, sequence in enumerate(flight.prefills):
            request, chunk_fs = sequence.request, shares.chunks_fs[i]
            request.compute_fs += chunk_fs
            start, count = plan.starts[decodes + i], plan.counts[decodes + i]
            if start < sequence.peak:
                known = min(sequence.peak, start + count) - start
                request.recompute_fs += chunk_fs * known // count

    def _true_up(self, step: int) -> None:
        """Requests whose last step has landed: what they cost beyond what they prepaid."""
        for late in self._late:
            if late.newest <= step:
                self._read(late.request)
                self.carry_fs += late.request.compute_fs - late.charged_fs - late.ahead_fs
                self.prepaid_fs -= late.ahead_fs
        self._late = [late for late in self._late if late.newest > step]

    def _ahead(self, flight: Flight, request: Request) -> int:
        """What the rows of `request` in a step in flight should cost."""
        costs = self._costs(flight)
        decodes = zip(flight.decoders, flight.plan.starts, strict=False)
        chunks = zip(flight.prefills, costs.chunks_s, strict=True)
        contexts = [start + 1 for one, start in decodes if one.request is request]
        seconds = len(contexts) * costs.row_s + sum(contexts) * costs.read_s
        seconds += sum(chunk_s for one, chunk_s in chunks if one.request is request)
        return int(seconds * self._rate)

    def _costs(self, flight: Flight) -> Costs:
        if flight.costs is None:
            flight.costs = modelled(self._work, flight.plan, len(flight.decoders))
        return flight.costs
