"""Recorder: what steps do, told to whoever watches; with nobody watching it costs one check a step.

Two kinds of watchers. A `Look` keeps the newest steps for some seconds, for the fleet view. A
request with `Submit.record` is told of every step that holds a row of it: the step's composition,
what became of its blocks (of several KV groups those of the first), and what its draws were made
of. All of it are values that the step had; nothing is computed again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from headrace.engine.draft import Flight
from headrace.engine.outbox import Outbox
from headrace.engine.request import NO_ROW, Request, Sequence
from headrace.engine.stats import EngineStats
from headrace.kv.cache import KVCache
from headrace.messages import (
    WATCHED_S,
    BlockEvent,
    BlockNote,
    DrawNote,
    Look,
    Recorded,
    StepResult,
    StepView,
    View,
)

LAST_STEPS = 32  # of a View
MOST_STEPS = 4096  # told of one request

_encode = msgspec.msgpack.Encoder().encode


class StepNote:
    """What a Flight of a step that somebody watches carries beside its plan. 0 = not yet."""

    __slots__ = ("device_s", "kv_used", "landed_s", "launched_s", "waiting")

    def __init__(self, launched_s: float, waiting: int, kv_used: int) -> None:
        self.launched_s, self.waiting, self.kv_used = launched_s, waiting, kv_used
        self.landed_s = self.device_s = 0.0


class _Record:
    """A request that is recorded."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.tables: dict[int, list[int]] = {}  # choice -> its table at the newest plan
        self.freed: dict[int, int] = {}  # choice -> blocks at its start that it gave back
        self.notes: list[BlockNote] = []  # not told yet
        self.steps = 0


