"""What goes into a plan: budgets, chunks, rows, memory, policies."""

from __future__ import annotations

import random

import pytest

from headrace.messages import Output, Repetition, Rules, Sampling, StepPlan
from tests.unit.engine_rig import LOOPS, Rig, first_tokens, priority_rig


def prefill_tokens(plan: StepPlan) -> int:
    """Tokens of prompts in a plan."""
    return sum(c for c, ids in zip(plan.counts, plan.ids, strict=True) if ids is not None)


# ---------------------------------------------------------------- budget and chunks


@LOOPS
def test_decodes_come_first_and_prompts_get_what_is_left(overlap: bool) -> None:
    rig = Rig(overlap=overlap, max_num_batched_tokens=10)
    for _ in range(3):
        rig.submit(2, 30)
    rig.turn()
    rig.turn()
    rig.submit(31, 2)
    rig.run()
    mixed = [plan for plan in rig.plans if len(plan.rows) > 3]
    assert [prefill_tokens(plan) for plan in mixed[:5]] == [7, 7, 7, 7, 3]
    for plan in rig.plans:
        assert sum(plan.counts) <= 10
        drawn = [ids is None for ids in plan.ids]
        assert drawn == sorted(drawn, reverse=True), "decode rows come first"
    assert [plan.outputs[3] for plan in mixed[:5]] == [Output.NONE] * 4 + [Output.SAMPLE]
    rig.check_tokens()


@LOOPS
def test_a_running_decode_gets_a_token_in_every_step_of_a_long_prompt(overlap: bool) -> None:
    rig = Rig(overlap=overlap, max_num_batched_tokens=8, rows=4)
    short = rig.submit(4, 40)
    rig.turn()
    rig.turn()
    rig.submit(100, 1)
    before = len(rig.tokens[0, short, 0])
    for _ in range(10):
        rig.turn()
    assert len(rig.tokens[0, short, 0]) == before + 10


@LOOPS
def test_prompts_first_where_they_fill_a_step(overlap: bool) -> None:
    """Then all decode together; what does not fill a step shares one with those that decode."""
    rig = Rig(overlap=overlap, blocks=200, rows=10, max_num_batched_tokens=16, prompts_first=True)
    for _ in range(13):
        rig.submit(8, 20)
    rig.run(turns=1000)
    decodes = [sum(ids is None for ids in plan.ids) for plan in rig.plans]
    assert decodes[:5] == [0] * 5, "ten rows, two prompts a step"
    assert decodes[5:24] == [10] * 19
    assert [prefill_tokens(plan) for plan in rig.plans[:6]] == [16] * 5 + [0]
    assert sum(map(prefill_tokens, rig.plans[24:])) == 3 * 8
    rig.check_tokens()


@LOOPS
def test_prompts_without_rows_or_memory_hold_nobody_up(overlap: bool) -> None:
    rig = Rig(overlap=overlap, blocks=16, rows=8, max_num_batched_tokens=16, prompts_first=True)
    for _ in range(12):
        rig.submit(9, 12)
    rig.run(turns=2000)
    both = [plan for plan in rig.plans if prefill_tokens(plan) and None in plan.ids]
    assert both, "a step with both"
    rig.check_tokens()
    rig.check_idle()


def test_columns_of_a_chunked_prompt() -> None:
    rig = Rig(max_num_batched_tokens=8)
    rig.submit(list(range(20)), 2)
    rig.run()
    plans = rig.plans
    assert [plan.starts for plan in plans] == [[0], [8], [16], [20]]
    assert [plan.ids for plan in plans[:3]] == [
        [list(range(8))],
        [list(range(8, 16))],
        [[16, 17, 18, 19]],
    ]
    assert plans[3].ids == [None]
    assert [plan.draw_into for plan in plans] == [[], [], plans[0].rows, plans[0].rows]
    assert [len(plan.joins) for plan in plans] == [1, 0, 0, 0]


@LOOPS
def test_nothing_is_planned_past_max_tokens(overlap: bool) -> None:
    rig = Rig(overlap=overlap)
    rig.submit(6, 5)
    rig.submit(6, 1)
    rig.run()
    assert sum(sum(plan.counts) for plan in rig.plans) == (6 + 4) + 6
    assert sum(len(plan.draw_into) for plan in rig.plans) == 5 + 1


# ---------------------------------------------------------------- rows and n


@LOOPS
def test_n_counts_as_n_rows(overlap: bool) -> None:
    rig = Rig(rows=4, overlap=overlap, eos=(), max_num_batched_tokens=64)
    rig.submit(4, 6, n=3)
    rig.submit(4, 6, n=2)
    rig.submit(4, 6)
    rig.turn()
    assert rig.engine.stats().running == 1  # 3 of 4 rows; the next needs 2 and nobody overtakes
    rig.run()
    rig.check_tokens()
    assert first_tokens(rig)[:3] == [1, 1, 1]


