"""Engine on the fake runner, both loops: tokens, ends, dones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from headrace.backends.choose import settled
from headrace.backends.fake import FakeRunner, reference
from headrace.config import Settings
from headrace.engine.loop import Engine
from headrace.engine.protocol import StepCost
from headrace.engine.stats import StepTimes
from headrace.kv.cache import KVCache
from headrace.messages import Done, Rules, Sampling, StepPlan, Submit
from tests.unit.engine_rig import GREEDY, LOOPS, Rig


@LOOPS
@pytest.mark.parametrize("chunk", [8, 9, 16, 64, 256])
def test_many_requests_give_the_reference_tokens(overlap: bool, chunk: int) -> None:
    rig = Rig(overlap=overlap, max_num_batched_tokens=chunk)
    for i in range(30):
        rig.submit(1 + i * 3 % 40, 1 + i % 9, owner=i % 3)
    rig.run()
    rig.check_tokens()
    rig.check_idle()
    for key, submit in rig.submits.items():
        done = rig.dones[key]
        assert (done.error, done.prompt_tokens) == ("", len(submit.prompt))
        assert done.output_tokens == submit.max_tokens == len(rig.tokens[(*key, 0)])
        assert rig.ends[(*key, 0)].reason == "length"


@LOOPS
def test_choices_share_the_prompt_and_part_ways(overlap: bool) -> None:
    rig = Rig(overlap=overlap)
    for prompt in (5, 8, 1, 11):
        rig.submit(prompt, 12, n=3, sampling=Sampling(seed=prompt))
    rig.run()
    rig.check_tokens()
    rig.check_idle()
    assert rig.dones[0, 1].output_tokens == 36
    assert len({tuple(rig.tokens[0, 1, choice]) for choice in range(3)}) == 3
    assert any(plan.copies[0] for plan in rig.plans)


@LOOPS
def test_both_loops_agree_with_tiny_memory_and_every_kind_of_request(overlap: bool) -> None:
    rig = Rig(blocks=30, block_size=4, rows=6, overlap=overlap, eos=(258,), max_queue=999)
    for i in range(40):
        rig.submit(1 + i * 5 % 30, 30, n=1 + i % 3, sampling=Sampling(seed=i), stop_ids=[258])
    rig.run()
    rig.check_tokens()
    rig.check_idle()
    assert rig.engine.stats().preemptions > 0
    assert {end.reason for end in rig.ends.values()} == {"stop", "length"}


# ---------------------------------------------------------------- ends


@LOOPS
def test_a_stop_id_ends_the_choice_and_is_sent(overlap: bool) -> None:
    rig = Rig(overlap=overlap)
    prompt = [1, 2, 3]
    want = reference(prompt, GREEDY, 0, 30, eos=None)
    stop = want[8]
    length = want.index(stop) + 1
    rig.submit(prompt, 30, stop_ids=[stop])
    rig.submit(prompt, length, stop_ids=[stop])  # stop and length at once: it stopped
    rig.run()
    for handle in (1, 2):
        end = rig.ends[0, handle, 0]
        assert (end.reason, end.stop_id) == ("stop", stop)
        assert rig.tokens[0, handle, 0] == want[:length]
        assert rig.dones[0, handle].output_tokens == length
    rig.check_idle()


@LOOPS
def test_the_token_past_a_stop_never_enters_the_prefix_index(overlap: bool) -> None:
    rig = Rig(overlap=overlap, block_size=1)
    prompt = [1, 2, 3]
    want = reference(prompt, GREEDY, 0, 3, eos=None)
    rig.submit(prompt, 30, stop_ids=[want[2]])
    rig.run()
    rig.check_idle()
    end = want.index(want[2])
    assert len(rig.kv._index) == len(prompt) + end  # the stop token itself was drawn only


@LOOPS
def test_finish_counts_to_the_match_and_overruns_at_most_two_steps(overlap: bool) -> None:
    rig = Rig(overlap=overlap)
    rig.submit(4, 50, n=2)
    while len(rig.tokens.get((0, 1, 0), [])) < 6:
        rig.turn()
    rig.finish(1, 0, 5)
    sent = len(rig.tokens[0, 1, 0])
    rig.turn()
    assert (rig.ends[0, 1, 0].reason, rig.ends[0, 1, 0].stop_id) == ("stop", -1)
    assert len(rig.tokens[0, 1, 0]) <= sent + 2
    rig.finish(1, 0, 3)  # again, and of a choice that ended: counts, ends nothing twice
    rig.finish(1, 7, 1)
    rig.finish(99, 0, 1)
    rig.run()
    assert rig.dones[0, 1].output_tokens == 3 + 50
    rig.check_tokens()
    rig.check_idle()


STAGES_OF_LIFE: dict[str, Callable[[Rig], bool]] = {
    "queued": lambda rig: True,
    "mid-prefill": lambda rig: any(0 < s.planned < s.base for s in rig.engine.scheduler.running),
    "decoding": lambda rig: len(rig.tokens.get((0, 2, 0), [])) > 3,
    "preempted": lambda rig: rig.engine.stats().preemptions > 0,
}


@LOOPS
@pytest.mark.parametrize("stage", STAGES_OF_LIFE)
def test_an_abort_takes_effect_within_one_step(stage: str, overlap: bool) -> None:  # B076, B077
    rig = Rig(blocks=14, rows=3, overlap=overlap, max_num_batched_tokens=8, prefix_caching=False)
    for _ in range(3):
        rig.submit(15, 25, n=1)
    while not STAGES_OF_LIFE[stage](rig):
        rig.turn()
    for handle in (1, 2, 3):
        rig.abort(handle)
    rig.turn()
    stats = rig.engine.stats()
    assert stats.running == stats.waiting == 0
    assert stats.finished["abort"] == 3
    assert {end.reason for end in rig.ends.values()} == {"abort"}
    rig.abort(1)  # unknown now: ignored
    rig.run(turns=2)
    rig.check_idle()
    assert len(rig.plans) <= stats.steps + 1


@LOOPS
def test_an_abort_before_the_fork_ends_every_choice(overlap: bool) -> None:
    rig = Rig(overlap=overlap, max_num_batched_tokens=8)
    rig.submit(30, 5, n=3)
    rig.turn()
    rig.abort(1)
    rig.run()
    assert sorted(rig.ends) == [(0, 1, 0), (0, 1, 1), (0, 1, 2)]
    assert rig.dones[0, 1] == Done(1, prompt_tokens=30, queue_s=0.0)
    rig.check_idle()


@LOOPS
def test_a_dropped_owner_hears_nothing_and_holds_nothing(overlap: bool) -> None:
    rig = Rig(overlap=overlap, rows=2)
    for owner in (0, 1, 0, 1):
        rig.submit(5, 20, owner=owner)
    for _ in range(4):
        rig.turn()
    rig.engine.drop_owner(1)
    rig.engine.drop_owner(5)
    while rig.engine.has_work:
        assert set(rig.turn()) <= {0}
    assert set(rig.dones) == {(0, 1), (0, 3)}
    assert rig.engine.stats().finished == {
        "stop": 0,
        "length": 2,
        "abort": 2,
        "error": 0,
        "refused": 0,
    }
    rig.check_idle()


# ---------------------------------------------------------------- refusals


def test_what_can_never_run_is_refused_at_once_with_both_numbers() -> None:
    rig = Rig(blocks=8, block_size=4, rows=2, max_model_len=64)
    cases: list[tuple[int, dict[str, Any], str, str]] = [
        (60, {"max_tokens": 5}, "context_length_exceeded", "60 prompt tokens + max_tokens 5 = 65"),
        (30, {"max_tokens": 4}, "context_length_exceeded", "= 34 exceed the KV cache of 32 tokens"),
        (4, {"n": 3}, "invalid_request", "n = 3 is over 2"),
        (0, {}, "invalid_request", "0 prompt tokens"),
        (4, {"max_tokens": -1}, "invalid_request", "max_tokens -1"),
        (64, {"max_tokens": 0}, "context_length_exceeded", "= 64 exceed the KV cache of 32 tokens"),
        (65, {"max_tokens": 0}, "context_length_exceeded", "65 prompt tokens + max_tokens 0 = 65"),
        (4, {"n": 0}, "invalid_request", "n 0"),
    ]
    for prompt, fields, _, _ in cases:
        rig.submit(prompt, **fields)
    rig.submit([5, 259], 1)
    rig.submit([-1], 1)
    told = rig.turn()[0].dones
    for done, (_, _, code, text) in zip(told, cases, strict=False):
        assert done.error == code
        assert text in done.message
    assert [done.error for done in told[-2:]] == ["invalid_request"] * 2
    assert "the vocabulary has 259" in told[-1].message
    assert rig.engine.stats().finished["refused"] == 10
    rig.submit(30, 3)  # 32 tokens are computed: it fits exactly
    rig.submit(32, 0)  # so it does where none is drawn
    rig.run()
    assert rig.dones[0, 11].error == rig.dones[0, 12].error == ""
    rig.check_idle()


@LOOPS
def test_where_nothing_is_drawn_a_prompt_may_fill_the_context(overlap: bool) -> None:
    rig = Rig(blocks=17, block_size=4, rows=2, max_model_len=64, overlap=overlap)
    prompt = [i % 7 for i in range(64)]
    scored = rig.submit(prompt, 0, n=2, prompt_logprobs=0)  # of two choices one has rows
    kept = rig.submit(prompt, 0)
    rig.run()
    rig.check_tokens()
    assert not rig.tokens
    assert not any(plan.draw_from for plan in rig.plans)
    assert len(rig.prompts[0, scored]) == 63
    assert {key: end.reason for key, end in rig.ends.items()} == {
        (0, scored, 0): "length",
        (0, scored, 1): "length",
        (0, kept, 0): "length",
    }
    again = rig.submit([*prompt[:62], 8], 1)  # what was computed is in the cache
    rig.run()
    assert rig.dones[0, again].cached_tokens == 60
    assert rig.dones[0, kept].output_tokens == 0
    stats = rig.engine.stats()
    assert (stats.generation_tokens, stats.finished["length"]) == (1, 3)
    rig.check_idle()


@LOOPS
def test_rules_that_leave_no_token_are_no_matter_where_none_is_drawn(overlap: bool) -> None:
    rig = Rig(overlap=overlap)
    none = Sampling(temperature=0.0, rules=Rules(allowed=[5], banned=[5]))
    rig.submit(6, 0, sampling=none, prompt_logprobs=1)
    rig.run()
    assert rig.dones[0, 1].error == ""
    rig.check_idle()


def test_a_full_queue_refuses_and_counts_only_those_that_wait() -> None:
    rig = Rig(rows=2, max_queue=3)
    for _ in range(5):  # two can start at once, three may wait
        rig.submit(4, 20)
        rig.turn()
    refused = rig.submit(4, 6)
    out = rig.turn()[0]
    assert [done.handle for done in out.dones] == [refused]
    assert out.dones[0].error == "queue_full"
    assert "max_queue is 3" in out.dones[0].message
    rig.abort(5)
    accepted = rig.submit(4, 6)
    rig.run()
    assert rig.dones[0, accepted].error == ""
    rig.check_idle()


@pytest.mark.parametrize("policy", ["fcfs", "priority", "static"])
def test_max_queue_zero_serves_what_can_start_now(policy: str) -> None:
    rig = Rig(rows=2, max_queue=0, scheduling_policy=policy)
    for _ in range(3):
        rig.submit(4, 3)
    rig.run()
    assert [rig.dones[0, h].error for h in (1, 2, 3)] == ["", "", "queue_full"]
    again = rig.submit(4, 3)
    rig.run()
    assert rig.dones[0, again].error == ""


def test_a_live_handle_is_not_replaced() -> None:
    rig = Rig()
    rig.submit([1, 2], 3)
    rig.engine.submit(0, Submit(1, [9], 3))
    rig.engine.submit(1, Submit(1, [1, 2], 3, sampling=GREEDY))  # another owner's 1
    out = rig.engine.turn()
    assert [(d.handle, d.error) for d in out[0].dones] == [(1, "invalid_request")]
    assert "handle 1 is already live" in out[0].dones[0].message
    rest = [rig.engine.turn() for _ in range(3)]
    done = [(owner, d.error) for told in rest for owner, o in told.items() for d in o.dones]
    assert sorted(done) == [(0, ""), (1, "")]
    assert rig.engine.stats().started == 3


# ---------------------------------------------------------------- numbers


@LOOPS
def test_counters_only_rise_and_the_books_balance(overlap: bool) -> None:  # B085, B086
    rig = Rig(blocks=26, rows=6, overlap=overlap, max_queue=999)
    gauges = {"running", "waiting", "kv_used", "kv_blocks"}
    before = rig.engine.stats()
    for i in range(25):
        rig.submit(list(range(i % 2, 20 + i % 2)), 16, n=1 + i % 2, owner=i % 2)
        if i % 4 == 0:
            rig.abort(i + 1, owner=i % 2)
        rig.turn()
        stats = rig.engine.stats()
        for name in stats.__struct_fields__:
            old, new = getattr(before, name), getattr(stats, name)
            if name in ("finished", "runner", "kv_events"):
                assert all(new[key] >= old[key] for key in old)
            elif name not in gauges:
                assert new >= old, name
        before = stats
    rig.run()
    stats = rig.engine.stats()
    assert min(stats.preemptions, stats.recomputed_tokens, stats.cached_tokens) > 0
    assert stats.finished["abort"] == 7
    assert stats.generation_tokens == sum(map(len, rig.tokens.values()))
    assert stats.started == sum(stats.finished.values()) == 25
    assert stats.cached_tokens == sum(done.cached_tokens for done in rig.dones.values())
    rig.check_idle()


def test_times_of_a_request() -> None:
    rig = Rig(max_num_batched_tokens=8, rows=1)
    rig.submit(12, 3)
    rig.submit(4, 1)
    while rig.engine.has_work:
        rig.clock.now += 1
        rig.turn()
    first, second = rig.dones[0, 1], rig.dones[0, 2]
    assert (first.queue_s, first.prefill_s, first.decode_s) == (1.0, 1.0, 2.0)
    assert (second.queue_s, second.prefill_s, second.decode_s) == (5.0, 0.0, 0.0)


@LOOPS
def test_stats_carry_what_the_runner_counts(overlap: bool) -> None:
    class Counting(FakeRunner):
        def counters(self) -> Mapping[str, int]:
            return {"steps": self._step}

    fake = Counting(16, 4, 2, 64, eos_ids=())
    engine = Engine(settled(Settings(backend="fake")), KVCache(16, 4), fake, overlap=overlap)
    assert engine.stats().runner == {"steps": 0}
    engine.submit(0, Submit(1, [1, 2, 3], 4, GREEDY))
    while engine.has_work:
        engine.turn()
    assert engine.stats().runner == {"steps": engine.stats().steps} == {"steps": 4}
    engine.close()


@LOOPS
def test_what_a_runner_puts_off_is_done_while_there_is_no_work(overlap: bool) -> None:
    class Later(FakeRunner):
        left = 2

        def idle(self) -> bool:
            assert not self._in_flight
            self.left -= self.left > 0
            return self.left > 0

    fake = Later(16, 4, 2, 64, eos_ids=())
    engine = Engine(settled(Settings(backend="fake")), KVCache(16, 4), fake, overlap=overlap)
    assert engine.idle()
    engine.submit(0, Submit(1, [1, 2, 3], 4, GREEDY))
    with pytest.raises(AssertionError, match="there is work"):
        engine.idle()
    while engine.has_work:
        engine.turn()
    assert fake.left == 1
    assert not engine.idle()
    engine.close()


@LOOPS
def test_an_idle_engine_does_nothing(overlap: bool) -> None:
    fake = FakeRunner(4, 4, 2, 64)
    engine = Engine(settled(Settings(backend="fake")), KVCache(4, 4), fake, overlap=overlap)
    assert not engine.has_work
    assert engine.turn() == {}
    assert engine.stats().steps == 0
    engine.close()
    with pytest.raises(AssertionError, match="launch on a closed runner"):
        fake.launch(StepPlan(1, [], [], [], [[]], [], [], [], [], [], [], [], []))


@LOOPS
def test_who_was_preempted_comes_back_only_after_its_draw(overlap: bool) -> None:
    """Preempted with a draw in flight, aged at once, and a row is left over in the same plan."""
    rig = Rig(
        rows=4,
        overlap=overlap,
        scheduling_policy="priority",
        max_wait_s=0.0,
        max_num_batched_tokens=8,
    )
    decoding = rig.submit(5, 20, priority=2)
    for _ in range(4):
        rig.turn()
    rig.submit(40, 4, priority=1, n=3)  # its prompt is long: it holds three rows and is not forked
    for _ in range(2):
        rig.turn()
    rig.submit(4, 4, priority=0, n=2)  # takes both places and leaves two of the four rows
    rig.run()
    rig.check_tokens()
    rig.check_idle()
    assert rig.dones[0, decoding].preemptions == 1


@LOOPS
def test_where_the_time_of_steps_goes(overlap: bool) -> None:
    """One word a step that was applied; a modelled device computes, and draws in no time."""
    rig, told = Rig(overlap=overlap, cost=StepCost(2e-5, 1e-5, 0, 0, 0, 1)), list[StepTimes]()
    rig.engine.watch(told.append)
    rig.submit(10, 3)
    rig.run()
    assert len(told) == len(rig.plans) == rig.engine.stats().steps
    assert [times.tokens for times in told] == [sum(plan.counts) for plan in rig.plans]
    assert [times.busy_s for times in told][:2] == pytest.approx([10e-5, 2e-5])
    assert {times.sample_s for times in told} == {0.0}
    assert all(min(times.plan_s, times.apply_s, times.wall_s) >= 0 for times in told)
