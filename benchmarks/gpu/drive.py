"""Runs a list of works through one engine and says one JSON line a figure.

It knows an engine by one function, so that every engine runs the same prompts in the same order. It
imports nothing of headrace: the peer's process has its own packages.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.work import Limits, Work, limit_s
from headrace.models.shape import Shape

# (prompts, output tokens of each, temperature): returns when all of them have all their tokens.
Generate = Callable[[list[list[int]], int, float], None]


_CACHES = (
    "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT",
)  # fmt: skip


class Rows:
    """Where figures go: standard output, and a file if there is one, a JSON object a line."""

    def __init__(self, out: Path | None, **common: Any) -> None:
        """`common`: fields that every row has."""
        self._out, self._common = out, common
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)

    def say(self, **fields: Any) -> None:
        """One row."""
        line = json.dumps({**self._common, **fields})
        print(line, flush=True)
        if self._out is not None:
            with self._out.open("a") as file:
                file.write(line + "\n")


class Clock:
    """Seconds that may be spent. `left_s` is infinite for a budget of 0."""

    def __init__(self, budget_s: float) -> None:
        self._end_s = time.monotonic() + budget_s if budget_s else float("inf")

    @property
    def left_s(self) -> float:
        return self._end_s - time.monotonic()


def cache_environment(folder: Path) -> dict[str, str]:
    """Environment under which every kernel cache that an engine may have lies in `folder`."""
    return {name: str(folder / name.lower()) for name in _CACHES}


def process_age_s() -> float:
    """Seconds since this process started, Python's own start included (Linux)."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of proc(5), since boot
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s


def prompts(draw: random.Random, work: Work, vocab: int) -> list[list[int]]:
    """Distinct random ids, away from both ends of the vocabulary, where special tokens live."""
    low, high = vocab // 100, vocab * 2 // 3
    return [[draw.randrange(low, high) for _ in range(work.prompt_tokens)]
            for _ in range(work.requests)]  # fmt: skip


def run_works(
    generate: Generate,
    works: Sequence[Work],
    shape: Shape,
    limits: Limits | None,
    clock: Clock,
    rows: Rows,
    facts: Callable[[], Mapping[str, Any]] = dict,
) -> None:
    """Measure each work. `facts`: what else a row says, asked after its work.

    Works for which no time is left are named in one row; a work that fails is named with its error,
    and the next one is tried.
    """
    draw = random.Random(0)
    generate(prompts(draw, Work("warm up", 8, 32, 16), shape.vocab), 16, 0.0)
    facts()
    for at, work in enumerate(works):
        if clock.left_s <= 0:
            rows.say(skipped=[w.name for w in works[at:]], reason="the time budget is spent")
            return
        times_s: list[float] = []
        try:
            while len(times_s) < work.runs and (clock.left_s > 0 or not times_s):
                given = prompts(draw, work, shape.vocab)
                began_s = time.perf_counter()
                generate(given, work.output_tokens, work.temperature)
                times_s.append(time.perf_counter() - began_s)
        except Exception as error:  # whatever an engine raises: the other figures still count
            rows.say(work=work.name, failed=f"{type(error).__name__}: {error}")
        else:
            more = facts()
            hit = more.get("experts_hit", 0.0)
            rows.say(**figure(work, times_s, shape, limits, hit), **more)


def figure(
    work: Work,
    times_s: Sequence[float],
    shape: Shape,
    limits: Limits | None,
    experts_hit: float = 0.0,
) -> Mapping[str, Any]:
    """One row: the median run, its rate, and the fraction of the card's limit it reached."""
    took_s = sorted(times_s)[len(times_s) // 2]
    row: dict[str, Any] = {
        "work": work.name,
        "runs": len(times_s),
        "seconds": took_s,
        "spread": (max(times_s) - min(times_s)) / took_s,
        "tok_s": work.tokens / took_s,
        "ms_per_token": took_s / work.output_tokens * 1e3,
    }
    if limits is not None:
        row["limit_s"] = limit_s(work, shape, limits, experts_hit)
        row["fraction"] = row["limit_s"] / took_s
    return row


def limits_row(limits: Limits) -> dict[str, float]:
    """Limits under the names that `read_limits` knows."""
    return {f"limit_{name}_s": value for name, value in dataclasses.asdict(limits).items()}


def read_limits(row: Mapping[str, Any]) -> Limits:
    """Limits from a row of `limits_row`. Raises KeyError for another row."""
    return Limits(**{field.name: row[f"limit_{field.name}_s"]
                     for field in dataclasses.fields(Limits)})  # fmt: skip
