"""WaitQueue: two orders, lazy removal that does not leak."""

from __future__ import annotations

from headrace.engine.queue import WaitQueue
from headrace.engine.request import Request, Sequence
from headrace.kv.cache import KVCache
from headrace.messages import Submit

KV = KVCache(1, 1)


def sequence(arrival: int, priority: int = 0, n: int = 1) -> Sequence:
    submit = Submit(arrival, [1], 1, n=n, priority=priority)
    return Request(0, submit, arrival, 0.0, "priority", KV.open("", "")).sequences[0]


def test_by_key_and_by_time() -> None:
    queue = WaitQueue()
    low, urgent, late = sequence(1, 5), sequence(2, 0), sequence(3, 5, n=3)
    for now, one in enumerate([low, urgent, late]):
        queue.push(one, now)
    assert (len(queue), queue.rows) == (3, 5)
    assert queue.first() is urgent
    assert queue.oldest() == (low, 0)
    queue.remove(low)
    assert queue.oldest() == (urgent, 1)
    queue.remove(urgent)
    assert queue.first() is late
    queue.push(urgent, 9.0)  # back again: its old entries count no more
    assert queue.first() is urgent
    assert queue.oldest() == (late, 2)
    queue.remove(late)
    assert queue.oldest() == (urgent, 9.0)
    queue.remove(urgent)
    assert queue.first() is None
    assert queue.oldest() is None
    assert (len(queue), queue.rows) == (0, 0)


def test_removed_entries_do_not_pile_up() -> None:
    queue = WaitQueue()
    keep = sequence(0)
    queue.push(keep, 0.0)
    for arrival in range(1, 5000):
        one = sequence(arrival)
        queue.push(one, float(arrival))
        queue.remove(one)
    assert len(queue._by_key) + len(queue._by_time) < 100
    assert queue.first() is keep
