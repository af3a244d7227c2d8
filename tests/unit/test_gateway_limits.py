"""Limits, keys and the central queue of the gateway."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import ConfigError, Forbidden, RateLimited, Unauthorized
from headrace.gateway.limits import Account, Bucket, Limits, Reservation
from headrace.gateway.queue import Queue, Waiting
from headrace.gateway.tenants import Doorkeeper, KeySpec, TierSpec

# ------------------------------------------------------------ limits


class Counter:
    """The reference: a bucket that fills at its rate, in exact arithmetic."""

    def __init__(self, limit: int) -> None:
        self.limit, self.level, self.at_s = limit, Fraction(limit), Fraction(0)

    def now(self, now_s: Fraction) -> Fraction:
        grown = self.level + (now_s - self.at_s) * self.limit / 60
        self.level, self.at_s = min(Fraction(self.limit), grown), now_s
        return self.level


steps = st.lists(
    st.tuples(st.integers(0, 40_000), st.integers(1, 30), st.integers(0, 60), st.booleans()),
    max_size=60,
)


@given(st.integers(1, 20), st.integers(1, 200), st.integers(0, 4), steps)
def test_limits_are_never_exceeded_and_never_too_strict(
    per_min: int, tokens_per_min: int, parallel: int, some: list[tuple[int, int, int, bool]]
) -> None:
    """Against counters that know nothing of GCRA. What is refused would have exceeded one."""
    account = Account(
        Limits(requests_per_min=per_min, tokens_per_min=tokens_per_min, parallel=parallel)
    )
    requests, tokens = Counter(per_min), Counter(tokens_per_min)
    running: list[Reservation] = []
    now_ms = 0
    for passed_ms, wanted, used, ends in some:
        now_ms += passed_ms
        now, now_s = Fraction(now_ms, 1000), now_ms / 1000
        if ends and running:
            one = running.pop(0)
            tokens.now(now)
            tokens.level += one.tokens - used  # may go below nothing: it is owed
            one.settle(used, now_s)
            one.settle(used, now_s)
            continue
        fits = [
            not parallel or len(running) < parallel,
            requests.now(now) >= 1,
            tokens.now(now) >= wanted,
        ]
        slack = min(abs(requests.level - 1), abs(tokens.level - wanted))
        taken = account.reserve(wanted, now_s)
        let_in = isinstance(taken, Reservation)
        assert let_in is all(fits) or slack < Fraction(1, 10**6)
        if isinstance(taken, Reservation):
            running.append(taken)
            requests.level -= 1
            tokens.level -= wanted
        assert account.running == len(running) <= (parallel or math.inf)


@given(st.integers(1, 1000), st.lists(st.tuples(st.floats(0, 100), st.integers(1, 2000))))
def test_after_the_wait_it_may_be_taken(limit: int, some: list[tuple[float, int]]) -> None:
    bucket, now_s = Bucket(limit), 0.0
    for passed_s, units in some:
        now_s += passed_s
        wait_s = bucket.wait_s(units, now_s)
        assert (wait_s == math.inf) is (units > limit)
        if wait_s == 0.0:
            assert bucket.told(now_s)[1] >= units
            bucket.take(units, now_s)
        elif wait_s < math.inf:
            assert bucket.told(now_s)[1] < units
            assert bucket.wait_s(units, now_s + wait_s + 1e-6) == 0.0


def test_what_can_never_run_is_told_so() -> None:
    refused = Account(Limits(tokens_per_min=100)).reserve(101, 0.0)
    assert isinstance(refused, RateLimited)
    assert "can never run" in refused.message
    assert (refused.status, refused.retry_after_s) == (429, 0)


def test_headers() -> None:
    account = Account(Limits(requests_per_min=60, tokens_per_min=600))
    account.reserve(100, 5.0)
    lines = account.headers(5.0).splitlines()
    assert dict(line.split(b": ") for line in lines) == {
        b"x-ratelimit-limit-requests": b"60",
        b"x-ratelimit-remaining-requests": b"59",
        b"x-ratelimit-reset-requests": b"1.000s",
        b"x-ratelimit-limit-tokens": b"600",
        b"x-ratelimit-remaining-tokens": b"500",
        b"x-ratelimit-reset-tokens": b"10.000s",
    }
    assert Account(Limits()).headers(0.0) == b""


# ------------------------------------------------------------ keys

DIGEST = "sha256:" + "2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae"  # foo


def test_keys_find_their_tenants() -> None:
    tiers = {"paid": TierSpec(requests_per_min=5), "default": TierSpec(parallel=1)}
    keys = [
        KeySpec(key=DIGEST, tenant="anna", tier="paid", admin=True),
        KeySpec(key="bar", tenant="anna", tier="paid"),
        KeySpec(key="baz"),
    ]
    door = Doorkeeper(keys, tiers)
    anna = door.admit({b"authorization": b"Bearer foo"})
    assert anna.name == "anna"
    assert door.admit({b"x-api-key": b"bar"}) is anna
    assert door.admit({b"authorization": b"bearer baz"}).tier.parallel == 1
    door.admit_admin({b"authorization": b"Bearer foo"})
    with pytest.raises(Forbidden):
        door.admit_admin({b"authorization": b"Bearer bar"})
    for shown in (b"Bearer other", b"Bearer", b"foo", b"", b"Bearer " + DIGEST.encode()):
        with pytest.raises(Unauthorized):
            door.admit({b"authorization": shown})


def test_without_keys_everybody_is_the_default_tenant() -> None:
    door = Doorkeeper([], {"default": TierSpec(parallel=3)})
    assert door.admit({}).tier.parallel == 3
    door.admit_admin({})


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ([KeySpec(key="a", tier="none")], "none"),
        ([KeySpec(key="a", tenant="t"), KeySpec(key="b", tenant="t", tier="paid")], "two tiers"),
        ([KeySpec(key="a"), KeySpec(key="a")], "twice"),
        ([KeySpec(key="sha256:12")], "64"),
        ([KeySpec(key=" a")], "ASCII"),
    ],
)
def test_bad_keys_are_refused(keys: list[KeySpec], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Doorkeeper(keys, {"paid": TierSpec(parallel=1)})


# ------------------------------------------------------------ the queue


class Pool:
    """A queue, workers with room, and who went."""

    def __init__(self, starve_s: float = 100.0, most: int = 1000) -> None:
        self.queue = Queue(most, starve_s)
        self.room = 0
        self.went: list[str] = []
        self.late: list[str] = []

    def add(
        self, name: str, tenant: str = "t", priority: int = 0, at_s: float = 0.0, ttl_s: float = 1e9
    ) -> Waiting:
        def go() -> bool:
            if not self.room:
                return False
            self.room -= 1
            self.went.append(name)
            return True

        item = Waiting(
            tenant, "m", priority, at_s, at_s + ttl_s, go, lambda: self.late.append(name)
        )
        self.queue.add(item)
        return item


def test_urgent_first_then_the_tenant_with_the_least_service() -> None:
    pool = Pool()
    for n in range(3):
        pool.add(f"a{n}", "anna", 1)
    for n in range(3):
        pool.add(f"b{n}", "bert", 1)
    pool.add("urgent", "carl", 0)
    pool.queue.serve("anna", 10, 5)
    for _ in range(7):
        pool.room = 1
        pool.queue.pump(1.0)
        tenant = {"a": "anna", "b": "bert", "u": "carl"}[pool.went[-1][0]]
        pool.queue.serve(tenant, 10, 5)
    assert pool.went == ["urgent", "b0", "a0", "b1", "a1", "b2", "a2"]


def test_one_that_floods_does_not_starve_the_others() -> None:
    pool = Pool()
    for n in range(100):
        pool.add(f"f{n}", "flood")
    pool.queue.serve("flood", 5000, 0)
    for _ in range(10):
        pool.room = 1
        pool.queue.pump(1.0)
        pool.queue.serve("flood", 100, 0)
    pool.add("small", "small")  # is lifted to where the flood is, and goes next or after it
    for _ in range(2):
        pool.room = 1
        pool.queue.pump(2.0)
        pool.queue.serve("small" if pool.went[-1] == "small" else "flood", 100, 0)
    assert "small" in pool.went[-2:]


def test_who_waited_too_long_is_next() -> None:
    pool = Pool(starve_s=10.0)
    pool.add("old", priority=9, at_s=0.0)
    pool.add("urgent", priority=0, at_s=5.0)
    pool.room = 1
    pool.queue.pump(10.0)
    assert pool.went == ["old"]


def test_time_runs_out() -> None:
    pool = Pool()
    pool.add("short", ttl_s=1.0)
    pool.add("long", ttl_s=9.0)
    pool.queue.expire(1.0)
    assert (pool.late, len(pool.queue)) == (["short"], 1)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "remove", "pump", "expire", "serve"]),
            st.integers(0, 3),
            st.integers(0, 2),
        ),
        max_size=80,
    )
)
def test_every_one_goes_or_is_late_or_is_removed_once(
    some: list[tuple[str, int, int]],
) -> None:
    pool, now_s, added, removed = Pool(starve_s=7.0), 0.0, 0, 0
    waiting: list[Waiting] = []
    for step, tenant, number in some:
        now_s += 1.0
        if step == "add":
            waiting.append(pool.add(f"{added}", f"t{tenant}", number, now_s, ttl_s=5.0 + number))
            added += 1
        elif step == "remove" and waiting:
            removed += pool.queue.remove(waiting[number % len(waiting)])
        elif step == "pump":
            pool.room = number
            before = len(pool.queue)
            pool.queue.pump(now_s)
            assert len(pool.queue) == before - (number - pool.room)
            assert not (pool.room and len(pool.queue))
        elif step == "expire":
            pool.queue.expire(now_s)
        else:
            pool.queue.serve(f"t{tenant}", number * 10, 1)
        assert len(pool.queue) == added - removed - len(pool.went) - len(pool.late)
    assert len(set(pool.went) | set(pool.late)) == len(pool.went) + len(pool.late)
