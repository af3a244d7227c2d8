"""Scheduler: which sequences get how many tokens in the next step, and who must make room.

One plan, in order: a better class takes the place of a worse one; every running sequence past its
prompt gets one token; what is left of the budget (`engine.budget`) goes to prompts, those that run
and those that are admitted, best key first. Nothing is admitted past a sequence that does not fit.
One that fits, but whose prompt's beginning a step computes for another (`_has_twin`), is set aside
for this plan: others are admitted past it, as long as its rows and blocks stay free (`Kept`).
Tokens that a grammar forced are like those of a prompt that runs, but for their memory.
With `prompts_first` a step that waiting prompts fill is theirs alone: sequences that decode then
all decode together afterwards, in fewer and fuller steps. For who waits for whole answers.

Memory. An admission reserves all blocks of the tokens it brings, so only decoding asks for more.
Layers with a window are the exception: they get room chunk by chunk, as far as memory goes, and
give it back as the window passes; an admission claims what they will hold in the end, and those
that come after it leave that free.
When there is none, the worst running sequence is preempted: it loses its KV and its row, goes back
to its place in the queue and is computed again later. Whatever was accepted fits the pool alone and
the best running sequence can always take memory from all others, so the engine cannot lock up.

Against thrashing, an admission leaves `_spare` blocks free: a watermark, and room for the next
`headroom_tokens` of every running sequence, as far as it may still grow and up to a quarter of the
pool; or, after preemptions, a share (`_pressure`, halved every ~140 steps) of all blocks that
running sequences may still ask for, if that is more.
"""

from __future__ import annotations

from bisect import insort
from operator import attrgetter
from typing import NamedTuple

from headrace.config import Settings
from headrace.engine.budget import Budget
from headrace.engine.draft import Draft, Flight
from headrace.engine.policy import may_preempt, promoted, victim
from headrace.engine.protocol import Capacity
from headrace.engine.queue import WaitQueue
from headrace.engine.request import NO_ROW, Request, Sequence
from headrace.engine.stats import Tally
from headrace.engine.underway import Underway
from headrace.kv.cache import KVCache

TWIN_TOKENS, TWIN_SHARE = 128, 4  # and at least one part in so many of a prompt: `_has_twin`
MOST_ASIDE = 32  # sequences: a plan looks at no more of those that wait for a twin
ASIDE_STEPS = 8  # tokens that others may draw meanwhile
WATERMARK = 0.01  # of all blocks; at least one block
HEADROOM_TOKENS = 128
HEADROOM_SHARE = 4  # one part in this many of the pool is the most
PRESSURE_STEP = 0.25  # what a preemption adds to the pressure, at most 1 in all
PRESSURE_DECAY = 0.995  # per step
PRESSURE_OFF = 0.01
_KEY = attrgetter("key")


class Kept(NamedTuple):
    """What a plan leaves for the sequences that it set aside, so that they can be admitted as soon
    as their prompt's beginning is computed. growth_blocks: what they may ask for later."""

    sequences: int = 0
    rows: int = 0
    blocks: int = 0
    growth_blocks: int = 0


