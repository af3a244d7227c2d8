"""The prefill budget: static, by predicted step time, and what a storm of prompts does to decodes.

The simulations run the real engine on the fake runner, whose steps take what the cost model says.
"""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from headrace.backends.fake import FakeRunner
from headrace.config import Settings
from headrace.engine.budget import CostBudget, StaticBudget, budget_for
from headrace.engine.loop import Engine
from headrace.engine.protocol import StepCost
from headrace.kv.cache import KVCache
from headrace.messages import StepPlan, Submit
from tests.unit.engine_rig import GREEDY, Rig

# A 14B model in bfloat16 on a card of 4 TB/s and 600 TFLOP/s.
COST = StepCost(floor_s=0.007, token_s=45e-6, base_s=0.0015, pair_s=1.2e-9, read_s=5e-8, tile=128)
TARGET_S, MAX_TOKENS = 0.030, 8192


def step_s(cost: StepCost, decodes: list[int], chunks: list[tuple[int, int]]) -> float:
    """The prediction, from its definition: `chunks` are (start, count)."""
    tokens = len(decodes) + sum(count for _, count in chunks)
    tiles = (tokens + cost.tile - 1) // cost.tile
    pairs = sum(count * start + count * count / 2 for start, count in chunks)
    reads = sum(position + 1 for position in decodes)
    work_s = max(cost.floor_s, cost.token_s * tiles * cost.tile)
    return work_s + cost.base_s + cost.pair_s * pairs + cost.read_s * reads


def fill(
    budget: StaticBudget | CostBudget,
    decodes: list[int],
    wishes: list[tuple[int, int]],
    stalled: bool = False,
) -> list[tuple[int, int]]:
    """One step: offer chunks (start, wanted) while the budget is open; what each got."""
    tokens = sum(wanted for _, wanted in wishes)
    budget.begin(decodes, stalled=stalled, prompts=len(wishes), tokens=tokens)
    chunks: list[tuple[int, int]] = []
    for start, wanted in wishes:
        if not budget.open:
            break
        chunks.append((start, budget.grant(start, wanted)))
    return chunks


def granted(chunks: list[tuple[int, int]]) -> int:
    return sum(count for _, count in chunks)


def test_the_prediction_is_its_definition() -> None:
    chunks = [(0, 100), (500, 28)]
    pairs = sum(count * (start + count / 2) for start, count in chunks)
    predicted = COST.seconds(130, pairs, reads=10 + 21)
    assert predicted == pytest.approx(step_s(COST, [9, 20], chunks))
    assert COST.seconds(1, 0, 0) == COST.floor_s + COST.base_s
    assert COST.seconds(257, 0, 0) == COST.token_s * 384 + COST.base_s


# ---------------------------------------------------------------- what a step grants


def test_the_largest_whole_tiles_within_the_target() -> None:
    decodes = [500] * 32
    ((_, count),) = fill(CostBudget(COST, MAX_TOKENS, TARGET_S), decodes, [(0, 8000)])
    assert (32 + count) % COST.tile == 0
    assert step_s(COST, decodes, [(0, count)]) <= TARGET_S
    assert step_s(COST, decodes, [(0, count + COST.tile)]) > TARGET_S


def test_a_cut_for_the_sake_of_attention_is_made_at_a_whole_tile() -> None:
    cost = msgspec.structs.replace(COST, pair_s=5e-8)
    decodes = [500] * 32
    ((_, count),) = fill(CostBudget(cost, MAX_TOKENS, TARGET_S), decodes, [(0, 8000)])
    assert (32 + count) % COST.tile == 0
    assert step_s(cost, decodes, [(0, count + 1)]) <= TARGET_S, "a part of a tile would fit"
    assert step_s(cost, decodes, [(0, count + COST.tile)]) > TARGET_S


