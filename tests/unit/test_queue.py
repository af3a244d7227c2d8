"""WaitQueue: two orders, lazy removal that does not leak."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

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


def test_who_is_set_aside_is_passed_over_and_comes_back_in_its_place() -> None:
    queue = WaitQueue()
    best, next_best, old, worst = sequence(4, 0), sequence(5, 1), sequence(1, 7), sequence(6, 9)
    for now, one in enumerate([old, worst, best, next_best]):
        queue.push(one, now)
    queue.set_aside(best)
    assert queue.first() is next_best
    queue.set_aside(old)
    queue.set_aside(next_best)
    assert queue.first() is worst
    assert queue.oldest() == (worst, 1)
    assert (len(queue), queue.rows) == (4, 4), "they wait"
    queue.remove(next_best)  # it ended
    queue.restore()
    assert queue.first() is best
    assert queue.oldest() == (old, 0)
    left = []
    while (head := queue.first()) is not None:
        left.append(head)
        queue.remove(head)
    assert left == [best, old, worst]
    assert queue.oldest() is None


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["push", "push", "remove", "aside", "restore"]), st.integers(0, 9)
        ),
        max_size=60,
    )
)
def test_both_orders_whatever_is_set_aside(steps: list[tuple[str, int]]) -> None:
    queue, pool = WaitQueue(), [sequence(i, priority=i * 7 % 5) for i in range(10)]
    since: dict[Sequence, int] = {}
    aside: set[Sequence] = set()
    for now, (what, at) in enumerate(steps):
        one = pool[at]
        if what == "push" and one not in since:
            queue.push(one, now)
            since[one] = now
        elif what == "remove" and one in since:
            queue.remove(one)
            del since[one]
            aside.discard(one)
        elif what == "aside" and one in since:
            queue.set_aside(one)
            aside.add(one)
        elif what == "restore":
            queue.restore()
            aside.clear()
        seen = [one for one in since if one not in aside]
        assert queue.first() is min(seen, key=lambda one: one.key, default=None)
        oldest = min(seen, key=lambda one: since[one], default=None)
        assert queue.oldest() == (None if oldest is None else (oldest, since[oldest]))
        assert len(queue) == len(since)
