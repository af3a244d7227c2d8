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
