"""Workloads that a fleet of servers and the simulator both run, and what came of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from headrace.bench.figure import COLOURS, INK, drawn
from headrace.bench.stats import Level
from headrace.bench.trace import BLOCK_TOKENS, TraceLine
from headrace.sim.device import Device
from headrace.sim.run import Fleet, Outcome, simulate
from headrace.sim.workload import Request, Workload

SHARED_BLOCKS, OWN_BLOCKS = 24, 2  # of a prompt behind a shared prefix
FIRST_BLOCKS, TURN_BLOCKS, TURNS = 12, 6, 4  # of a conversation
DASHES = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)))  # of simulated policies, in their order


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """Of the workloads of a fleet."""

    workers: int
    block: int  # tokens of a block of the workloads
    prefixes: int  # that prompts share
    output_tokens: int
    kv_tokens: int  # of one worker


class Point(msgspec.Struct, kw_only=True):
    """One run: measured, or simulated where `router` is empty. Times in seconds."""

    workload: str
    router: str
    policy: str
    load: float
    requests: int
    failed: int
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    hit_share: float  # of all prompt tokens: found in a worker's cache, as it said
    requests_per_s: float
    predicted_share: float | None = None  # of all prompt tokens: the router thought so
    busiest: float | None = None  # most requests of a worker over the mean

    @property
    def label(self) -> str:
        """For tables and plots."""
        return f"{self.router or 'simulated'} {self.policy}"


def shared_prefixes(per_s: float, seconds: float, seed: int, sizes: Sizes) -> Workload:
    """Prefixes of 24 blocks, drawn alike, each with 2 blocks of its own."""
    draw = random.Random(seed)
    asked, at_s, spare = [], 0.0, sizes.prefixes * SHARED_BLOCKS
    while (at_s := at_s + draw.expovariate(per_s)) < seconds:
        first = SHARED_BLOCKS * draw.randrange(sizes.prefixes)
        chain = (*range(first, first + SHARED_BLOCKS), *range(spare, spare + OWN_BLOCKS))
        spare += OWN_BLOCKS
        asked.append(Request(at_s, len(chain) * sizes.block, sizes.output_tokens, chain))
    return Workload("shared prefixes", tuple(asked), sizes.block)


def conversations(per_s: float, seconds: float, seed: int, sizes: Sizes) -> Workload:
    """Of 4 turns 1 to 2 seconds apart: 12 blocks, then 6 more each turn."""
    draw = random.Random(seed)
    turns: list[tuple[float, tuple[int, ...], str]] = []
    at_s, spare = -2.0, 0
    while (at_s := at_s + draw.expovariate(per_s / TURNS)) < seconds:
        turn_s, chain = at_s, tuple(range(spare, spare + FIRST_BLOCKS))
        spare += FIRST_BLOCKS
        for _ in range(TURNS):
            turns.append((turn_s, chain, f"s{spare}"))
            turn_s += draw.uniform(1, 2)
            chain = (*chain, *range(spare, spare + TURN_BLOCKS))
            spare += TURN_BLOCKS
    asked = [
        Request(turn_s, len(chain) * sizes.block, sizes.output_tokens, chain, session)
        for turn_s, chain, session in sorted(turns)
        if 0 <= turn_s < seconds
    ]
    return Workload("conversations", tuple(asked), sizes.block)


WORKLOADS: Sequence[tuple[Callable[[float, float, int, Sizes], Workload], int]] = (
    (shared_prefixes, SHARED_BLOCKS + OWN_BLOCKS),
    (conversations, FIRST_BLOCKS + TURN_BLOCKS * (TURNS - 1) // 2),
)  # each with the blocks of its mean prompt


def workload(number: int, load: float, device: Device, seconds: float, sizes: Sizes) -> Workload:
    """Workload `number`. A load of 1: computing every prompt whole takes all devices' time."""
    make, blocks = WORKLOADS[number]
    per_s = load * sizes.workers / (device.cost.token_s * blocks * sizes.block)
    return make(per_s, seconds, number, sizes)


