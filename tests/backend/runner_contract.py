"""What every runner must do: `engine.protocol`, as functions of a `make_runner`.

`Steps` builds plans by hand: a runner is tested without a scheduler. Greedy tokens of one
prompt, computed whole and alone, are the yardstick; chunks, neighbours, block placement, copies and
forks must not change them. To run the suite on another runner, add it to `runners` in
`test_runner_contract.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np

from headrace.engine.protocol import Masks, Runner, Ticket
from headrace.messages import (
    Grow,
    Join,
    Output,
    Pool,
    Sampling,
    StepPlan,
)

MakeRunner = Callable[[], Runner]
BLOCKS, BLOCK_SIZE, ROWS, MAX_MODEL_LEN = 32, 4, 4, 96  # what make_runner must offer

GREEDY = Sampling(temperature=0.0)
PROMPT = [11, 7, 3, 11, 90, 42, 42, 5, 60, 61]  # two blocks and a half
OTHER = [33, 2, 18, 77, 9]


class Steps:
    """Sends plans to a runner, numbering them; keeps each row's length.

    Block ids are those of the first KV group. Each other has as many blocks of its own: whatever is
    said of blocks goes for those of all groups.
    """

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.step = 0
        self.length: dict[int, int] = {}  # row -> positions computed
        self._clear()

    def _clear(self) -> None:
        self.leaves: list[int] = []
        self.joins: list[Join] = []
        self.grows: list[Grow] = []
        self.copies: list[tuple[int, int]] = []
        self.rows: list[tuple[int, int, list[int] | None, bool]] = []  # row, start, ids, written
        self.draws: list[tuple[int, int]] = []  # forward row, device row
        self.prompts: list[tuple[int, int, int]] = []
        self.pools: list[tuple[int, Pool]] = []

    def join(
        self,
        row: int,
        blocks: list[int],
        sampling: Sampling = GREEDY,
        choice: int = 0,
        *,
        known: list[int] = PROMPT,
        prompt_tokens: int = 0,
    ) -> None:
        """A sequence of the ids `known` takes a row in the next plan."""
        history = known if sampling.needs_history else []
        tables = [[first + block for block in blocks] for first in self._firsts()]
        join = Join(row, sampling, choice, tables, "", prompt_tokens or len(known), list(history))
        self.joins.append(join)
        self.length[row] = 0

    def _firsts(self) -> list[int]:
        """The first block of each KV group."""
        capacity = self.runner.capacity
        groups = len(capacity.windows)
        share = capacity.kv_blocks[0] // groups
        return [group * share for group in range(groups)]

    def forward(
        self,
        row: int,
        ids: list[int] | None,
        draw_into: tuple[int, ...] | None = None,
        start: int | None = None,
        written: bool = True,
    ) -> None:
        """Tokens of `row` in the next plan, and who draws (the row itself, unless told)."""
        begin = self.length[row] if start is None else start
        self.rows.append((row, begin, ids, written))
        self.length[row] = begin + (1 if ids is None else len(ids))
        for target in (row,) if draw_into is None else draw_into:
            self.draws.append((len(self.rows) - 1, target))

    def score(self, count: int, after: int = -1) -> None:
        """The forward row added last reports its tokens; see `StepPlan.prompts`."""
        self.prompts.append((len(self.rows) - 1, count, after))

    def pool(self, kind: Pool) -> None:
        """The forward row added last, which nobody draws from, yields a vector."""
        self.pools.append((len(self.rows) - 1, kind))

    def launch(self, masks: Masks | None = None) -> Ticket:
        """Send the plan and let it draw."""
        ticket = self.begin()
        ticket.finish(masks)
        return ticket

    def begin(self) -> Ticket:
        """Send the plan; decode rows must have been added first."""
        self.step += 1
        outputs = [Output.NONE] * len(self.rows)
        for source, _ in self.draws:
            outputs[source] = Output.SAMPLE
        for source, _, _ in self.prompts:
            outputs[source] = Output.PROMPT_LOGPROBS
        for source, _ in self.pools:
            outputs[source] = Output.POOL
        firsts = self._firsts()
        grows = [
            Grow(grow.row, group, grow.first, [first + block for block in grow.blocks])
            for grow in self.grows
            for group, first in enumerate(firsts)
        ]
        copies = [
            (first + source, first + target) for source, target in self.copies for first in firsts
        ]
        plan = StepPlan(
            self.step,
            self.leaves,
            self.joins,
            grows,
            [copies],
            [row for row, _, _, _ in self.rows],
            [start for _, start, _, _ in self.rows],
            [1 if ids is None else len(ids) for _, _, ids, _ in self.rows],
            [ids for _, _, ids, _ in self.rows],
            outputs,
            [i for i, (_, _, _, written) in enumerate(self.rows) if not written],
            [source for source, _ in self.draws],
            [target for _, target in self.draws],
            prompts=self.prompts,
            pools=self.pools,
        )
        self._clear()
        return self.runner.launch(plan)

    def allow(self, allowed: dict[int, list[int]]) -> Masks:
        """Masks: draw -> the only tokens it may take."""
        bits = np.zeros((len(allowed), -(-self.runner.capacity.vocab_size // 32)), np.uint32)
        for line, tokens in zip(bits, allowed.values(), strict=True):
            for token in tokens:
                line[token // 32] |= np.uint32(1 << token % 32)
        return Masks(list(allowed), bits.view(np.int32))

    def run(self, masks: Masks | None = None) -> list[int]:
        """Send the plan and wait for its tokens."""
        result = self.launch(masks).result()
        assert result.step == self.step
        assert result.failed == []
        assert min(result.busy_s, result.waited_s) >= 0
        assert result.sample_s == -1 or 0 <= result.sample_s <= result.busy_s + 1e-9
        assert all(0 <= token < self.runner.capacity.vocab_size for token in result.tokens)
        return result.tokens


def decode(steps: Steps, row: int, count: int) -> list[int]:
    """`count` tokens of a row, one a step."""
    tokens: list[int] = []
    for _ in range(count):
        steps.forward(row, None)
        tokens += steps.run()
    return tokens


def decode_all(steps: Steps, count: int) -> list[list[int]]:
    """Row by row: the token of the step that is made up, whose rows draw all, and `count` more."""
    tokens = [[token] for token in steps.run()]
    for _ in range(count):
        for row in range(ROWS):
            steps.forward(row, None)
        for row, token in enumerate(steps.run()):
            tokens[row].append(token)
    return tokens


def generate(
    make: MakeRunner,
    prompt: list[int] = PROMPT,
    chunks: tuple[int, ...] = (),
    blocks: tuple[int, ...] = (0, 1, 2, 3, 4, 5),
    sampling: Sampling = GREEDY,
    choice: int = 0,
    count: int = 8,
) -> list[int]:
    """Tokens of one prompt alone on a fresh runner."""
    steps = Steps(make())
    steps.join(0, list(blocks), sampling, choice, known=prompt)
    at = 0
    for size in chunks:
        steps.forward(0, prompt[at : at + size], draw_into=())
        assert steps.run() == []
        at += size
    steps.forward(0, prompt[at:])
    tokens = steps.run() + decode(steps, 0, count - 1)
    steps.runner.close()
    return tokens


def offers_what_was_asked(make: MakeRunner) -> None:
    """Capacity is what the suite needs."""
    runner = make()
    capacity = runner.capacity
    assert capacity.kv_blocks == [BLOCKS * len(capacity.windows)]
    assert capacity.block_size == BLOCK_SIZE
    assert capacity.max_rows == ROWS
    assert capacity.max_model_len == MAX_MODEL_LEN
    assert capacity.vocab_size > max(PROMPT)
    runner.close()


def chunks_change_nothing(make: MakeRunner) -> None:
    """Any split of the prompt gives the same tokens."""
    want = generate(make)
    for chunks in [(1,), (4,), (3, 4), (8,), (1,) * 9]:
        assert generate(make, chunks=chunks) == want


def placement_changes_nothing(make: MakeRunner) -> None:
    """Any blocks in any order hold the same KV."""
    assert generate(make, blocks=(31, 3, 17, 0, 8, 30)) == generate(make)


def neighbours_change_nothing(make: MakeRunner) -> None:
    """Decodes and prompts of others in the same steps, joining and leaving."""
    want, want_other = generate(make), generate(make, OTHER, count=5)
    steps = Steps(make())
    steps.join(2, [9, 8, 7, 6])
    steps.forward(2, OTHER)
    other = steps.run()
    steps.join(0, [0, 1, 2, 3, 4, 5])
    steps.forward(2, None)
    steps.forward(0, PROMPT[:6], draw_into=())
    other += steps.run()
    steps.join(1, [20, 21, 22])
    steps.forward(2, None)
    steps.forward(0, PROMPT[6:])
    steps.forward(1, OTHER)
    tokens = steps.run()
    other.append(tokens[0])
    got, third = tokens[1:2], tokens[2:]
    for _ in range(2):
        for row in (1, 2, 0):
            steps.forward(row, None)
        tokens = steps.run()
        third.append(tokens[0])
        other.append(tokens[1])
        got.append(tokens[2])
    steps.leaves = [2, 1]
    steps.join(1, [9, 8, 7, 6])  # rows and blocks are used again in the same plan
    steps.forward(0, None)
    steps.forward(1, OTHER)
    tokens = steps.run()
    got.append(tokens[0])
    assert tokens[1] == want_other[0]
    got += decode(steps, 0, 4)
    steps.runner.close()
    assert got == want
    assert other == want_other
    assert third == want_other[:3]


def known_and_drawn_ids_are_alike(make: MakeRunner) -> None:
    """A token sent by the host equals the one left on the device; so does a resumption."""
    want = generate(make)
    steps = Steps(make())
    steps.join(0, [0, 1, 2, 3, 4, 5])
    steps.forward(0, PROMPT)
    got = steps.run()
    for _ in range(3):
        steps.forward(0, got[-1:])
        got += steps.run()
    steps.leaves = [0]
    steps.join(3, [10, 11, 12, 13, 14])
    steps.forward(3, PROMPT + got)
    got += steps.run()
    got += decode(steps, 3, 3)
    steps.runner.close()
    assert got == want


def tables_grow(make: MakeRunner) -> None:
    """Blocks appended step by step."""
    steps = Steps(make())
    steps.join(1, [4, 5, 6])
    steps.forward(1, PROMPT)
    got = steps.run() + decode(steps, 1, 2)
    for first, blocks in [(3, [29]), (4, [2, 3])]:
        steps.grows = [Grow(1, 0, first, blocks)]
        got += decode(steps, 1, 3 if first == 3 else 2)
    steps.runner.close()
    assert got == generate(make)


def unwritten_rows_leave_the_cache_alone(make: MakeRunner) -> None:
    """A fully cached prompt: its last token again, on shared blocks, without a write."""
    prompt = PROMPT[:8]
    want = generate(make, prompt)
    steps = Steps(make())
    steps.join(0, [0, 1, 2, 3])
    steps.forward(0, prompt)
    first = steps.run()
    steps.join(1, [0, 1, 10, 11])
    steps.forward(0, None)
    steps.forward(1, prompt[-1:], start=7, written=False)
    tokens = steps.run()
    first.append(tokens[0])
    second = tokens[1:]
    second += decode(steps, 1, 6)
    first += decode(steps, 0, 6)
    steps.runner.close()
    assert first == want
    assert second == want[:7]
    wrong = Steps(make())  # an unwritten token must not be visible later: the slot stays as it was
    wrong.join(0, [0, 1, 2, 3])
    wrong.forward(0, prompt)
    drawn = wrong.run()
    wrong.forward(0, prompt[-1:], start=7, written=False)
    assert wrong.run() == drawn
    assert drawn + decode(wrong, 0, 3) == want[:4]
    wrong.runner.close()


def whole_prompts_may_go_undrawn(make: MakeRunner) -> None:
    """One that fills the context, and the last token of a cached one, alone and beside another."""
    prompt, at = (PROMPT * 10)[:MAX_MODEL_LEN], MAX_MODEL_LEN - 1
    steps = Steps(make())
    steps.join(0, list(range(MAX_MODEL_LEN // BLOCK_SIZE)), known=prompt)
    steps.forward(0, prompt, draw_into=())
    assert steps.run() == []
    steps.forward(0, prompt[at:], draw_into=(), start=at, written=False)
    assert steps.run() == []
    steps.join(1, [25, 26, 27], known=OTHER)
    steps.forward(1, OTHER)
    got = steps.run()
    steps.forward(1, None)
    steps.forward(0, prompt[at:], draw_into=(), start=at, written=False)
    got += steps.run() + decode(steps, 1, 3)
    steps.runner.close()
    assert got == generate(make, OTHER)[:5]


def forks_draw_from_one_row(make: MakeRunner) -> None:
    """n = 3: one forward row, three draws, then copy-on-write of the last block."""
    sampling = Sampling(temperature=1.0, seed=7)
    want = [generate(make, sampling=sampling, choice=choice, count=6) for choice in range(3)]
    steps = Steps(make())
    steps.join(0, [0, 1, 2], sampling, 0)
    steps.forward(0, PROMPT[:7], draw_into=())
    steps.run()
    for row in (1, 2):
        steps.join(row, [0, 1, 2], sampling, row)
    steps.forward(0, PROMPT[7:], draw_into=(0, 1, 2))
    got = [[token] for token in steps.run()]
    steps.length = dict.fromkeys((0, 1, 2), len(PROMPT))
    steps.grows = [Grow(0, 0, 2, [20, 21]), Grow(1, 0, 2, [30, 31]), Grow(2, 0, 3, [9])]
    steps.copies = [(2, 20), (2, 30)]
    for _ in range(5):
        for row in (0, 1, 2):
            steps.forward(row, None)
        for choice, token in enumerate(steps.run()):
            got[choice].append(token)
    steps.runner.close()
    assert got == want


def draws_depend_on_seed_choice_and_position(make: MakeRunner) -> None:
    """Equal seeds agree, others do not; top_k 1 and temperature 0 are greedy."""
    greedy = generate(make)
    one = generate(make, sampling=Sampling(seed=1), count=14)
    assert generate(make, sampling=Sampling(seed=1), chunks=(3,), count=14) == one
    assert generate(make, sampling=Sampling(seed=2), count=14) != one
    assert generate(make, sampling=Sampling(seed=1), choice=1, count=14) != one
    assert generate(make, sampling=Sampling(seed=3, top_k=1)) == greedy
    assert generate(make, sampling=Sampling(seed=3, top_p=1e-6)) == greedy
    assert generate(make, sampling=Sampling(seed=3, min_p=1.0)) == greedy


def two_steps_may_be_in_flight(make: MakeRunner) -> None:
    """Step N+1 is launched before the tokens of N are read."""
    steps = Steps(make())
    steps.join(0, [0, 1, 2, 3, 4, 5])
    steps.forward(0, PROMPT)
    before = steps.launch()
    got: list[int] = []
    for _ in range(7):
        steps.forward(0, None)
        ahead = steps.launch()
        got += before.result().tokens
        before = ahead
    got += before.result().tokens
    steps.runner.close()
    assert got == generate(make)


def every_row_and_block_works(make: MakeRunner) -> None:
    """All rows at once, over all blocks."""
    want = generate(make)
    steps = Steps(make())
    each = BLOCKS // ROWS
    for row in range(ROWS):
        steps.join(row, list(range(row * each, (row + 1) * each)))
        steps.forward(row, PROMPT)
    got = decode_all(steps, 7)
    steps.runner.close()
    assert got == [want] * ROWS


def a_free_row_may_leave(make: MakeRunner) -> None:
    """After a broken step the engine names rows that may be free already."""
    steps = Steps(make())
    steps.leaves = [0, 3]
    steps.join(0, [0, 1, 2, 3, 4, 5])
    steps.forward(0, PROMPT)
    got = steps.run() + decode(steps, 0, 7)
    steps.runner.close()
    assert got == generate(make)


def counts_only_rise(make: MakeRunner) -> None:
    """Asked between steps and while one is in flight; no count falls, no name goes."""
    steps = Steps(make())
    steps.join(0, [0, 1, 2, 3, 4, 5])
    steps.forward(0, PROMPT)
    seen = [dict(steps.runner.counters())]
    for _ in range(4):
        ticket = steps.launch()
        seen.append(dict(steps.runner.counters()))
        ticket.result()
        seen.append(dict(steps.runner.counters()))
        steps.forward(0, None)
    steps.runner.close()
    for before, after in itertools.pairwise(seen):
        assert all(0 <= count <= after[name] for name, count in before.items())


def idling_changes_nothing(make: MakeRunner) -> None:
    """Asked before each step: while a sequence runs, shares its blocks, or is still in flight."""
    want = generate(make)
    steps = Steps(make())
    idle = steps.runner.idle
    idle()
    steps.join(0, [0, 1, 2, 3, 4, 5])
    steps.forward(0, PROMPT)
    tokens = steps.run()
    for _ in range(3):
        idle()
        steps.forward(0, None)
        tokens += steps.run()
    steps.join(1, [0, 6, 7, 8, 9, 10])
    idle()
    steps.forward(0, None)
    steps.forward(1, PROMPT[BLOCK_SIZE:], start=BLOCK_SIZE)  # its first block is row 0's
    more = steps.run()
    steps.forward(0, None)
    steps.forward(1, None)
    ahead = steps.launch()
    idle()
    steps.forward(0, None)
    steps.forward(1, None)
    behind = steps.launch()
    more += [*ahead.result().tokens, *behind.result().tokens]
    left = (idle() for _ in range(1000))
    assert not all(left), "there is an end to it"
    steps.forward(0, None)
    steps.forward(1, None)
    more += steps.run()
    steps.runner.close()
    assert tokens + more[::2] == want[:8]
    assert more[1::2] == want[:4]


CONTRACT: list[Callable[[MakeRunner], None]] = [
    offers_what_was_asked,
    chunks_change_nothing,
    placement_changes_nothing,
    neighbours_change_nothing,
    known_and_drawn_ids_are_alike,
    tables_grow,
    unwritten_rows_leave_the_cache_alone,
    whole_prompts_may_go_undrawn,
    forks_draw_from_one_row,
    draws_depend_on_seed_choice_and_position,
    two_steps_may_be_in_flight,
    every_row_and_block_works,
    a_free_row_may_leave,
    counts_only_rise,
    idling_changes_nothing,
]