def test_steps_do_not_add_up() -> None:
    budget = CostBudget(msgspec.structs.replace(COST, pair_s=5e-9), MAX_TOKENS, TARGET_S)
    steps = [fill(budget, [500] * 32, [(4000, 8000)]) for _ in range(3)]
    assert steps[0] == steps[1] == steps[2]


def test_a_prompt_that_fits_is_not_cut_at_a_tile() -> None:
    wishes = [(0, 200), (0, 33), (64, 8000)]
    chunks = fill(CostBudget(COST, MAX_TOKENS, TARGET_S), [500] * 32, wishes)
    assert [count for _, count in chunks[:2]] == [200, 33]
    assert (32 + granted(chunks)) % COST.tile == 0


def test_late_chunks_of_a_long_prompt_are_smaller() -> None:
    budget = CostBudget(COST, MAX_TOKENS, TARGET_S)
    counts = [fill(budget, [10] * 8, [(start, 20_000)])[0][1] for start in (0, 8_000, 30_000)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1]


def test_a_chunk_that_gets_nothing_closes_the_step() -> None:
    """The second chunk stands so far back that a tile of it would break the target."""
    cost = msgspec.structs.replace(COST, pair_s=1e-7)
    budget = CostBudget(cost, MAX_TOKENS, TARGET_S)
    chunks = fill(budget, [10] * 8, [(0, 248), (100_000, 8000), (0, 64)])
    assert chunks == [(0, 248), (100_000, 0)]
    assert not budget.open


def test_a_paid_tile_is_used_as_far_as_the_target_allows() -> None:
    """Past the first tiles attention is the limit: half a tile more costs no matrix product."""
    cost = msgspec.structs.replace(COST, pair_s=1e-7)
    decodes = [10] * 8
    chunks = fill(CostBudget(cost, MAX_TOKENS, TARGET_S), decodes, [(0, 300), (2_000, 8000)])
    assert 0 < chunks[1][1] < 384 - 308
    assert step_s(cost, decodes, chunks) <= TARGET_S
    assert step_s(cost, decodes, [chunks[0], (2_000, chunks[1][1] + 1)]) > TARGET_S


def test_progress_when_decodes_alone_break_the_target() -> None:
    decodes = [100_000] * 64
    assert step_s(COST, decodes, []) > TARGET_S
    chunks = fill(CostBudget(COST, MAX_TOKENS, TARGET_S), decodes, [(30_000, 8000)])
    assert granted(chunks) == 256 - 64, "a tile, and what fills the second one"


def test_while_nothing_decodes_the_step_is_full() -> None:
    budget = CostBudget(COST, MAX_TOKENS, TARGET_S)
    assert granted(fill(budget, [], [(0, 100_000)])) == MAX_TOKENS
    assert granted(fill(budget, [], [(0, 100_000)], stalled=True)) < MAX_TOKENS
    assert granted(fill(budget, [], [(0, 100_000)])) == MAX_TOKENS


def test_a_burst_is_not_cut() -> None:
    """More sequences get their first token in a step than wait for their next."""
    budget = CostBudget(COST, MAX_TOKENS, TARGET_S)
    burst = [(0, 64)] * 41
    assert granted(fill(budget, [10] * 40, burst)) == 41 * 64
    budget = CostBudget(COST, MAX_TOKENS, TARGET_S)
    assert granted(fill(budget, [10] * 41, burst)) < 41 * 64, "as many decode"
    assert granted(fill(budget, [10] * 40, burst, stalled=True)) < 41 * 64
    long = [(0, 8000)] * 41
    budget = CostBudget(COST, MAX_TOKENS, TARGET_S)
    assert granted(fill(budget, [10] * 40, long)) < 1000, "a step holds but one of them"
    assert granted(fill(budget, [10], [(0, 8000)])) < 1000


