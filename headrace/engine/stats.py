"""EngineStats: gauges and counters of the engine. Counters only rise.

Always: started == sum(finished.values()) + running + waiting.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec


class Tally:
    """The counters, mutable, loop thread only. A request is counted once in `finished`."""

    __slots__ = (
        "cached_tokens",
        "finished",
        "generation_tokens",
        "preemptions",
        "prefill_tokens",
        "prompt_tokens",
        "queried_tokens",
        "recomputed_tokens",
        "started",
        "steps",
    )

    def __init__(self) -> None:
        self.started = 0  # submits, refused ones too
        self.finished = {"stop": 0, "length": 0, "abort": 0, "error": 0, "refused": 0}
        self.steps = 0  # steps finished
        self.preemptions = 0
        self.recomputed_tokens = 0  # KV computed again after a preemption
        self.prompt_tokens = 0  # of requests, when first scheduled
        self.queried_tokens = 0  # of those, looked up in the prefix cache
        self.cached_tokens = 0  # of those, found there
        self.prefill_tokens = 0  # computed in chunks, not one a step
        self.generation_tokens = 0  # tokens sent


class EngineStats(msgspec.Struct, frozen=True):
    """A snapshot. `running` and `waiting` count requests: running = at least one device row."""

    running: int
    waiting: int
    kv_blocks: int
    kv_used: int
    steps: int
    preemptions: int
    recomputed_tokens: int
    prompt_tokens: int
    cached_tokens: int
    generation_tokens: int
    finished: dict[str, int]  # reason -> requests: stop, length, abort, error, refused
    started: int
    runner: Mapping[str, int] = {}  # see engine.protocol.Runner.counters
    busy_s: float = 0.0  # time the device worked
    unclaimed_s: float = 0.0  # of that, for requests of API processes that are gone
    kv_events: Mapping[str, int] = {}  # see engine.kv_events; {}: none are published
    queried_tokens: int = 0  # of prompt_tokens, looked up in the prefix cache
    prefill_tokens: int = 0  # computed in chunks, recomputed ones too
    kv_tokens: int = 0  # that the KV cache keeps in every layer
    step_factor: float = 1.0  # times what was predicted, steps with prompts take beside decodes


class StepTimes(NamedTuple):
    """Where the time of one step went."""

    tokens: int  # computed
    plan_s: float  # host: planning it
    busy_s: float  # device
    sample_s: float  # of that, drawing; -1 = the runner cannot tell
    apply_s: float  # host: what came of it
    wall_s: float  # from its launch until its tokens were known
