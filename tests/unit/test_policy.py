"""Order, victims and who may preempt: pure functions."""

from __future__ import annotations

from headrace.engine.policy import may_preempt, order_key, promoted, victim


def test_fcfs_is_order_of_arrival_and_has_one_class() -> None:
    early, late = order_key("fcfs", 9, 1, 0), order_key("fcfs", 0, 2, 0)
    assert early < late
    assert victim(sorted([late, early])) == late
    assert not may_preempt(early, late)
    assert not may_preempt(late, early)


def test_priority_is_class_then_arrival_then_choice() -> None:
    keys = [
        order_key("priority", priority, arrival, choice)
        for priority, arrival, choice in [(-1, 5, 0), (0, 1, 0), (0, 1, 1), (0, 4, 0), (2, 0, 0)]
    ]
    assert keys == sorted(keys)
    assert victim(keys) == keys[-1]


def test_only_a_strictly_better_class_preempts() -> None:
    urgent, normal, later = (order_key("priority", p, a, 0) for p, a in [(0, 9), (1, 1), (1, 2)])
    assert may_preempt(urgent, normal)
    assert not may_preempt(normal, later)
    assert not may_preempt(normal, urgent)


def test_the_promoted_are_safe_from_every_class() -> None:
    aged = promoted(order_key("priority", 7, 3, 1))
    assert aged[1:] == (3, 1)
    assert not may_preempt(order_key("priority", -(2**40), 0, 0), aged)