def test_the_rest_of_a_burst_goes_as_fast_as_its_beginning() -> None:
    """As long as no more sequences waited for it than it gave their first token."""
    burst = [(0, 64)] * 60

    def after(firsts: int, decodes: int, quiet: int) -> int:
        budget = CostBudget(COST, MAX_TOKENS, TARGET_S)
        assert granted(fill(budget, [10] * decodes, [(0, 48)] * firsts)) == firsts * 48
        for _ in range(quiet):
            fill(budget, [10] * firsts, [])
        return granted(fill(budget, [10] * (firsts + decodes), burst))

    whole = len(burst) * 64
    assert after(100, 0, quiet=0) == whole
    assert after(100, 0, quiet=5) < whole, "another burst"
    assert after(100, 40, quiet=0) < whole, "40 of them were held up before"
    assert after(150, 0, quiet=0) < whole, "too few for so many"
    budget = CostBudget(COST, MAX_TOKENS, TARGET_S)
    fill(budget, [], [(0, 64)] * 32)
    assert granted(fill(budget, [10] * 32, [(0, 8000)])) < 1000, "one long prompt is no burst"


def test_a_target_of_zero_is_the_static_budget() -> None:
    assert isinstance(budget_for(COST, 100, 0.0), StaticBudget)
    assert isinstance(budget_for(None, 100, 0.0), StaticBudget)
    with pytest.raises(AssertionError, match="does not know"):
        budget_for(None, 100, 0.1)


costs = st.builds(
    StepCost,
    floor_s=st.floats(0, 0.02),
    token_s=st.floats(0, 1e-3),
    base_s=st.floats(0, 0.01),
    pair_s=st.floats(0, 1e-6),
    read_s=st.floats(0, 1e-6),
    tile=st.sampled_from([1, 7, 16, 128]),
)
wishes_of = st.lists(st.tuples(st.integers(0, 40_000), st.integers(1, 9000)), max_size=6)


