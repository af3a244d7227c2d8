"""One axis a way in which a schedule may differ; the tokens must not."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from headrace.backends.cpu.forward import TorchForward
from headrace.backends.cpu.kv_memory import KvMemory
from headrace.backends.cpu.kv_store import KvStore
from headrace.config import Settings
from headrace.engine.loop import Engine
from headrace.engine.protocol import Capacity, Runner
from headrace.launch import make_cache
from headrace.messages import Sampling, Submit
from headrace.models.kv_layout import layout_of
from headrace.models.layers import Decoder
from headrace.runner.runner import CpuRunner
from headrace.runner.worker import ThreadWorker
from headrace.sources.files import ModelFiles
from tests.devices import load

BLOCK = 16
CROWD = 16
MAX_TURNS = 100_000
WHOLE = 4096
GREEDY = Sampling(temperature=0.0)
URGENT = 10**6  # handles from here on are not looked at
Make = Callable[[dict[str, Any]], Runner]  # from the settings that a case needs


class Case(NamedTuple):
    """One way to schedule the same prompts."""

    loop: str  # plain, overlap
    chunk: int  # prompt tokens a step
    cache: str  # off, cold, warm
    crowd: str  # alone, crowd
    pressure: str  # roomy, preempted

    def __str__(self) -> str:
        return "-".join(map(str, self))


AXES: tuple[tuple[str | int, ...], ...] = (
    ("plain", "overlap"),
    (1, 7, 16, 64, WHOLE),
    ("off", "cold", "warm"),
    ("alone", "crowd"),
    ("roomy", "preempted"),
)


def all_cases() -> list[Case]:
    """The full product."""
    return [Case(*values) for values in itertools.product(*AXES)]  # type: ignore[arg-type]


def pairwise() -> list[Case]:
    """Few cases in which every pair of values of two axes occurs (greedy cover)."""
    cases = all_cases()
    wanted = set().union(*(_pairs(case) for case in cases))
    chosen: list[Case] = []
    while wanted:
        best = max(cases, key=lambda case: len(wanted & _pairs(case)))
        wanted -= _pairs(best)
        chosen.append(best)
    return chosen


def few() -> list[Case]:
    """The first cases of `pairwise` in which every value of every axis occurs."""
    wanted = {value for case in all_cases() for value in enumerate(case)}
    chosen: list[Case] = []
    for case in pairwise():
        chosen.append(case)
        wanted -= set(enumerate(case))
        if not wanted:
            break
    return chosen


def _pairs(case: Case) -> set[tuple[tuple[int, object], ...]]:
    return set(itertools.combinations(enumerate(case), 2))


class Outcome(NamedTuple):
    """Tokens of each prompt, and what the engine counted on the way."""

    tokens: list[list[int]]
    cached_tokens: list[int]
    preemptions: int


def run(make: Make, case: Case, prompts: Sequence[list[int]], n_tokens: int) -> Outcome:
    """Greedy tokens of every prompt under one case, on a fresh engine."""
    engine = _engine(make, case, prompts, n_tokens)
    try:
        if case.cache == "warm":
            _generate(engine, case, prompts, n_tokens)
        tokens, cached = _generate(engine, case, prompts, n_tokens)
        engine.kv.check()
        stats = engine.stats()
        assert (stats.running, stats.waiting, engine.kv.used_blocks) == (0, 0, 0), "a leak"
        return Outcome(tokens, cached, stats.preemptions)
    finally:
        engine.close()


def on_processor(model: Decoder, threads: int) -> Make:
    """Runners that share one loaded model."""

    def make(sizes: dict[str, Any]) -> Runner:
        spec, rows, layout = model.spec, sizes["max_num_seqs"], layout_of(model.spec)
        blocks = sizes["kv_blocks"] * len(layout.windows)
        memory = KvMemory(
            layers=layout.layers,
            places=layout.places,
            blocks=blocks,
            kv_heads=spec.kv_heads,
            block_size=BLOCK,
            head_dim=spec.head_dim,
            dtype=str(model.dtype).removeprefix("torch."),
            keys_are_values=spec.keys_are_values,
        )
        capacity = Capacity(
            [blocks],
            BLOCK,
            rows,
            spec.max_positions,
            spec.vocab_size,
            long_from=spec.long_from,
            each_length=spec.each_length,
            windows=layout.windows,
        )
        forward = TorchForward(model, KvStore(memory))
        worker = ThreadWorker(functools.partial(torch.set_num_threads, threads))
        return CpuRunner(forward, memory, capacity, worker)

    return make


def on_device(backend: str, files: ModelFiles) -> Make:
    """Runners that load the model anew: their graphs are captured for one case's sizes."""

    def make(sizes: dict[str, Any]) -> Runner:
        runner: Runner = load(backend, files, dtype="float32", **sizes)
        return runner

    return make


def _engine(make: Make, case: Case, prompts: Sequence[list[int]], n_tokens: int) -> Engine:
    rows = CROWD + 1 if case.crowd == "crowd" else 1
    needs = [-(-(len(prompt) + n_tokens) // BLOCK) for prompt in prompts]
    tight = case.pressure == "preempted" and case.crowd == "crowd"
    blocks = max(needs) + 2 if tight else sum(needs) + 4
    sizes: dict[str, Any] = {
        "max_num_seqs": rows,
        "max_num_batched_tokens": rows - 1 + case.chunk,
        "block_size": BLOCK,
        "kv_blocks": blocks,
    }
    settings = Settings(
        prefix_caching=case.cache != "off",
        scheduling_policy="priority",
        max_queue=10_000,
        **sizes,
    )
    runner = make(sizes)
    kv = make_cache(runner.capacity, prefix_caching=settings.prefix_caching)
    engine = Engine(settings, kv, runner, overlap=case.loop == "overlap")
    if tight:
        engine.scheduler.headroom_tokens = 0  # who leaves room is preempted less
    return engine


def _generate(
    engine: Engine, case: Case, prompts: Sequence[list[int]], n_tokens: int
) -> tuple[list[list[int]], list[int]]:
    tokens: list[list[int]] = [[] for _ in prompts]
    cached = [0] * len(prompts)
    todo = list(enumerate(prompts))
    if case.crowd == "crowd":
        for handle, prompt in todo:
            engine.submit(0, Submit(handle, prompt, n_tokens, GREEDY, priority=1))
        _drain(engine, tokens, cached)
        return tokens, cached
    for handle, prompt in todo:
        engine.submit(0, Submit(handle, prompt, n_tokens, GREEDY, priority=1))
        if case.pressure == "preempted":
            while len(tokens[handle]) < n_tokens // 2:
                _turn(engine, tokens, cached)
            engine.submit(0, Submit(URGENT + handle, prompt[::-1], 2, GREEDY, priority=0))
        _drain(engine, tokens, cached)
    return tokens, cached


def _drain(engine: Engine, tokens: list[list[int]], cached: list[int]) -> None:
    for _ in _turns():
        if not engine.has_work:
            return
        _turn(engine, tokens, cached)


def _turns() -> Iterator[int]:
    yield from range(MAX_TURNS)
    raise AssertionError(f"not done after {MAX_TURNS} turns")


def _turn(engine: Engine, tokens: list[list[int]], cached: list[int]) -> None:
    out = engine.turn().get(0)
    if out is None:
        return
    for handle, token in zip(out.handles, out.tokens, strict=True):
        if handle < URGENT:
            tokens[handle].append(token)
    for done in out.dones:
        assert not done.error, done.message
        if done.handle < URGENT:
            cached[done.handle] = done.cached_tokens
