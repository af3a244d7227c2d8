"""Engine on the fake runner, both loops: tokens, ends, dones."""

from __future__ import annotations

import pytest

from headrace.messages import Sampling
from tests.unit.engine_rig import Rig

LOOPS = pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])


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