class Recorder:
    """Loop thread only. `active`: somebody watches; else nothing here need be called."""

    def __init__(self, kv: KVCache, outbox: Outbox) -> None:
        self.active = False
        self._kv, self._outbox = kv, outbox
        self._until_s = 0.0  # steps are kept until then
        self._ring: deque[Flight] = deque(maxlen=LAST_STEPS)
        self._records: dict[Request, _Record] = {}

    def look(self, owner: int, look: Look, stats: EngineStats, now: float) -> None:
        """Answer a `Look`."""
        self._until_s = now + WATCHED_S
        self._activate()
        steps = [step_view(flight) for flight in self._ring if flight.note is not None]
        out = self._outbox.of(owner)
        states = out.view.states if out.view is not None else b""  # asked for in the same turn
        if look.states:
            states = self._kv.states()
        out.view = view_of(stats, now, self._kv.block_size, self._kv.cached_blocks, steps, states)

    def open(self, request: Request) -> None:
        """A request with `Submit.record`."""
        self._records[request] = _Record(request)
        self._activate()

    def _activate(self) -> None:
        if not self.active:
            self.active = True
            self._kv.evicted = []

    def idle(self, now: float) -> None:
        """The engine has nothing to do: nobody watches any more, for all that is known."""
        if self.active and not self._records and now > self._until_s:
            self._rest()

    def _rest(self) -> None:
        self.active = False
        self._kv.evicted = None
        self._ring.clear()

    def launched(self, flight: Flight, waiting: int, now: float) -> None:
        """A step was planned. Call before it is launched."""
        flight.note = StepNote(now, waiting, self._kv.used_blocks)
        if now <= self._until_s:
            self._ring.append(flight)
        elif not self._records:
            self._rest()
            return
        evicted = frozenset(self._kv.evicted or ())
        self._kv.evicted = []
        for record in self._records.values():
            for sequence in record.request.sequences:
                self._follow(record, sequence, flight, evicted)

    def _follow(
        self, record: _Record, sequence: Sequence, flight: Flight, evicted: frozenset[int]
    ) -> None:
        """What this plan did to the blocks of one choice: its table before and now."""
        choice, step = sequence.choice, flight.plan.step
        before = record.tables.get(choice)

        def note(kind: BlockEvent, first: int, blocks: Iterable[int]) -> None:
            if blocks := list(blocks):
                record.notes.append(BlockNote(step, choice, kind, first, blocks))

        if sequence.row == NO_ROW:
            if before is not None and not sequence.ended:
                note("preempted", -1, before[record.freed.pop(choice) :])
                del record.tables[choice]
            return
        now, freed = sequence.table.blocks, sequence.table.freed
        if before is None:
            skipped, shared = freed, sequence.cached // self._kv.block_size
            if choice and sequence.generated == 0:  # forked in this plan, over the whole table
                shared = len(now)
            before = now[:shared]
            note("shared", skipped, now[skipped:shared])
            record.freed[choice] = skipped
        copied = {target for _, target in flight.plan.copies[0]}
        for i in range(len(before)):
            if before[i] != now[i]:
                note("copied" if now[i] in copied else "allocated", i, [now[i]])
        note("allocated", len(before), now[len(before) :])
        if evicted:
            known = set(before)
            note("evicted", -1, (b for b in now[freed:] if b in evicted and b not in known))
        note("freed", record.freed[choice], now[record.freed[choice] : freed])
        record.tables[choice], record.freed[choice] = now.copy(), freed

    def landed(self, flight: Flight, result: StepResult, now: float) -> None:
        """A step has finished. Call before its tokens are applied."""
        note = flight.note
        if note is None:  # launched before somebody watched
            return
        note.landed_s, note.device_s = now, result.busy_s
        if not self._records:
            return
        inside = {s.request for part in (flight.decoders, flight.prefills) for s in part}
        for request, record in self._records.items():
            if request in inside:
                self._tell(record, flight, result)

    def _tell(self, record: _Record, flight: Flight, result: StepResult) -> None:
        record.steps += 1
        if record.steps > MOST_STEPS:
            return
        request, decodes, draws = record.request, len(flight.decoders), []
        for tap in result.taps:
            late = tap.draw >= decodes
            sequence = (flight.drawers if late else flight.decoders)[tap.draw - late * decodes]
            if sequence.request is not request or sequence.ended:
                continue
            source = flight.plan.draw_from[tap.draw]
            position = flight.plan.starts[source] + flight.plan.counts[source]
            if position < len(sequence.tokens):
                continue  # its grammar had forced this token
            index, token = position - sequence.prompt_tokens, result.tokens[tap.draw]
            draws.append(DrawNote(flight.plan.step, sequence.choice, index, token, tap))
        steps, cut = [step_view(flight)], record.steps == MOST_STEPS
        self._send(record, Recorded(request.arrival, steps, record.notes, draws, cut))

    def _send(self, record: _Record, told: Recorded) -> None:
        record.notes = []
        submit = record.request.submit
        raw = msgspec.Raw(_encode(told))
        self._outbox.of(record.request.owner).recorded.append((submit.handle, raw))

    def ended(self, sequence: Sequence, step: int) -> None:
        """A choice of a recorded request ends; call while it still holds its blocks."""
        record, choice, table = self._records.get(sequence.request), sequence.choice, sequence.table
        if record is None or record.tables.pop(choice, None) is None:
            return
        first = record.freed.pop(choice)
        if first < table.freed:  # out of the window since the newest plan
            gone = table.blocks[first : table.freed]
            record.notes.append(BlockNote(step, choice, "freed", first, gone))
        record.notes.append(BlockNote(step, choice, "freed", -1, table.blocks[table.freed :]))

    def closed(self, request: Request) -> None:
        """A recorded request is about to get its Done."""
        record = self._records.pop(request, None)
        if record is not None and record.notes:
            self._send(record, Recorded(request.arrival, [], record.notes))


def step_view(flight: Flight) -> StepView:
    """A step that carries a note, as it is told."""
    note, plan, decodes = flight.note, flight.plan, len(flight.decoders)
    assert note is not None, "a step that nobody watched"
    draws = [1] * decodes + [0] * len(flight.prefills)
    for source in plan.draw_from[decodes:]:
        draws[source] += 1
    rows = [s.request.arrival for part in (flight.decoders, flight.prefills) for s in part]
    return StepView(
        plan.step,
        note.launched_s,
        note.landed_s,
        note.device_s,
        note.waiting,
        note.kv_used,
        decodes,
        rows,
        plan.starts,
        plan.counts,
        draws,
    )


def view_of(
    stats: EngineStats,
    now: float,
    block_size: int,
    cached: int = 0,
    steps: list[StepView] | None = None,
    states: bytes = b"",
) -> View:
    """The answer to a `Look`. cached: free blocks that a prefix can hit."""
    return View(
        now,
        stats.running,
        stats.waiting,
        stats.kv_blocks,
        stats.kv_used,
        cached,
        block_size,
        stats.steps,
        stats.generation_tokens,
        stats.prompt_tokens - stats.cached_tokens + stats.recomputed_tokens,
        steps or [],
        states,
    )
