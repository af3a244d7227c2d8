"""Priority: whose turn it is, who gives way, and that nobody starves."""

from __future__ import annotations

from tests.unit.engine_rig import LOOPS, first_tokens, priority_rig


@LOOPS
def test_lower_numbers_go_first(overlap: bool) -> None:
    rig = priority_rig(rows=1, overlap=overlap)
    handles = [rig.submit(3, 2, priority=priority) for priority in (2, 0, 1, -1, 0)]
    rig.run()
    assert first_tokens(rig) == [handles[i] for i in (3, 1, 4, 2, 0)]


@LOOPS
def test_a_strictly_better_class_takes_a_row(overlap: bool) -> None:
    rig = priority_rig(overlap=overlap)
    rig.submit(4, 20, priority=1)
    worst = rig.submit(4, 20, priority=2)
    for _ in range(4):
        rig.turn()
    urgent = rig.submit(4, 3, priority=0)
    rig.turn()
    rig.turn()
    assert (0, urgent, 0) in rig.tokens
    rig.run()
    rig.check_tokens()
    rig.check_idle()
    assert [rig.dones[0, h].preemptions for h in (1, worst, urgent)] == [0, 1, 0]
    assert next(iter(rig.dones)) == (0, urgent)


@LOOPS
def test_a_strictly_better_class_takes_memory(overlap: bool) -> None:
    rig = priority_rig(rows=8, blocks=12, overlap=overlap)
    low = [rig.submit(12, 8, priority=1) for _ in range(2)]
    for _ in range(3):
        rig.turn()
    urgent = rig.submit(30, 2, priority=0)
    for _ in range(3):
        rig.turn()
    assert (0, urgent, 0) in rig.tokens
    assert not any((0, handle) in rig.dones for handle in low)
    rig.run()
    rig.check_tokens()
    assert rig.dones[0, urgent].preemptions == 0
    assert rig.dones[0, low[1]].preemptions >= 1


@LOOPS
def test_an_equal_class_never_takes_a_place(overlap: bool) -> None:
    rig = priority_rig(overlap=overlap)
    for _ in range(2):
        rig.submit(4, 30, priority=1)
    rig.turn()
    for _ in range(5):
        rig.submit(4, 3, priority=1)
        rig.submit(4, 3, priority=2)
    rig.run()
    assert rig.engine.stats().preemptions == 0
    assert {(0, 1), (0, 2)} == set(list(rig.dones)[:2])


def test_nobody_is_preempted_in_vain() -> None:
    """A better one that would not fit even then leaves the others alone."""
    rig = priority_rig(rows=3, blocks=16)
    rig.submit(20, 20, priority=0)
    rig.submit(4, 20, priority=1)
    rig.turn()
    rig.submit(4, 4, priority=0, n=3)  # needs three rows; only one of the two is worse
    rig.submit(40, 4, priority=0)  # behind it, and too large for what the worse one holds
    rig.turn()
    assert rig.engine.stats().preemptions == 0
    rig.submit(44, 4, priority=-1)  # 11 blocks: both are worse, both are needed
    rig.turn()
    assert rig.engine.stats().preemptions == 2
    rig.run()
    rig.check_tokens()


def test_waiting_too_long_is_admitted_next_but_preempts_nobody() -> None:
    rig = priority_rig(rows=1, max_wait_s=10.0)
    rig.submit(4, 8, priority=0)
    rig.turn()
    aged = rig.submit(4, 8, priority=5)
    rig.clock.now += 11
    others = [rig.submit(4, 8, priority=1) for _ in range(3)]
    rig.turn()
    assert rig.engine.stats().preemptions == 0
    while (0, aged) not in rig.dones:
        rig.turn()
    assert first_tokens(rig) == [1, aged]
    rig.run()
    assert first_tokens(rig)[2:] == others


@LOOPS
def test_no_class_starves_under_a_flood_of_a_better_one(overlap: bool) -> None:
    rig = priority_rig(rows=2, max_wait_s=5.0, max_queue=10_000, overlap=overlap)
    low = [rig.submit(4, 6, priority=9) for _ in range(4)]
    for _ in range(150):
        rig.clock.now += 0.25
        rig.submit(4, 6, priority=0)
        rig.submit(4, 6, priority=0)
        rig.turn()
    assert all((0, handle) in rig.dones for handle in low), "still waiting"
    waits = [rig.dones[0, handle].queue_s for handle in low]
    assert max(waits) <= 5.0 + 12.0
    rig.run()
    rig.check_tokens()


def test_when_all_have_aged_every_second_admission_still_goes_by_class() -> None:
    rig = priority_rig(rows=1, max_wait_s=1.0, max_num_batched_tokens=64)
    for _ in range(6):
        rig.submit(4, 2, priority=5)
    rig.clock.now += 2
    urgent = [rig.submit(4, 2, priority=0) for _ in range(3)]
    rig.run()
    order = [handle in urgent for handle in first_tokens(rig)]
    assert order[:6] == [False, True, False, True, False, True]