class Scheduler:
    """Owns the queue, the running list and the device rows. Loop thread only."""

    def __init__(
        self, settings: Settings, kv: KVCache, capacity: Capacity, budget: Budget, tally: Tally
    ) -> None:
        self.kv = kv
        self.budget = budget
        self.rows = min(settings.max_num_seqs, capacity.max_rows)
        self.queue = WaitQueue()
        self._underway = Underway(kv)
        self._kept = Kept()
        self.running: list[Sequence] = []  # by key; those that left have row NO_ROW until swept
        self.resident_requests = 0  # requests with at least one row
        self.launched = 0  # number of the newest step
        self.headroom_tokens = HEADROOM_TOKENS
        self.prompts_first = False
        self.twin_tokens = TWIN_TOKENS
        self.growth_blocks = 0  # what all running sequences may still ask for
        self.claimed_blocks = 0  # what layers with a window may still take for known tokens
        self.static = settings.scheduling_policy == "static"
        self._shares = kv.prefix_caching and not self.static  # one waits for what another computes
        self._max_tokens = settings.max_num_batched_tokens
        self._ages = settings.scheduling_policy == "priority"
        self._max_wait_s = settings.max_wait_s
        self._tally = tally
        self._watermark = max(1, int(kv.size * WATERMARK))
        self._pressure = 0.0  # 0: admit on the watermark; 1: admit only what can run to its end
        self._free_rows = list(range(self.rows - 1, -1, -1))
        self._leaves: list[int] = []
        self._left = False  # `running` holds sequences that left
        self._aged_last = False  # the last admission was one that had waited too long

    @property
    def free_rows(self) -> int:
        """Rows that an admission could take now."""
        return 0 if self.static and self.resident_requests else len(self._free_rows)

    @property
    def has_work(self) -> bool:
        """Something waits or runs."""
        return bool(self.queue) or any(s.row != NO_ROW for s in self.running)

    def add(self, sequence: Sequence, now: float) -> None:
        """A new sequence waits."""
        self.queue.push(sequence, now)

    def drop(self, sequence: Sequence) -> None:
        """The sequence ended, wherever it is. Its blocks go through the fence."""
        if sequence.queued is not None:
            self.queue.remove(sequence)
        if sequence.row != NO_ROW:
            self._vacate(sequence)
            self._left = True

    def schedule(self, now: float) -> Flight | None:
        """The next step, or None when there is nothing to compute at this moment."""
        if self._left:
            self.running = [s for s in self.running if s.row != NO_ROW]
            self._left = False
        if not self.running and not self.queue:
            return None
        self._underway.land()
        self._pressure *= PRESSURE_DECAY if self._pressure > PRESSURE_OFF else 0.0
        self._make_way(now)
        draft = Draft()
        if self.prompts_first and self._prompts_fill(now):
            prefills = [s for s in self.running if s.planned < s.base <= s.room]
        else:
            prefills = self._decode(draft, now)
        draft.close_decodes()
        left = sum(s.base - s.planned for s in prefills)
        self.budget.begin(
            draft.starts,
            stalled=draft.stalled,
            prompts=len(prefills) + len(self.queue),
            tokens=left + self.queue.tokens,
        )
        self._prefill(draft, prefills, now)
        if not draft.rows:
            assert not draft.joins, "admitted without a token to compute"
            return None
        self.launched += 1
        self.kv.copying(self.launched)
        leaves, self._leaves = self._leaves, []
        flight = draft.close(self.launched, leaves)
        flight.prediction = self.budget.prediction
        return flight

    def _prompts_fill(self, now: float) -> bool:
        """Whether the next step can be filled with prompts that wait, by rows and memory.

        Layers with a window give their memory back as they go on, so there nobody is held up.
        """
        head, count = self._head(now), min(len(self.queue), self.free_rows)
        if head is None or not count or not self.running or self.kv.windows != (0,):
            return False
        if self.queue.tokens * count // len(self.queue) < self._max_tokens:
            return False
        left = self.kv.free_blocks - self.claimed_blocks - self._spare(head) - count
        if left < self.kv.blocks_for(self._max_tokens):
            return False
        return self._may_place(head) and not self._has_twin(head)

    # ------------------------------------------------------------ decode

    def _decode(self, draft: Draft, now: float) -> list[Sequence]:
        """One token for each running sequence past its prompt; returns those that are not."""
        prefills: list[Sequence] = []
        sequences, rows, starts = draft.decoders, draft.rows, draft.starts
        for sequence in self.running:  # `_grow` may take victims off its end, never before here
            start = sequence.planned
            if start < sequence.base:
                if sequence.base <= sequence.room or self._grow(sequence, draft, now):
                    prefills.append(sequence)
                continue
            if start >= sequence.room and not self._grow(sequence, draft, now):
                continue
            sequence.planned = start + 1
            sequences.append(sequence)
            rows.append(sequence.row)
            starts.append(start)
        return prefills

    def _grow(self, sequence: Sequence, draft: Draft, now: float) -> bool:
        """Make its next position, or all it knows, writable; by preemption if need be."""
        if sequence.drained:
            return False
        start = sequence.planned
        upto = max(start + 1, sequence.base)
        kv, length = self.kv, sequence.table.length
        while (grant := kv.reserve(sequence.table, upto, start, start + 1)) is None:
            worst = victim(self.running)
            # Blocks behind the fence come back when the step in flight ends, and so do those of a
            # sequence whose last draw is in flight. The worst one waits: it takes nobody's place.
            if kv.limbo_blocks or worst is sequence or worst.drained:
                draft.stalled = True
                return False
            self._preempt(worst, now)
            self._pressure = min(1.0, self._pressure + PRESSURE_STEP)
        draft.grow(sequence.row, grant)
        self.growth_blocks -= kv.most_held(sequence.table.length) - kv.most_held(length)
        self._set_room(sequence)
        return True

    def _set_room(self, sequence: Sequence) -> None:
        sequence.room = min(self.kv.writable(sequence.table), sequence.limit - 1)

    # ------------------------------------------------------------ prefill and admission

    def _prefill(self, draft: Draft, prefills: list[Sequence], now: float) -> None:
        """Spend the rest of the budget on prompts, best key first."""
        closed = draft.stalled or (self.static and bool(self.running))
        if self.static and not closed:
            while (head := self.queue.first()) is not None and self._may_place(head):
                self._place(head, draft, now)
                prefills.append(head)
            closed = True
        prefills.reverse()  # so that pop() takes the best
        while self.budget.open:
            head = None if closed else self._head(now)
            if head is None or (prefills and prefills[-1].key < head.key):
                if not prefills:
                    break
                self._chunk(prefills.pop(), draft)
            elif not self._may_place(head):
                closed = True
            elif self._has_twin(head):
                self._set_aside(head)
                closed = self._kept.sequences == MOST_ASIDE
            else:
                self._place(head, draft, now)
                self._chunk(head, draft)
        self.queue.restore()
        self._kept = Kept()

    def _chunk(self, sequence: Sequence, draft: Draft) -> None:
        """As much of what the sequence brought as budget and memory of layers with a window allow;
        draws when it is complete."""
        kv, start = self.kv, sequence.planned
        # Whoever runs may need a block before these layers give any back.
        upto = min(sequence.base, kv.reach(sequence.table, len(self.running)))
        count = self.budget.grant(start, upto - start)
        if not count:
            return  # the budget is closed: it goes on in the next step
        if start + count > kv.writable(sequence.table):
            grant = kv.reserve(sequence.table, start + count, start)
            assert grant is not None, "memory that was in reach is gone"
            draft.grow(sequence.row, grant)
        complete = start + count == sequence.base
        unwritten = sequence.planned < sequence.cached
        draft.chunk(sequence, count, unwritten=unwritten, samples=complete)
        if self._shares:
            self._underway.note(self.launched + 1, sequence, count)
        sequence.planned += count
        self._claim(sequence, 0 if complete else kv.claim(sequence.table, sequence.base))
        if complete:
            if sequence.request.unforked:
                draft.draw(self._fork(sequence, draft))
            else:
                self._set_room(sequence)
                draft.draw([sequence])

    def _fork(self, parent: Sequence, draft: Draft) -> list[Sequence]:
        """All choices of a request, each with a row, over shared blocks."""
        request = parent.request
        while request.unforked:
            child = request.fork(self.kv.fork(parent.table))
            child.row = parent.spare_rows.pop()
            draft.join(child)
            request.resident += 1
            self.growth_blocks += self._growth(child)
            insort(self.running, child, key=_KEY)
        for sequence in request.sequences:
            sequence.room = sequence.planned  # the block it writes next may be shared
        return list(request.sequences)

    def _head(self, now: float) -> Sequence | None:
        """Who is admitted next: the best, or the longest waiting one if that is too long.

        Only every second admission goes by age: classes keep a meaning when all have aged.
        """
        if self._ages and not self._aged_last:
            oldest = self.queue.oldest()
            if oldest is not None and now - oldest[1] >= self._max_wait_s:
                return oldest[0]
        return self.queue.first()

    def _may_place(self, sequence: Sequence) -> bool:
        """Rows and memory allow it now; it is not one that was preempted in this very plan, whose
        last draw is in flight."""
        settled = sequence.settled <= self.kv.finished_step
        return settled and self._fits(sequence, self.kv.free_blocks)

    def _fits(self, sequence: Sequence, free_blocks: int) -> bool:
        kept, rows = self._kept, sequence.request.rows
        if len(self._free_rows) - kept.rows < rows:
            return False
        left = free_blocks - self.claimed_blocks - self._spare(sequence) - kept.blocks
        if kept.sequences:  # those it passes are to fit some steps later
            left -= (len(self.running) + rows) * self._most(ASIDE_STEPS) + self._forks(sequence)
        return self._need(sequence) <= left

    def _most(self, tokens: int) -> int:
        """Blocks for so many tokens of a sequence."""
        return self.kv.most_held(self.kv.blocks_for(tokens))

    def _forks(self, sequence: Sequence) -> int:
        """Blocks by which `_spare` grows when the sequence is forked."""
        return (sequence.request.rows - 1) * self._most(self.headroom_tokens)

    def _has_twin(self, sequence: Sequence) -> bool:
        """A step in flight, or this one, computes a good part of its prompt for somebody ahead of
        it: one step later it finds that in the cache. Nobody waits for long so: who is ahead is
        computed first anyway."""
        if not self._shares or sequence.whole:
            return False
        return self._underway.has_ahead(sequence, self.twin_tokens, TWIN_SHARE)

    def _set_aside(self, sequence: Sequence) -> None:
        """Look at those behind it, and leave it what it needs."""
        sequences, rows, blocks, growth_blocks = self._kept
        self._kept = Kept(
            sequences + 1,
            rows + sequence.request.rows,
            blocks + self._need(sequence) + self._forks(sequence),
            growth_blocks + self._growth(sequence),
        )
        self.queue.set_aside(sequence)

    def _need(self, sequence: Sequence) -> int:
        """Free blocks that its admission takes and claims."""
        cached = () if sequence.whole else sequence.tokens
        return self.kv.probe(sequence.table, cached, len(sequence.tokens), stepwise=True)

    def _spare(self, candidate: Sequence) -> int:
        """Blocks that an admission leaves free; none when it would run alone."""
        if not self.running:
            return 0
        growth = self.growth_blocks + self._kept.growth_blocks + self._growth(candidate)
        soon = (len(self.running) + self._kept.sequences + 1) * self._most(self.headroom_tokens)
        headroom = min(growth, soon, self.kv.size // HEADROOM_SHARE)
        return self._watermark + max(headroom, int(self._pressure * growth))

    def _growth(self, sequence: Sequence) -> int:
        """Blocks that the sequence may still ask for."""
        kv = self.kv
        length = sequence.table.length or kv.blocks_for(len(sequence.tokens))
        return kv.most_held(kv.blocks_for(sequence.limit - 1)) - kv.most_held(length)

    def _claim(self, sequence: Sequence, blocks: int) -> None:
        self.claimed_blocks += blocks - sequence.claim
        sequence.claim = blocks

    def _place(self, sequence: Sequence, draft: Draft, now: float) -> None:
        """Admit the sequence: it leaves the queue and holds its blocks. Needs: `_may_place`."""
        request = sequence.request
        self._aged_last = sequence is not self.queue.first()
        self.queue.remove(sequence)
        if self._aged_last:
            sequence.key = promoted(sequence.key)
        known = len(sequence.tokens)
        sequence.cached = 0 if sequence.whole else self.kv.match(sequence.table, sequence.tokens)
        grant = self.kv.reserve(sequence.table, known, sequence.cached, sequence.cached + 1)
        assert grant is not None, "blocks that were probed are gone"
        self._claim(sequence, self.kv.claim(sequence.table, known))
        sequence.base = known
        sequence.room = min(known, self.kv.writable(sequence.table))
        sequence.planned = sequence.computed = min(sequence.cached, known - 1)
        sequence.row, *sequence.spare_rows = (self._free_rows.pop() for _ in range(request.rows))
        draft.join(sequence)
        insort(self.running, sequence, key=_KEY)
        self.growth_blocks += self._growth(sequence)
        self._tally.recomputed_tokens += max(0, sequence.peak - sequence.planned)
        self._account(request, sequence, now)

    def _account(self, request: Request, sequence: Sequence, now: float) -> None:
        if request.resident == 0:
            self.resident_requests += 1
        request.resident += 1
        if request.scheduled_s < 0:
            request.scheduled_s = now
            request.cached_tokens = sequence.cached
            self._tally.prompt_tokens += sequence.prompt_tokens
            if self.kv.prefix_caching and not sequence.whole:
                self._tally.queried_tokens += sequence.prompt_tokens
            self._tally.cached_tokens += sequence.cached

    # ------------------------------------------------------------ preemption

    def _make_way(self, now: float) -> None:
        """A waiting sequence of a strictly better class takes the place of the worst that run."""
        head = self._head(now)
        if head is None or not self.running or not may_preempt(head.key, self.running[-1].key):
            return
        worse = [s for s in self.running if may_preempt(head.key, s.key)]
        rows = len(self._free_rows) + sum(1 + len(s.spare_rows) for s in worse)
        blocks = sum(s.table.size for s in worse) + self.kv.free_blocks
        need = self._need(head)
        if rows < head.request.rows or blocks + self.kv.limbo_blocks < need:
            return  # it would not fit even then
        while worse and not self._fits(head, self.kv.free_blocks + self.kv.limbo_blocks):
            if worse[-1].drained:
                return  # it leaves by itself when the step in flight ends
            self._preempt(worse.pop(), now)

    def _preempt(self, sequence: Sequence, now: float) -> None:
        """The last of `running` loses its row and its KV, nothing else, and waits."""
        last = self.running.pop()
        assert last is sequence, "only the worst running sequence is preempted"
        sequence.peak = max(sequence.peak, sequence.planned)
        sequence.settled = self.launched
        self._vacate(sequence)
        sequence.request.preempted_s.append(now)
        self._tally.preemptions += 1
        self.queue.push(sequence, now)

    def _vacate(self, sequence: Sequence) -> None:
        """Give back row and blocks; blocks are reused once the newest step has finished."""
        self.growth_blocks -= self._growth(sequence)
        self._claim(sequence, 0)
        self._leaves.append(sequence.row)
        self._free_rows.append(sequence.row)
        self._free_rows.extend(sequence.spare_rows)
        self.kv.release(sequence.table, self.launched)
        sequence.spare_rows = []
        sequence.row = NO_ROW
        sequence.cached = sequence.planned = sequence.computed = sequence.room = 0
        request = sequence.request
        request.resident -= 1
        if request.resident == 0:
            self.resident_requests -= 1

    # ------------------------------------------------------------ a step that broke

    def lost(self, flights: list[Flight]) -> None:
        """These steps broke and none is in flight: no block is in use, no leave may have arrived.

        Call after every running sequence was dropped. The next plan names the leaves again.
        """
        leaves = [row for flight in flights for row in flight.plan.leaves]
        self._leaves = list(dict.fromkeys(leaves + self._leaves))
        self.kv.fence(self.launched)
