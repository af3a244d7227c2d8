"""What requests owe of the device's time: nothing vanishes, whatever becomes of them."""

from __future__ import annotations

import pytest

from headrace.engine.protocol import StepCost
from headrace.engine.shares import FS
from tests.unit.engine_rig import Rig

# A step reads weights for 10 ms, which is as long as 100 tokens take; 1000 tokens of KV take 1 ms.
COST = StepCost(floor_s=0.01, token_s=1e-4, base_s=0, pair_s=1e-7, read_s=1e-6, tile=1)


def rig(**fields: object) -> Rig:
    """An engine whose steps take modelled time, which passes at once."""
    made = Rig(cost=COST, **fields)  # type: ignore[arg-type]
    made.fake._sleep = lambda _: None
    return made


@pytest.mark.parametrize("overlap", [False, True])
def test_one_request_owes_all_there_is(overlap: bool) -> None:
    one = rig(overlap=overlap)
    handle = one.submit(20, 8)
    one.run()
    done, meter = one.dones[0, handle], one.engine.meter
    assert done.compute_s == meter.busy_fs / FS > 8 * COST.floor_s
    assert meter.carry_fs == meter.prepaid_fs == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_a_crowd_pays_what_the_device_worked(overlap: bool) -> None:
    one = rig(overlap=overlap)
    for length in (3, 40, 9, 60, 17):
        one.submit(length, 12)
    one.run()
    meter = one.engine.meter
    owed_fs = sum(round(done.compute_s * FS) for done in one.dones.values())
    assert owed_fs == pytest.approx(meter.busy_fs, rel=1e-12)
    assert meter.billed_fs == meter.busy_fs


@pytest.mark.parametrize("crowd", [2, 8])
def test_a_crowd_saves_its_members_what_batching_saves(crowd: int) -> None:
    """The same request alone and among others like it."""
    room = {"blocks": 256, "max_num_batched_tokens": 512}
    alone = rig(**room)
    handle = alone.submit(20, 30)
    alone.run()
    many = rig(**room)
    handles = [many.submit([i] * 20, 30) for i in range(crowd)]
    many.run()
    alone_s = alone.dones[0, handle].compute_s
    saved = crowd * alone.engine.meter.busy_fs / many.engine.meter.busy_fs
    for handle in handles:
        assert many.dones[0, handle].compute_s == pytest.approx(alone_s / saved, rel=0.02)


def test_an_abort_pays_for_the_step_in_flight() -> None:
    """Its row is prepaid at the rate before; what it really took goes to the next step."""
    one = rig(overlap=True)
    first, second = one.submit(20, 50), one.submit(30, 50)
    for _ in range(10):
        one.turn()
    one.abort(first)
    meter = one.engine.meter
    assert meter.prepaid_fs > 0
    one.run()
    assert meter.prepaid_fs == 0
    owed = one.dones[0, first].compute_s + one.dones[0, second].compute_s
    assert owed + meter.carry_fs / FS == pytest.approx(meter.busy_fs / FS, rel=1e-12)
    assert abs(meter.carry_fs) < meter.busy_fs / 1000


@pytest.mark.parametrize("overlap", [False, True])
def test_what_is_computed_again_is_billed_and_named(overlap: bool) -> None:
    one = rig(blocks=12, overlap=overlap)
    handles = [one.submit(8, 24) for _ in range(3)]
    one.run()
    dones = [one.dones[0, handle] for handle in handles]
    assert sum(done.preemptions for done in dones) > 0, "the pool was meant to be too small"
    for done in dones:
        assert (done.recompute_s > 0) == (done.preemptions > 0)
        assert done.recompute_s < done.compute_s
    assert one.engine.meter.billed_fs == one.engine.meter.busy_fs


def test_an_owner_that_is_gone_leaves_what_nobody_wrote_down() -> None:
    one = rig(overlap=True)
    one.submit(20, 50, owner=1)
    stays = one.submit(20, 20, owner=2)
    for _ in range(5):
        one.turn()
    one.engine.drop_owner(1)
    one.run()
    stats, meter = one.engine.stats(), one.engine.meter
    assert stats.unclaimed_s > 0
    told_s = one.dones[2, stays].compute_s
    rest_s = meter.carry_fs / FS
    assert told_s + stats.unclaimed_s + rest_s == pytest.approx(stats.busy_s, rel=1e-12)


def test_a_prompt_found_in_the_cache_costs_less() -> None:
    one = rig(blocks=64)
    prompt = [7] * 48
    first = one.submit(prompt, 1)
    one.run()
    again = one.submit(prompt, 1)
    one.run()
    assert one.dones[0, again].compute_s <= one.dones[0, first].compute_s
    assert one.dones[0, again].cached_tokens > 0
