"""Drives a runner with hand-made plans: a scheduler of thirty lines for tests."""

from __future__ import annotations

import dataclasses
import random
from itertools import chain
from typing import Any

from headrace.engine.protocol import Runner
from headrace.messages import Grow, Join, Output, Sampling, StepPlan, StepResult

GREEDY = Sampling(temperature=0.0)


def plan(step: int, **columns: Any) -> StepPlan:
    """A StepPlan with the columns given; the others are empty."""
    empty: dict[str, Any] = {name: [] for name in StepPlan.__struct_fields__}
    return StepPlan(**(empty | {"copies": [[]]} | columns | {"step": step}))


def run(runner: Runner, step: StepPlan) -> StepResult:
    """Launch, finish, wait."""
    ticket = runner.launch(step)
    ticket.finish()
    return ticket.result()


@dataclasses.dataclass
class Job:
    """One sequence to run. `chunk`: tokens of its prompt in one step."""

    prompt: list[int]
    n_tokens: int
    chunk: int = 1 << 30
    sampling: Sampling = GREEDY
    arrives: int = 0  # step number
    tokens: list[int] = dataclasses.field(default_factory=list)
    computed: int = 0
    tables: list[list[int]] = dataclasses.field(default_factory=list)  # by KV group


def generate(
    runner: Runner, jobs: list[Job], *, on_device: bool = True, shuffle_seed: int = 0
) -> list[list[int]]:
    """Run jobs together, continuously batched, over a shuffled block pool; rows are the indices.

    `on_device`: decode rows name no token, the runner takes the one it drew last.
    """
    size = runner.capacity.block_size
    free = list(range(runner.capacity.kv_blocks[0]))
    for job in jobs:
        job.tables = [[] for _ in runner.capacity.windows]
    random.Random(shuffle_seed).shuffle(free)
    step = 0
    leaving: list[int] = []
    alive = dict(enumerate(jobs))
    while alive:
        columns: dict[str, list[Any]] = {name: [] for name in StepPlan.__struct_fields__}
        columns["copies"] = [[]]
        columns["leaves"], leaving = leaving, []
        present = {row: job for row, job in alive.items() if job.arrives <= step}
        for row in sorted(present, key=lambda r: not present[r].tokens):  # decodes first
            _add(columns, row, present[row], free, size, on_device=on_device)
        columns.pop("step")
        result = run(runner, plan(step, **columns))
        assert not result.failed, result.failed
        for row, token in zip(columns["draw_into"], result.tokens, strict=True):
            job = alive[row]
            job.tokens.append(token)
            if len(job.tokens) == job.n_tokens:
                leaving.append(row)
                free += chain.from_iterable(alive.pop(row).tables)
        step += 1
    run(runner, plan(step, leaves=leaving))
    return [job.tokens for job in jobs]


def _add(
    columns: dict[str, list[Any]],
    row: int,
    job: Job,
    free: list[int],
    size: int,
    *,
    on_device: bool,
) -> None:
    sequence = job.prompt + job.tokens
    count = 1 if job.tokens else min(job.chunk, len(sequence) - job.computed)
    end = job.computed + count
    first = len(job.tables[0])
    fresh = [[free.pop() for _ in range(-(-end // size) - first)] for _ in job.tables]
    if job.computed == 0:
        join = Join(row, job.sampling, 0, fresh, prompt_tokens=len(job.prompt))
        columns["joins"].append(join)
    elif fresh[0]:
        columns["grows"] += [Grow(row, group, first, own) for group, own in enumerate(fresh)]
    for table, own in zip(job.tables, fresh, strict=True):
        table += own
    draws = end == len(sequence)
    if draws:
        columns["draw_from"].append(len(columns["rows"]))
        columns["draw_into"].append(row)
    columns["rows"].append(row)
    columns["starts"].append(job.computed)
    columns["counts"].append(count)
    ids = None if on_device and job.tokens else sequence[job.computed : end]
    columns["ids"].append(ids)
    columns["outputs"].append(Output.SAMPLE if draws else Output.NONE)
    job.computed = end