def test_n_choices_are_drawn_from_one_forward_row() -> None:
    rig = Rig(max_num_batched_tokens=8)
    rig.submit(13, 3, n=3, sampling=Sampling(seed=5))
    rig.run()
    assert [len(plan.rows) for plan in rig.plans] == [1, 1, 3, 3]
    assert rig.plans[1].draw_from == [0, 0, 0]
    assert len(set(rig.plans[1].draw_into)) == 3
    assert [join.choice for plan in rig.plans for join in plan.joins] == [0, 1, 2]
    assert len(rig.plans[2].copies[0]) == 2  # 13 = 3 blocks and a token: two copies, one keeps it
    rig.check_tokens()


def test_choices_of_a_prompt_of_whole_blocks_copy_nothing() -> None:
    rig = Rig()
    rig.submit(8, 3, n=3, sampling=Sampling(seed=5))
    rig.run()
    assert not any(plan.copies[0] for plan in rig.plans)
    rig.check_tokens()


# ---------------------------------------------------------------- prefix cache


@LOOPS
def test_a_cached_prompt_computes_only_the_rest(overlap: bool) -> None:
    rig = Rig(overlap=overlap)
    prompt = list(range(18))
    first = rig.submit(prompt, 3)
    rig.run()
    rig.plans.clear()
    second = rig.submit(prompt, 3)
    rig.run()
    assert rig.plans[0].starts == [16]
    assert rig.plans[0].unwritten == []
    assert [rig.dones[0, h].cached_tokens for h in (first, second)] == [0, 16]
    assert rig.tokens[0, first, 0] == rig.tokens[0, second, 0]


@LOOPS
def test_a_prompt_that_reports_reads_no_cache_but_fills_it(overlap: bool) -> None:
    rig = Rig(overlap=overlap, max_num_batched_tokens=8)
    prompt = list(range(21))
    for top in (3, 0, -1):
        rig.submit(prompt, 2, prompt_logprobs=top)
        rig.run()
    assert [done.cached_tokens for done in rig.dones.values()] == [0, 0, 20]
    reporting = [plan for plan in rig.plans if plan.prompts]
    assert [plan.prompts for plan in reporting[:3]] == [[(0, 3, 8)], [(0, 3, 16)], [(0, 3, -1)]]
    assert len(reporting) == 6
    for plan in reporting:
        assert plan.outputs == [Output.PROMPT_LOGPROBS]
    rig.check_tokens()


@LOOPS
def test_a_report_is_not_repeated_after_a_preemption(overlap: bool) -> None:
    rig = priority_rig(rows=1, overlap=overlap, max_num_batched_tokens=8)
    low = rig.submit(list(range(40)), 4, prompt_logprobs=2, priority=1)
    rig.turn()
    rig.turn()
    rig.submit(9, 2, priority=0)
    rig.run()
    assert rig.dones[0, low].preemptions == 1
    assert len(rig.prompts[0, low]) == 39
    rig.check_tokens()
    rig.check_idle()


@LOOPS
@pytest.mark.parametrize("n", [1, 3])
def test_a_fully_cached_prompt_computes_its_last_token_unwritten(overlap: bool, n: int) -> None:
    rig = Rig(overlap=overlap)
    prompt = list(range(16))
    rig.submit(prompt, 6, n=n)
    rig.run()
    rig.plans.clear()
    rig.submit(prompt, 6, n=n)
    rig.run()
    first = rig.plans[0]
    assert (first.starts, first.counts, first.ids) == ([15], [1], [[15]])
    assert first.unwritten == [0]
    assert not any(plan.unwritten for plan in rig.plans[1:])
    assert not any(plan.copies[0] for plan in rig.plans)
    rig.check_tokens()
    assert rig.dones[0, 2].cached_tokens == 16


def test_salts_and_adapters_never_share() -> None:  # B079, B080
    rig = Rig()
    prompt = list(range(40))
    cached = []
    for salt, adapter in [("s1", ""), ("s1", ""), ("s2", ""), ("", ""), ("", "X"), ("", "Y")]:
        handle = rig.submit(prompt, 2, cache_salt=salt, adapter=adapter)
        rig.run()
        cached.append(rig.dones[0, handle].cached_tokens)
    assert cached == [0, 40, 0, 0, 0, 0]
    rig.check_tokens()  # the fake model's KV depends on the adapter, too


@LOOPS
def test_a_conversation_hits_its_own_answers(overlap: bool) -> None:
    rig = Rig(overlap=overlap)
    first = rig.submit(10, 11)
    rig.run()
    history = rig.submits[0, first].prompt + rig.tokens[0, first, 0]
    second = rig.submit([*history, 1, 2, 3], 2)
    rig.run()
    assert rig.dones[0, second].cached_tokens == 20  # 20 of 21 tokens were computed: 5 blocks
    rig.check_tokens()


