"""Who goes first, who must give way: pure functions over order keys.

An order key is (class, arrival, choice); the smaller goes first. fcfs and static have one class;
the priority policy's class is the request's priority (lower = more urgent).
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from typing import Literal, TypeVar

Policy = Literal["fcfs", "priority", "static"]
Key = tuple[int, int, int]
T = TypeVar("T")

PROMOTED = -(2**63)  # before every priority


def order_key(policy: Policy, priority: int, arrival: int, choice: int) -> Key:
    """The place of one sequence; `arrival` numbers the submits."""
    return (priority if policy == "priority" else 0, arrival, choice)


def promoted(key: Key) -> Key:
    """The key of a sequence that was admitted because it had waited too long.

    It belongs to the most urgent class from then on, so no later arrival takes its place.
    """
    return (PROMOTED, *key[1:])


def victim(ordered: Ordered[T]) -> T:
    """Who gives up its memory, of those that run in key order: the newest, or the worst class."""
    return ordered[-1]


def may_preempt(waiter: Key, runner: Key) -> bool:
    """A waiter takes the place of a runner only from a strictly better class."""
    return waiter[0] < runner[0]