@given(
    cost=costs,
    max_tokens=st.integers(1, 9000),
    target_s=st.floats(1e-3, 0.1),
    decodes=st.lists(st.integers(0, 40_000), max_size=40),
    wishes=wishes_of,
    stalled=st.booleans(),
)
def test_the_step_stays_below_the_target_or_grants_the_least(
    cost: StepCost,
    max_tokens: int,
    target_s: float,
    decodes: list[int],
    wishes: list[tuple[int, int]],
    stalled: bool,
) -> None:
    decodes = decodes[:max_tokens]
    chunks = fill(CostBudget(cost, max_tokens, target_s), decodes, wishes, stalled)
    total = len(decodes) + granted(chunks)
    assert total <= max_tokens
    assert all(0 <= got <= wanted for (_, got), (_, wanted) in zip(chunks, wishes, strict=False))
    assert all(got == wanted for (_, got), (_, wanted) in zip(chunks[:-1], wishes, strict=False))
    wanted = sum(count for _, count in wishes)
    room = max_tokens - len(decodes)
    firsts = len(wishes) * room // wanted if wanted > room else len(wishes)
    if not stalled and (not decodes or firsts > len(decodes)):
        assert chunks == fill(StaticBudget(max_tokens), decodes, wishes)
        return
    least = min(wanted, cost.tile, max_tokens - len(decodes))
    assert granted(chunks) >= least, "progress"
    sure = min(max_tokens, -(-(len(decodes) + cost.tile) // cost.tile) * cost.tile)
    if total > sure:
        assert step_s(cost, decodes, chunks) <= target_s * (1 + 1e-9)


def test_measured_sizes_price_the_steps_that_they_hold() -> None:
    cost = msgspec.structs.replace(
        COST, sizes=(1, 128, 256), size_s=(0.007, 0.01, 0.02), size_pair_s=(3e-9, 2e-9, 1e-9)
    )
    assert cost.seconds(1, 0, 0) == 0.007
    assert cost.seconds(2, 1000, 0) == pytest.approx(0.01 + 1000 * 2e-9)
    assert cost.seconds(128, 1000, 10) == pytest.approx(0.01 + 1000 * 2e-9 + 10 * COST.read_s)
    assert cost.seconds(129, 1000, 0) == pytest.approx(0.02 + 1000 * 1e-9)
    assert cost.seconds(257, 1000, 0) == COST.seconds(257, 1000, 0), "beyond them by the line"
    longer = msgspec.structs.replace(
        cost,
        sizes=(1, 128, 256, 384, 512),
        size_s=(0.007, 0.01, 0.02, 0.03, 0.06),
        size_pair_s=(1e-9,) * 5,
    )
    chunks = fill(CostBudget(longer, MAX_TOKENS, 0.035), [5] * 8, [(0, 4000)])
    assert chunks == [(0, 376)], "a tile more would take 60 ms"
    steep = msgspec.structs.replace(longer, size_s=(0.007, 0.01, 0.014, 0.033, 0.034))
    chunks = fill(CostBudget(steep, MAX_TOKENS, 0.0335), [5] * 8, [(0, 4000)])
    assert chunks == [(0, 248)], "384 tokens would fit, but 256 have more tokens a second"
    chunks = fill(CostBudget(steep, MAX_TOKENS, 0.0335), [5] * 8, [(0, 300)])
    assert chunks == [(0, 300)], "nothing is left for another step"


@given(
    max_tokens=st.integers(1, 9000),
    decodes=st.lists(st.integers(0, 40_000), max_size=40),
    wishes=wishes_of,
)
def test_the_static_budget_counts_tokens(
    max_tokens: int, decodes: list[int], wishes: list[tuple[int, int]]
) -> None:
    decodes = decodes[:max_tokens]
    chunks = fill(StaticBudget(max_tokens), decodes, wishes)
    wanted = sum(count for _, count in wishes)
    room = max_tokens - len(decodes)
    if granted(chunks) < min(wanted, room):
        left = room - granted(chunks)
        assert len(chunks) > 1
        assert chunks[-1][1] == 0
        assert left < max_tokens / 16
        assert left < wishes[len(chunks) - 1][1], "it would have fit"
    else:
        assert granted(chunks) == min(wanted, room)


def test_no_prompt_begins_with_a_crumb() -> None:
    budget = StaticBudget(8192)
    assert fill(budget, [], [(0, 8000), (0, 8000)]) == [(0, 8000), (0, 0)]
    assert fill(budget, [], [(0, 8000), (0, 192), (0, 1)]) == [(0, 8000), (0, 192)]
    assert fill(budget, [], [(0, 7680), (0, 8000)]) == [(0, 7680), (0, 512)]
    assert fill(budget, [5] * 8000, [(0, 8000)]) == [(0, 192)], "the first always goes on"


# ---------------------------------------------------------------- in the engine


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
def test_tokens_do_not_depend_on_the_budget(overlap: bool) -> None:
    """Also where a chunk gets nothing: an admitted sequence then waits for the next step."""
    cost = StepCost(floor_s=0, token_s=1e-6, base_s=0, pair_s=1e-7, read_s=0, tile=4)
    rig = Rig(blocks=200, overlap=overlap, cost=cost, itl_target_s=12e-6)
    shared = list(range(40))
    rig.submit(shared, 30)
    rig.run(turns=6000)
    for _ in range(3):
        rig.submit(3, 40)
    for size in (60, 5, 33, 90):
        for _ in range(3):
            rig.turn()
        rig.submit(shared + list(range(100, 100 + size)), 6, n=2)
        rig.submit(size, 6)
    rig.run(turns=6000)
    rig.check_tokens()
    rig.check_idle()
    assert all(done.error == "" for done in rig.dones.values())
    first = [(plan, join) for plan in rig.plans for join in plan.joins if join.choice == 0]
    assert any(join.row not in plan.rows for plan, join in first), "each got a token at once"


class SlowRunner(FakeRunner):
    """Takes `slower` times as long as its own cost says."""

    def __init__(self, slower: float, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._slower = slower

    def _modelled_s(self, plan: StepPlan) -> float:
        return super()._modelled_s(plan) * self._slower


class Storm:
    """32 sequences decode; every second comes a prompt of 8000 tokens, which draws 4 tokens.

    Time is the modelled time of the steps; the loop is the plain one, so a gap between two tokens
    is one step, as in the overlapped one on a device that is never idle.
    """

    DECODES, PROMPT, EVERY_S, PROMPTS = 32, 8000, 1.0, 6

    def __init__(self, target_s: float, slower: float = 1.0) -> None:
        """slower: times as long as the engine is told is what a step takes."""
        self.now_s = 0.0
        runner = SlowRunner(
            slower,
            12_000,
            16,
            64,
            20_000,
            cost=COST,
            eos_ids=(),
            clock=self.clock,
            sleep=self.sleep,
        )
        self.engine = Engine(
            Settings(max_num_seqs=64, max_num_batched_tokens=MAX_TOKENS, prefix_caching=False),
            KVCache(12_000, 16, False),
            runner,
            overlap=False,
            itl_target_s=target_s,
            clock=self.clock,
        )
        self.gaps_s: list[float] = []  # of each decode, each step
        self.ttft_s: dict[int, float] = {}

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def run(self) -> None:
        for handle in range(self.DECODES):
            self.engine.submit(0, Submit(handle, [handle + 1] * 64, 15_000, GREEDY))
        self.engine.turn()
        last_s = dict.fromkeys(range(self.DECODES), self.now_s)
        arrived_s: dict[int, float] = {}
        while len(self.ttft_s) < self.PROMPTS:
            assert self.now_s < 60, "prompts starve"
            due = len(arrived_s)
            if due < self.PROMPTS and self.now_s >= self.EVERY_S * due:
                arrived_s[100 + due] = self.now_s
                prompt = [(due * 31 + i) % 250 for i in range(self.PROMPT)]
                self.engine.submit(0, Submit(100 + due, prompt, 4, GREEDY))
            out = self.engine.turn()[0]
            for handle in out.handles:
                if handle in last_s:
                    self.gaps_s.append(self.now_s - last_s[handle])
                    last_s[handle] = self.now_s
                else:
                    self.ttft_s.setdefault(handle, self.now_s - arrived_s[handle])

    def gap_s(self, percent: int) -> float:
        return sorted(self.gaps_s)[len(self.gaps_s) * percent // 100]


def test_a_storm_of_prompts_costs_decodes_no_more_than_the_target() -> None:
    storm = Storm(TARGET_S)
    storm.run()
    assert storm.gap_s(99) <= TARGET_S * (1 + 1e-9)
    assert max(storm.gaps_s) <= TARGET_S * (1 + 1e-9)
    assert max(storm.ttft_s.values()) < 0.75, "nor do prompts pay for it with their own time"


def test_a_card_that_is_slower_than_it_was_at_the_start_keeps_the_target_too() -> None:
    late, right = Storm(TARGET_S, slower=1.12), Storm(TARGET_S)
    late.run()
    right.run()
    assert late.engine.stats().step_factor > 1.1
    assert right.engine.stats().step_factor == pytest.approx(1.0)
    assert max(late.gaps_s) <= TARGET_S * (1 + 1e-9)
    assert max(late.ttft_s.values()) < 1.35 * max(right.ttft_s.values())
    halved = Storm(TARGET_S, slower=2.0)
    halved.run()
    assert halved.engine.stats().step_factor == 1.35, "as far as it goes"
    fast = Storm(TARGET_S, slower=0.92)
    fast.run()
    assert max(fast.gaps_s) <= TARGET_S


def test_without_a_target_the_same_storm_stalls_decodes() -> None:
    storm = Storm(0.0)
    storm.run()
    assert storm.gap_s(99) > 0.3
