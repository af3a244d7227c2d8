"""FakeRunner: the runner protocol without torch and without a model, deterministic, self-checking.

Its "KV" is real enough to be wrong: every slot holds the token computed there and a 64-bit state
that chains all tokens up to it, so that a wrong table, a stale block, a missing copy or a block
that is reused too early changes what comes next (and with `verify` is found on the spot). Each KV
group holds all of it, and all must agree.

Log-probabilities are those of its own distribution; see `fake.logprobs`.

Vocabulary of 259: ids 0..255 are bytes, 256 <|endoftext|>, 257 <|im_start|>, 258 <|im_end|>.
`fake.model` says how a token follows from a state.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from headrace.backends.fake.logprobs import report
from headrace.backends.fake.model import END_OF_TURN, VOCAB_SIZE, advance, draw, greedy_token, root
from headrace.backends.fake.vectors import LABELS, WIDTH, pooled
from headrace.engine.protocol import Capacity, Masks, StepCost, StepWork
from headrace.messages import NO_TOKEN_ALLOWED, Join, Logprobs, Output, StepPlan, StepResult, Tap
from headrace.sampling.shaping import unpacked

MAX_IN_FLIGHT = 2
_DRAWN = (Output.SAMPLE, Output.PROMPT_LOGPROBS)


class _Row:
    """One device row: what a real runner keeps in device tables."""

    __slots__ = ("acquired", "end", "history", "join", "last", "root", "start", "tables")

    def __init__(self, join: Join, step: int) -> None:
        self.join = join
        self.tables = [list(table) for table in join.tables]  # by KV group
        # Block -> step in which it came into one of them.
        self.acquired = {block: step for table in self.tables for block in table}
        self.root = root(join.adapter)
        self.start = self.end = 0  # of its newest forward row; end: where the next one starts
        self.last: int | None = None  # token last drawn into this row
        self.history = list(join.history) if join.sampling.needs_history else None

    def learn(self, position: int, ids: list[int]) -> None:
        """ids stand at `position` and after it."""
        if self.history is not None:
            assert position <= len(self.history), f"a hole in the history before {position}"
            self.history[position : position + len(ids)] = ids


class FakeTicket:
    """A step in flight."""

    def __init__(self, runner: FakeRunner, plan: StepPlan, states: list[int]) -> None:
        self.plan = plan
        self.states = states  # [forward row] state after its last token
        self.traces: dict[int, list[int]] = {}  # forward row -> state after each of its tokens
        self.logprobs: list[Logprobs | None] = []
        self.prompts: list[list[Logprobs]] = []
        self.vectors: list[bytes] = []
        self.taps: list[Tap] = []
        self.touched: set[int] = set()  # blocks that the step reads or writes
        self.tokens: list[int] | None = None
        self.failed: list[tuple[int, str]] = []
        self.ready_s = 0.0
        self.busy_s = 0.0
        self._runner = runner

    def likely(self) -> list[int]:
        """See `engine.protocol.Ticket`."""
        return self._runner._likely(self)

    def finish(self, masks: Masks | None = None) -> None:
        """Draw. See `engine.protocol.Ticket`."""
        assert self.tokens is None, f"step {self.plan.step} is finished twice"
        self.tokens = self._runner._draw(self, masks)

    def result(self) -> StepResult:
        """The tokens, once the modelled time has passed. See `engine.protocol.Ticket`."""
        assert self.tokens is not None, f"result of step {self.plan.step} before its finish"
        waited_s = self._runner._await(self)
        return StepResult(
            self.plan.step,
            self.tokens,
            self.failed,
            self.busy_s,
            self.logprobs,
            self.prompts,
            self.vectors,
            self.taps,
            0.0,  # the modelled time is that of the forward pass
            waited_s,
        )


class FakeRunner:
    """`kv_blocks` blocks of `block_size` tokens, `max_rows` rows; see the module.

    `step_ms` + `token_ms` * tokens is the modelled time of a step, or what `cost` says, which then
    is in its capacity: the device is busy that long, one step after another, and `result` sleeps
    until it is done. `verify` re-reads the whole
    context of every row and checks every block that is written; it costs O(context) a step.
    `windows`, of each KV group, 0 or more than 1: a query reads so many newest slots alone of it
    (0 = all); what lies before is not looked at.
    `eos_ids`: the first is drawn about once in 200 tokens; empty means never.
    """

    def __init__(
        self,
        kv_blocks: int,
        block_size: int,
        max_rows: int,
        max_model_len: int,
        step_ms: float = 0.0,
        token_ms: float = 0.0,
        cost: StepCost | None = None,
        verify: bool = False,
        eos_ids: Sequence[int] = (END_OF_TURN,),
        windows: Sequence[int] = (0,),
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        assert cost is None or step_ms == token_ms == 0, "two models of the time of a step"
        work = StepWork(weights_s=step_ms or 1.0, token_s=token_ms)
        if cost is not None:
            read_s = cost.floor_s + cost.base_s
            work = StepWork(read_s, cost.token_s, pair_s=cost.pair_s, read_s=cost.read_s)
        self._capacity = Capacity(
            [kv_blocks],
            block_size,
            max_rows,
            max_model_len,
            VOCAB_SIZE,
            cost,
            width=WIDTH,
            labels=LABELS,
            work=work,
            windows=tuple(windows),
            draws_note="the fake model draws from a hash of the tokens so far: it has no logits",
        )
        assert 1 not in windows, "a state follows from the one before it"
        self._block_size = block_size
        self._step_s, self._token_s = step_ms / 1000, token_ms / 1000
        self._verify = verify
        self._eos = eos_ids[0] if eos_ids else None
        self._clock, self._sleep = clock, sleep
        self._states: list[int | None] = [None] * (kv_blocks * block_size)  # [slot]
        self._tokens = [-1] * (kv_blocks * block_size)  # [slot]
        self._rows: dict[int, _Row] = {}
        self._in_flight: deque[FakeTicket] = deque()
        self._step = 0
        self._free_s = 0.0  # when the device is done with all steps so far
        self.closed = False

    @property
    def capacity(self) -> Capacity:
        """What it was built with."""
        return self._capacity

    def launch(self, plan: StepPlan) -> FakeTicket:
        """Compute the forward pass. See `engine.protocol.Runner`."""
        assert not self.closed, "launch on a closed runner"
        assert len(self._in_flight) < MAX_IN_FLIGHT, "a third step in flight"
        assert all(t.tokens is not None for t in self._in_flight), "launch before the last finish"
        assert plan.step > self._step, f"step {plan.step} after step {self._step}"
        assert not plan.draw_at, "the fake runner draws from last positions"
        self._step = plan.step
        ticket = FakeTicket(self, plan, [])
        self._update_tables(plan)
        for number, start, count in zip(plan.rows, plan.starts, plan.counts, strict=True):
            row = self._rows[number]
            row.start, row.end = start, start + count
        if self._verify:
            self._check_fence(plan)
        for source, target in plan.copies[0]:
            self._copy(source, target)
            ticket.touched |= {source, target}
        unwritten = set(plan.unwritten)
        self._check_outputs(plan)
        ticket.traces = {i: [] for i in (*(i for i, *_ in plan.prompts), *dict(plan.pools))}
        for i in range(len(plan.rows)):
            trace = ticket.traces.get(i)
            ticket.states.append(self._forward(plan, i, i not in unwritten, trace))
            end = plan.starts[i] + plan.counts[i]
            row = self._rows[plan.rows[i]]
            for table, low in self._tables(row, row.start):
                ticket.touched.update(table[low : -(-end // self._block_size)])
        self._in_flight.append(ticket)
        return ticket

    def counters(self) -> Mapping[str, int]:
        """Nothing of its own. See `engine.protocol.Runner`."""
        return {}

    def idle(self) -> bool:
        """Nothing is ever put off. See `engine.protocol.Runner`."""
        return False

    def close(self) -> None:
        """Forget everything. See `engine.protocol.Runner`."""
        assert not self._in_flight, "closed with a step in flight"
        self.closed = True

    # ------------------------------------------------------------ the step

    def _update_tables(self, plan: StepPlan) -> None:
        for number in plan.leaves:
            self._rows.pop(number, None)
        for join in plan.joins:
            assert 0 <= join.row < self._capacity.max_rows, f"row {join.row} does not exist"
            assert join.row not in self._rows, f"row {join.row} is joined while it is held"
            assert len(join.tables) == len(self._capacity.windows), "a table for each KV group"
            self._rows[join.row] = _Row(join, plan.step)
        for grow in plan.grows:
            row = self._rows[grow.row]
            table = row.tables[grow.group]
            assert 0 <= grow.first <= len(table), "a hole in a block table"
            table[grow.first : grow.first + len(grow.blocks)] = grow.blocks
            row.acquired.update(dict.fromkeys(grow.blocks, plan.step))

    def _copy(self, source: int, target: int) -> None:
        size = self._block_size
        a, b = source * size, target * size
        self._states[b : b + size] = self._states[a : a + size]
        self._tokens[b : b + size] = self._tokens[a : a + size]

    @staticmethod
    def _check_outputs(plan: StepPlan) -> None:
        """Each kind of output stands where the columns beside it say, and nowhere else."""
        for kind, rows in (
            (Output.PROMPT_LOGPROBS, [i for i, *_ in plan.prompts]),
            (Output.POOL, [i for i, _ in plan.pools]),
        ):
            found = [i for i, output in enumerate(plan.outputs) if output == kind]
            assert found == sorted(rows), f"output {kind} in rows {found}, asked of {rows}"
        assert all(output <= Output.PROMPT_LOGPROBS for output in plan.outputs), "unknown output"

    def _forward(self, plan: StepPlan, i: int, writes: bool, trace: list[int] | None) -> int:
        """Compute forward row i; returns the state after its last token, `trace` gets all."""
        row, start, count = self._rows[plan.rows[i]], plan.starts[i], plan.counts[i]
        assert count > 0, "a forward row without tokens"
        assert start + count <= self._capacity.max_model_len, "past max_model_len"
        ids = plan.ids[i]
        if ids is None:
            assert count == 1, "one drawn token"
            assert row.last is not None, "no token was drawn into this row yet"
            ids = [row.last]
        assert len(ids) == count, f"{len(ids)} ids for {count} positions"
        row.learn(start, ids)
        if self._verify:
            self._check_chain(row, start)
        state = row.root
        if start > 0:
            found = {self._states[slot] for slot in self._slots(row, start - 1)}
            assert len(found) == 1, f"KV groups differ at position {start - 1}"
            before = found.pop()
            assert before is not None, f"position {start - 1} was never computed"
            state = before
        for position, token in enumerate(ids, start):
            assert 0 <= token < VOCAB_SIZE, f"token id {token}"
            state = advance(state, token)
            if trace is not None:
                trace.append(state)
            for slot in self._slots(row, position):
                if writes:
                    self._states[slot], self._tokens[slot] = state, token
                elif self._verify:
                    assert self._states[slot] == state, "unwritten, but the slot holds another"
        return state

    def _lows(self, position: int) -> list[int]:
        """By KV group: the first position that a query at `position` reads."""
        windows = self._capacity.windows
        return [max(0, position + 1 - window) if window else 0 for window in windows]

    def _tables(self, row: _Row, position: int) -> Iterator[tuple[list[int], int]]:
        """The row's tables, and of each the first block that a query at `position` reads."""
        lows = (low // self._block_size for low in self._lows(position))
        return zip(row.tables, lows, strict=True)

    def _slot(self, table: list[int], position: int) -> int:
        return table[position // self._block_size] * self._block_size + position % self._block_size

    def _slots(self, row: _Row, position: int) -> list[int]:
        """Of one position, in each KV group."""
        return [self._slot(table, position) for table in row.tables]

    def _draw(self, ticket: FakeTicket, masks: Masks | None) -> list[int]:
        plan = ticket.plan
        allowed: dict[int, npt.NDArray[np.bool_]] = {}
        if masks is not None:
            for j, bits in zip(masks.draws, masks.bits, strict=True):
                allowed[j] = unpacked(bits, VOCAB_SIZE)
        tokens: list[int] = []
        for j, (source, target) in enumerate(zip(plan.draw_from, plan.draw_into, strict=True)):
            assert plan.outputs[source] in _DRAWN, "a draw from a row without logits"
            row = self._rows[target]
            position = plan.starts[source] + plan.counts[source]
            row.end = max(row.end, position)  # a fork's first forward row is there
            token = self._draw_one(row, ticket.states[source], position, allowed.get(j))
            if self._verify and row.history is not None:
                self._check_history(row.history, self._rows[plan.rows[source]], position)
            if token is None:
                ticket.failed.append((j, NO_TOKEN_ALLOWED))
            row.last = token or 0  # a step ahead may compute what failed
            row.learn(position, [row.last])
            tokens.append(-1 if token is None else token)
            if row.join.record:
                greedy = row.join.sampling.temperature == 0
                ticket.taps.append(Tap(j, greedy, -1.0, []))
        self._report(ticket, tokens)
        ticket.busy_s = self._modelled_s(plan)
        self._free_s = max(self._free_s, self._clock()) + ticket.busy_s
        ticket.ready_s = self._free_s
        return tokens

    def _likely(self, ticket: FakeTicket) -> list[int]:
        plan = ticket.plan
        found = []
        for source, target in zip(plan.draw_from, plan.draw_into, strict=True):
            join = self._rows[target].join
            token = greedy_token(ticket.states[source], join.sampling, self._eos)
            found.append(-1 if join.record else token)  # whose draws are shown, so is their mask
        return found

    def _draw_one(
        self, row: _Row, state: int, position: int, mask: npt.NDArray[np.bool_] | None
    ) -> int | None:
        join = row.join
        return draw(
            state,
            join.sampling,
            join.choice,
            position,
            self._eos,
            ids=(row.history or [])[:position],
            prompt_tokens=join.prompt_tokens,
            mask=mask,
        )

    def _report(self, ticket: FakeTicket, tokens: list[int]) -> None:
        """Log-probabilities of what was drawn, and of the prompts that ask."""
        plan = ticket.plan
        asked = [self._rows[target].join.sampling.logprobs for target in plan.draw_into]
        if max(asked, default=-1) >= 0:
            columns = zip(plan.draw_from, tokens, asked, strict=True)
            ticket.logprobs = [
                report(ticket.states[source], token, count, self._eos)
                if count >= 0 and token >= 0
                else None
                for source, token, count in columns
            ]
        for i, count, after in plan.prompts:
            ids = plan.ids[i]
            assert ids is not None, "a prompt is known"
            targets = ids[1:] + ([after] if after >= 0 else [])
            pairs = zip(ticket.traces[i][: len(targets)], targets, strict=True)
            ticket.prompts.append([report(s, t, count, self._eos) for s, t in pairs])
        ticket.vectors = [pooled(kind, ticket.traces[i]).tobytes() for i, kind in plan.pools]

    def _modelled_s(self, plan: StepPlan) -> float:
        cost = self._capacity.cost
        if cost is None:
            return self._step_s + self._token_s * sum(plan.counts)
        rows = list(zip(plan.starts, plan.counts, plan.ids, strict=True))
        pairs = sum(count * (start + count / 2) for start, count, ids in rows if ids is not None)
        reads = sum(start + 1 for start, _, ids in rows if ids is None)
        return cost.seconds(sum(plan.counts), pairs, reads)

    def _await(self, ticket: FakeTicket) -> float:
        """Until the modelled time of the oldest step has passed; seconds that it took."""
        assert self._in_flight, "no step in flight"
        oldest = self._in_flight.popleft()
        assert oldest is ticket, f"result of {ticket.plan.step} before {oldest.plan.step}"
        asked_s = self._clock()
        if ticket.busy_s <= 0 or ticket.ready_s <= asked_s:
            return 0.0
        self._sleep(ticket.ready_s - asked_s)
        return self._clock() - asked_s

    # ------------------------------------------------------------ verify

    def _check_chain(self, row: _Row, end: int) -> None:
        """Every slot of [0, end) that is read follows from the one before it."""
        for table, low in zip(row.tables, self._lows(row.start), strict=True):
            state = self._states[self._slot(table, low)] if low else row.root
            assert state is not None, f"position {low} was never computed"
            for position in range(low + 1 if low else 0, end):
                slot = self._slot(table, position)
                state = advance(state, self._tokens[slot])
                assert self._states[slot] == state, f"position {position}: stale or foreign KV"

    def _check_history(self, history: list[int], source: _Row, position: int) -> None:
        """What a row remembers is what the forward row that it draws from computed."""
        for table, low in zip(source.tables, self._lows(source.start), strict=True):
            for at in range(low, position):
                wrong = f"position {at} of the history is {history[at]}"
                assert history[at] == self._tokens[self._slot(table, at)], wrong

    def _check_fence(self, plan: StepPlan) -> None:
        """No block that is written belongs to others, or was theirs in a step still in flight.

        Rows that take a block over in this very plan (forks of the row that fills it) may share it.
        """
        unwritten = set(plan.unwritten)
        writers: dict[int, int] = {}  # block -> row
        for i, number in enumerate(plan.rows):
            row, start = self._rows[number], plan.starts[i]
            first, last = (p // self._block_size for p in (start, start + plan.counts[i] - 1))
            written = (table[first : last + 1] for table in row.tables)
            for block in () if i in unwritten else chain.from_iterable(written):
                assert writers.setdefault(block, number) == number, f"two rows write block {block}"
                for ticket in self._in_flight:
                    new = row.acquired[block] > ticket.plan.step
                    fenced = not (new and block in ticket.touched)
                    assert fenced, f"block {block} is reused while step {ticket.plan.step} runs"
        runs = {number for ticket in self._in_flight for number in ticket.plan.rows} | {*plan.rows}
        for number, row in self._rows.items():
            tables = self._tables(row, row.start if number in runs else row.end)
            for block in chain.from_iterable(table[low:] for table, low in tables):
                shared = writers.get(block, number) != number
                old = shared and row.acquired[block] < plan.step
                assert not old, f"block {block} is written while row {number} holds it"