def trace(asked: Workload, path: Path, unit: int) -> None:
    """As `headrace bench` replays it with `unit` words, or ids, a block."""
    lines = [
        TraceLine(
            timestamp=1e3 * request.arrival_s,
            input_length=len(request.chain) * BLOCK_TOKENS,
            output_length=-(-request.output_tokens * BLOCK_TOKENS // unit),
            hash_ids=list(request.chain),
        )
        for request in asked.requests
    ]
    path.write_bytes(b"\n".join(map(msgspec.json.encode, lines)))


def measured_point(
    asked: Workload, name: str, policy: str, load: float, level: Level, **more: float
) -> Point:
    """A measured one. `more`: fields of `Point` that the client cannot know."""
    assert level.ttft_s is not None, f"{name} {policy}: nothing was answered: {level.errors}"
    assert level.requests == len(asked.requests), f"{level.requests} of {len(asked.requests)} sent"
    return Point(
        workload=asked.name,
        router=name,
        policy=policy,
        load=load,
        requests=level.requests,
        failed=sum(level.errors.values()) + sum(level.sheds.values()),
        ttft_mean_s=level.ttft_s.mean,
        ttft_p50_s=level.ttft_s.p50,
        ttft_p90_s=level.ttft_s.p90,
        ttft_p99_s=level.ttft_s.p99,
        hit_share=level.cached_tokens / max(1, level.prompt_tokens),
        requests_per_s=level.requests_per_s,
        **more,
    )


def _simulated(asked: Workload, load: float, policy: str, out: Outcome) -> Point:
    return Point(
        workload=asked.name,
        router="",
        policy=policy,
        load=load,
        requests=len(asked.requests),
        failed=0,
        ttft_mean_s=out.ttft_s.mean,
        ttft_p50_s=out.ttft_s.p50,
        ttft_p90_s=out.ttft_s.p90,
        ttft_p99_s=out.ttft_s.p99,
        hit_share=out.hit_share,
        requests_per_s=len(asked.requests) / out.makespan_s,
        predicted_share=out.predicted_share,
    )


def curves(
    device: Device, seconds: float, sizes: Sizes, loads: Sequence[float], policies: Sequence[str]
) -> list[Point]:
    """What the simulator says of the same traces."""
    fleet = Fleet(device=device, workers=sizes.workers)
    points = []
    for number in range(len(WORKLOADS)):
        for load in loads:
            asked = workload(number, load, device, seconds, sizes)
            for policy in policies:
                points.append(_simulated(asked, load, policy, simulate(asked, fleet, policy)))
    return points


def _page(points: Sequence[Point], title: str) -> str:
    lines = [f"# {title}", ""]
    lines += [
        "| workload | load | router | TTFT mean s | p50 | p90 | p99 | hits | predicted | "
        "busiest worker | req/s | failed |"
    ]
    lines += ["|---|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|"]
    for p in sorted(points, key=lambda p: (p.workload, p.load, not p.router, p.ttft_mean_s)):
        predicted = "" if p.predicted_share is None else f"{p.predicted_share:.0%}"
        busiest = "" if p.busiest is None else f"{p.busiest:.2f}"
        lines.append(
            f"| {p.workload} | {p.load} | {p.label} | {p.ttft_mean_s:.3f} | {p.ttft_p50_s:.3f} | "
            f"{p.ttft_p90_s:.2f} | {p.ttft_p99_s:.2f} | {p.hit_share:.0%} | {predicted} | "
            f"{busiest} | {p.requests_per_s:.1f} | {p.failed} |"
        )
    lines += [
        "",
        "Hits: of all prompt tokens those that the workers' `usage` says were cached. Predicted: "
        "those that the router expected. Busiest worker: its requests over the mean.",
    ]
    return "\n".join(lines) + "\n"


def _draw(points: Sequence[Point], stem: Path, title: str) -> None:
    """Mean TTFT against load: marks are measured, lines without marks simulated."""
    names = list(dict.fromkeys(p.workload for p in points))
    labels = list(dict.fromkeys(p.label for p in points if p.router))
    policies = list(dict.fromkeys(p.policy for p in points if not p.router))
    with drawn(stem, 5 * len(names), 4.5) as figure:
        axes = figure.subplots(1, len(names), squeeze=False, sharey=True)[0]
        for axis, name in zip(axes, names, strict=True):
            here = [p for p in points if p.workload == name]
            for policy, dash in zip(policies, DASHES, strict=False):
                label = f"simulated {policy}"
                line = [(p.load, p.ttft_mean_s) for p in here if p.label == label]
                axis.plot(*zip(*line, strict=True), linestyle=dash, color=INK, label=label)
            for colour, label in zip(COLOURS, labels, strict=False):
                line = [(p.load, p.ttft_mean_s) for p in here if p.label == label]
                if line:
                    axis.plot(
                        *zip(*line, strict=True), "-o", markersize=4, color=colour, label=label
                    )
            axis.patch.set_alpha(0)
            axis.set_yscale("log")
            axis.set_title(name, fontsize=10)
            axis.set_xlabel("load: prompts' time uncached / fleet's time")
        axes[0].set_ylabel("TTFT, mean, seconds")
        figure.suptitle(title)
        handles, texts = axes[0].get_legend_handles_labels()
        figure.legend(handles, texts, loc="outside lower center", ncols=4, frameon=False)


def write(points: Sequence[Point], stem: Path, facts: Mapping[str, object]) -> str:
    """`stem`.json, .md, .svg and .png; the table. `facts` hold a `title`."""
    title = str(facts["title"])
    stem.parent.mkdir(parents=True, exist_ok=True)
    stem.with_suffix(".json").write_bytes(
        msgspec.json.format(msgspec.json.encode({**facts, "points": points}))
    )
    text = _page(points, title)
    stem.with_suffix(".md").write_text(text)
    _draw(points, stem, title)
    return text
