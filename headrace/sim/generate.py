"""Workloads without a trace: two with the statistics of Mooncake's traces, and shapes that hurt.

All are drawn from one seed and cost no memory but their ids. Times in seconds, lengths in tokens;
`rate` is requests a second.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from random import Random

import msgspec

from headrace.bench.trace import BLOCK_TOKENS as BLOCK
from headrace.sim.workload import Request, Workload

Table = tuple[float, ...]  # values at equal steps of probability, from the least to the most


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """What was counted in a trace of conversations; lengths of prompts in blocks.

    A conversation begins with `first` blocks; one of fewer than begins[i][0] goes on with the
    probability begins[i][1], a later turn with goes_on[turn - 1] (the last value holds for all
    behind it), after `pause_s`. The next prompt drops `dropped` of the blocks at the end of the
    old one and adds `added`.
    """

    name: str
    rate: float
    tick_s: float  # arrivals are told apart no finer than this; 0 = they are
    spread: float  # variance over mean of the arrivals in 10 s
    first: Table
    begins: tuple[tuple[int, float], ...]
    goes_on: tuple[float, ...]
    dropped: Table
    added: Table
    pause_s: Table
    output: Table  # tokens
    common: bool  # the first block of all prompts is the same


# Counted in Mooncake's FAST'25 traces (Apache-2.0); tables at steps of 5 %.
CONVERSATION = Profile(
    name="conversation",
    rate=3.40,
    tick_s=3.0,
    spread=2.1,
    first=(2, 2, 2, 2, 3, 3, 4, 6, 8, 9, 11, 13, 15, 18, 22, 26, 31, 38, 50, 76, 247),
    begins=((2, 0.0), (4, 0.16), (8, 0.41), (16, 0.34), (64, 0.39), (999, 0.25)),
    goes_on=(0.42, 0.51, 0.59, 0.59, 0.7),
    dropped=(0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 17, 27, 198),
    added=(0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 4, 7, 10, 15, 20, 29, 186),
    pause_s=(
        3,
        30,
        42,
        51,
        60,
        66,
        75,
        84,
        96,
        108,
        123,
        138,
        162,
        189,
        222,
        264,
        318,
        390,
        483,
        618,
        3030,
    ),
    output=(
        1,
        10,
        24,
        46,
        100,
        156,
        213,
        256,
        291,
        322,
        350,
        375,
        399,
        423,
        447,
        472,
        504,
        543,
        597,
        698,
        2000,
    ),
    common=True,
)
SYNTHETIC = Profile(
    name="synthetic",
    rate=3.91,
    tick_s=0.0,
    spread=1.4,
    first=(1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 3, 8, 25, 30, 33, 36, 42, 53, 73, 374),
    begins=((4, 0.0), (8, 0.37), (16, 0.61), (64, 0.3), (999, 0.73)),
    goes_on=(0.83, 0.79, 0.76, 0.74, 0.64, 0.63, 0.56),
    dropped=(0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 3, 8),
    added=(0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 3, 8),
    pause_s=(
        0.4,
        2.5,
        5.8,
        9.6,
        14,
        20,
        27,
        34,
        43,
        53,
        64,
        78,
        95,
        114,
        136,
        163,
        195,
        238,
        295,
        407,
        793,
    ),
    output=(1, 2, 4, 6, 8, 11, 16, 22, 32, 49, 69, 92, 126, 169, 211, 250, 289, 333, 389, 519, 893),
    common=False,
)


def quantile(table: Table, p: float) -> float:
    """The value at probability p; between two steps linear in the logarithm of value + 1, for
    tails are long.
    """
    at = p * (len(table) - 1)
    low = min(int(at), len(table) - 2)
    from_, to = math.log1p(table[low]), math.log1p(table[low + 1])
    return math.expm1(from_ + (at - low) * (to - from_))


class _Ids:
    """Fresh block ids."""

    def __init__(self) -> None:
        self._next = 1  # 0 is the common block

    def take(self, count: int) -> tuple[int, ...]:
        """`count` ids that no other request has."""
        self._next += count
        return tuple(range(self._next - count, self._next))


def _request(
    draw: Random, arrival_s: float, chain: Sequence[int], output: float, session: str = ""
) -> Request:
    """A prompt of those full blocks and a few tokens more."""
    tokens = len(chain) * BLOCK + draw.randrange(1, BLOCK)
    return Request(arrival_s, tokens, max(1, round(output)), tuple(chain), session)


def _arrivals(draw: Random, count: int, rate: float, spread: float = 1.0) -> list[float]:
    """Poisson arrivals whose rate changes every 10 s, so that counts have that spread."""
    times: list[float] = []
    start_s = 0.0
    while len(times) < count:
        here = rate
        if spread > 1.0:  # gamma-mixed: variance / mean of a count = 1 + 10 s * rate * scale share
            share = (spread - 1.0) / (rate * 10.0)
            here = rate * draw.gammavariate(1 / share, share)
        at = start_s + draw.expovariate(here)
        while at < start_s + 10.0 and len(times) < count:
            times.append(at)
            at += draw.expovariate(here)
        start_s += 10.0
    return times


def _goes_on(profile: Profile, turn: int, blocks: int) -> float:
    """The probability that a conversation has a turn behind this one (0 = the first)."""
    if turn:
        return profile.goes_on[min(turn, len(profile.goes_on)) - 1]
    return next(p for below, p in profile.begins if blocks < below)


def like(profile: Profile, *, requests: int, seed: int) -> Workload:
    """A trace with the profile's lengths, reuse and arrivals.

    Slots of time come first; each is taken by the conversation whose pause is over, if there is
    one, else a new one begins: so the rate is the profile's whatever the turns do.
    """
    draw, ids = Random(seed), _Ids()
    due: list[tuple[float, int, int, tuple[int, ...]]] = []  # pause over, number, turn, blocks
    asked: list[Request] = []
    for number, at_s in enumerate(_arrivals(draw, requests, profile.rate, profile.spread)):
        if due and due[0][0] <= at_s:
            _, session, turn, old = heapq.heappop(due)
            kept = max(1, len(old) - round(quantile(profile.dropped, draw.random())))
            chain = (*old[:kept], *ids.take(round(quantile(profile.added, draw.random()))))
        else:
            session, turn = number, 0
            chain = ids.take(max(1, round(quantile(profile.first, draw.random()))))
            if profile.common:
                chain = (0, *chain[1:])
        if draw.random() < _goes_on(profile, turn, len(chain)):
            pause_s = quantile(profile.pause_s, draw.random())
            heapq.heappush(due, (at_s + pause_s, session, turn + 1, chain))
        output = quantile(profile.output, draw.random())
        tick_s = profile.tick_s
        arrival_s = math.floor(at_s / tick_s) * tick_s if tick_s else at_s
        # The last block of a chain is the one that the prompt does not fill.
        tokens = (len(chain) - 1) * BLOCK + draw.randrange(1, BLOCK)
        asked.append(Request(arrival_s, tokens, max(1, round(output)), chain[:-1], f"s{session}"))
    return Workload(profile.name, tuple(asked))


def shared_prefix(*, requests: int, seed: int, rate: float = 10.0) -> Workload:
    """150 prefixes of 6000 tokens, each with questions of 1200 and answers of 1000 (the shape of
    llm-d's published figures), in any order.
    """
    draw, ids = Random(seed), _Ids()
    prefixes = [ids.take(12) for _ in range(150)]
    asked = [
        _request(draw, at_s, (*draw.choice(prefixes), *ids.take(2)), 1000)
        for at_s in _arrivals(draw, requests, rate)
    ]
    return Workload("shared_prefix", tuple(asked))


def multi_turn(*, requests: int, seed: int, rate: float = 4.0) -> Workload:
    """Conversations of 2 to 12 turns that grow by 1 to 3 blocks a turn, 20 to 60 s apart."""
    draw, ids = Random(seed), _Ids()
    due: list[tuple[float, int, int, tuple[int, ...]]] = []
    asked: list[Request] = []
    for number, at_s in enumerate(_arrivals(draw, requests, rate)):
        if due and due[0][0] <= at_s:
            _, session, left, old = heapq.heappop(due)
        else:
            session, left, old = number, draw.randint(2, 12), ids.take(2)
        chain = (*old, *ids.take(draw.randint(1, 3)))
        if left > 1:
            heapq.heappush(due, (at_s + draw.uniform(20, 60), session, left - 1, chain))
        asked.append(_request(draw, at_s, chain, draw.uniform(100, 400), f"s{session}"))
    return Workload("multi_turn", tuple(asked))


def hot_spot(*, requests: int, seed: int, rate: float = 8.0) -> Workload:
    """200 prefixes of 16 blocks by Zipf's law; every 500 requests other ones are the hot ones."""
    draw, ids = Random(seed), _Ids()
    prefixes = [ids.take(16) for _ in range(200)]
    sums = [0.0]
    for rank in range(1, len(prefixes) + 1):
        sums.append(sums[-1] + rank**-1.1)
    asked = []
    for number, at_s in enumerate(_arrivals(draw, requests, rate)):
        rank = bisect_left(sums, draw.random() * sums[-1], 1) - 1
        prefix = prefixes[(rank + number // 500 * 37) % len(prefixes)]
        asked.append(_request(draw, at_s, (*prefix, *ids.take(1)), draw.uniform(50, 300)))
    return Workload("hot_spot", tuple(asked))


def flood(*, requests: int, seed: int, rate: float = 8.0) -> Workload:
    """Conversations as in `multi_turn`; in the middle third half of all requests are long cold
    prompts of one client.
    """
    draw, ids = Random(seed), _Ids()
    quiet = multi_turn(requests=requests, seed=seed + 1, rate=rate).requests
    offset = 1 << 40  # ids apart from the conversations'
    asked = []
    for number, request in enumerate(quiet):
        if requests // 3 <= number < 2 * requests // 3 and draw.random() < 0.5:
            chain = [offset + block for block in ids.take(24)]
            asked.append(_request(draw, request.arrival_s, chain, 16, "flood"))
        else:
            asked.append(request)
    return Workload("flood", tuple(asked))


def shared_block_0(*, requests: int, seed: int, rate: float = 4.0) -> Workload:
    """Cold prompts of 2 to 40 blocks that have their first block in common, and no other."""
    draw, ids = Random(seed), _Ids()
    asked = [
        _request(draw, at_s, (0, *ids.take(draw.randint(1, 39))), draw.uniform(50, 400))
        for at_s in _arrivals(draw, requests, rate)
    ]
    return Workload("shared_block_0", tuple(asked))


def cold(*, requests: int, seed: int, rate: float = 4.0) -> Workload:
    """Prompts of 2 to 40 blocks that have nothing in common."""
    draw, ids = Random(seed), _Ids()
    asked = [
        _request(draw, at_s, ids.take(draw.randint(2, 40)), draw.uniform(50, 400))
        for at_s in _arrivals(draw, requests, rate)
    ]
    return Workload("cold", tuple(asked))


class _Maker(msgspec.Struct, frozen=True):
    requests: int  # if nobody asks for another number
    make: Callable[[int, int], Workload]  # of requests and seed


GENERATORS: Mapping[str, _Maker] = {
    "conversation": _Maker(12031, lambda n, seed: like(CONVERSATION, requests=n, seed=seed)),
    "synthetic": _Maker(3993, lambda n, seed: like(SYNTHETIC, requests=n, seed=seed)),
    "shared_prefix": _Maker(3000, lambda n, seed: shared_prefix(requests=n, seed=seed)),
    "multi_turn": _Maker(3000, lambda n, seed: multi_turn(requests=n, seed=seed)),
    "hot_spot": _Maker(3000, lambda n, seed: hot_spot(requests=n, seed=seed)),
    "flood": _Maker(3000, lambda n, seed: flood(requests=n, seed=seed)),
    "shared_block_0": _Maker(3000, lambda n, seed: shared_block_0(requests=n, seed=seed)),
    "cold": _Maker(3000, lambda n, seed: cold(requests=n, seed=seed)),
}


def generate(name: str, *, requests: int = 0, seed: int = 0) -> Workload:
    """A workload of `GENERATORS`; requests = 0: as many as it usually has."""
    maker = GENERATORS[name]
    return maker.make(requests or maker.requests, seed)