# ---------------------------------------------------------------- memory


@LOOPS
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_no_thrashing_at_105_percent(overlap: bool, prefix_caching: bool) -> None:
    """20 sequences at once that need 105 % of the pool together, in lockstep: the worst case."""
    draw = random.Random(1)
    each = (32 + 96 - 1) // 4 + 1
    rig = Rig(
        int(20 * each / 1.05), 4, 20, overlap=overlap, prefix_caching=prefix_caching, max_queue=999
    )
    for _ in range(60):
        rig.submit([draw.randrange(256) for _ in range(32)], 96)
    rig.run()
    rig.check_tokens()
    rig.check_idle()
    stats = rig.engine.stats()
    useful = stats.prompt_tokens + stats.generation_tokens
    assert 0 < stats.preemptions <= 12
    assert stats.recomputed_tokens <= 0.1 * useful
    assert stats.steps <= 1.15 * (60 / 20) * 97


def test_preemption_takes_the_newest_and_keeps_its_output() -> None:
    rig = Rig(blocks=10, block_size=2, rows=3, prefix_caching=False)
    for _ in range(3):
        rig.submit(4, 10)
    rig.run()
    rig.check_tokens()
    rig.check_idle()
    preempted = [rig.dones[0, handle].preemptions for handle in (1, 2, 3)]
    assert preempted[0] == 0
    assert preempted[2] >= 1
    assert [d.output_tokens for d in rig.dones.values()] == [10, 10, 10]
    assert sum(preempted) == rig.engine.stats().preemptions
    assert rig.engine.stats().recomputed_tokens > 0


def test_overlap_preempts_no_more_than_it_must() -> None:
    """Memory behind the fence comes back a step later: it is waited for, not taken twice."""
    counts = []
    for overlap in (False, True):
        rig = Rig(blocks=16, block_size=2, rows=4, prefix_caching=False, overlap=overlap)
        for _ in range(4):
            rig.submit(4, 12)
        rig.run()
        rig.check_tokens()
        counts.append(rig.engine.stats().preemptions)
    assert counts[0] == counts[1] > 0


def test_a_large_head_of_the_queue_is_not_overtaken() -> None:
    rig = Rig(blocks=16, block_size=4, rows=4)
    rig.submit(8, 30)
    rig.turn()
    large = rig.submit(58, 4)
    small = rig.submit(4, 4)
    rig.run()
    assert first_tokens(rig) == [1, large, small]


@LOOPS
def test_what_fills_the_whole_pool_runs(overlap: bool) -> None:
    rig = Rig(blocks=4, block_size=4, rows=2, overlap=overlap)
    for _ in range(3):
        rig.submit(10, 7)  # 16 tokens are computed: exactly the pool
    rig.submit(1, 16, n=2)
    rig.run()
    rig.check_tokens()
    rig.check_idle()
    assert all(done.error == "" for done in rig.dones.values())


# ---------------------------------------------------------------- static


@LOOPS
def test_static_batches_run_to_their_end(overlap: bool) -> None:
    rig = Rig(rows=3, scheduling_policy="static", overlap=overlap, max_num_batched_tokens=8)
    for i in range(7):
        rig.submit(9, 3 + i * 2)
    seen: list[set[int]] = []
    while rig.engine.has_work:
        rig.turn()
        running = {s.handle for s in rig.engine.scheduler.running if s.row >= 0}
        if running and not (seen and running <= seen[-1]):
            seen.append(running)
    assert seen == [{1, 2, 3}, {4, 5, 6}, {7}]
    rig.check_tokens()
    rig.check_idle()


# ---------------------------------------------------------------- history


@LOOPS
def test_history_goes_only_with_rows_that_look_back(overlap: bool) -> None:
    """At admission, for each choice of a fork, and at a resumption with all that was drawn."""
    rig = Rig(blocks=14, overlap=overlap, max_num_batched_tokens=16)
    penalised = Sampling(seed=3, repetition=Repetition(1.4, 0.3, 0.1))
    rig.submit(9, 20)
    rig.submit(6, 20, sampling=penalised, n=2)
    rig.submit(6, 20, sampling=Sampling(seed=4, rules=Rules(min_tokens=3, held=[101])))
    rig.run()
    joins = [join for plan in rig.plans for join in plan.joins]
    assert sum(done.preemptions for done in rig.dones.values()) > 0
    looking = [join for join in joins if join.sampling.needs_history]
    assert len(looking) > 2, "none of them was preempted"
    for join in joins:
        assert join.prompt_tokens == (9 if join.sampling.temperature == 0 else 6)
        if join.sampling.needs_history:
            drawn = rig.tokens[0, 2, join.choice]
            prompt = rig.submits[0, 2].prompt
            assert join.history == (prompt + drawn)[: len(join.history)]
            assert len(join.history) >= 6
        else:
            assert join.history == []
    rig.check_tokens()
    rig.check_idle()
