"""Host time of one engine step: plan + apply, without the runner.

    python benchmarks/engine_overhead.py [--steps 300] [--quick]

Every running sequence decodes, from prompts of 100 to 115 tokens, so that in each step one of 16
fills a block (hashed and published) and one of 16 needs one. The runner answers at once and its own
time is taken off. Varied: running sequences, waiting requests behind them, blocks that the prefix
index knows, and the loop. Aim: 1 ms at 256, 4 ms at 1024, flat over the other two.
Prints a table, writes benchmarks/results/engine_overhead.json.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import statistics
import time
from collections.abc import Mapping
from pathlib import Path

from headrace.config import Settings
from headrace.engine.loop import Engine
from headrace.engine.protocol import Capacity, Masks
from headrace.kv.cache import KVCache
from headrace.messages import Sampling, StepPlan, StepResult, Submit

RESULTS = Path(__file__).parent / "results" / "engine_overhead.json"
BLOCK_SIZE = 16
PROMPT_TOKENS = 100


class NullRunner:
    """Answers every draw with the same token and keeps count of the time that takes."""

    def __init__(self, capacity: Capacity) -> None:
        self.capacity = capacity
        self.spent_s = 0.0

    def launch(self, plan: StepPlan) -> NullTicket:
        """See `engine.protocol.Runner`."""
        begun = time.perf_counter()
        ticket = NullTicket(StepResult(plan.step, [97] * len(plan.draw_into)))
        self.spent_s += time.perf_counter() - begun
        return ticket

    def idle(self) -> bool:
        """Nothing is put off."""
        return False

    def counters(self) -> Mapping[str, int]:
        """Nothing of its own."""
        return {}

    def close(self) -> None:
        """Nothing to free."""


class NullTicket:
    """A step that is done when it is launched."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def likely(self) -> list[int]:
        """No step of it has a mask."""
        return []

    def finish(self, masks: Masks | None = None) -> None:
        """The draws are made already."""

    def result(self) -> StepResult:
        """See `engine.protocol.Ticket`."""
        return self._result


def filled_cache(blocks: int, indexed: int) -> KVCache:
    """A cache whose prefix index knows `indexed` blocks, all of them free."""
    kv = KVCache(blocks, BLOCK_SIZE)
    chain = 64  # blocks of one prefix
    for number in range(indexed // chain):
        tokens = [number % 250, number // 250 % 250, number // 62500] + [1] * (
            chain * BLOCK_SIZE - 3
        )
        table = kv.open("", "")
        assert kv.reserve(table, len(tokens), 0) is not None
        kv.commit(table, tokens, len(tokens))
        kv.release(table, 0)
    return kv


def measure(
    running: int, waiting: int, indexed: int, overlap: bool, steps: int
) -> dict[str, float]:
    """Milliseconds of a step: median, 99th percentile and worst, of `steps` steady steps."""
    warmup = 20
    longest = PROMPT_TOKENS + BLOCK_SIZE
    tokens = longest + 2 * (steps + warmup)
    blocks = running * (tokens // BLOCK_SIZE + 2) + indexed
    kv = filled_cache(blocks, indexed)
    runner = NullRunner(Capacity([blocks], BLOCK_SIZE, running, tokens + 1, 259))
    settings = Settings(
        max_num_seqs=running,
        max_num_batched_tokens=max(running * longest, 2048),
        max_queue=waiting + running,
    )
    engine = Engine(settings, kv, runner, overlap=overlap)
    draw = random.Random(0)
    for handle in range(running + waiting):
        length = PROMPT_TOKENS + handle % BLOCK_SIZE if handle < running else 16
        prompt = [draw.randrange(256) for _ in range(length)]
        engine.submit(0, Submit(handle, prompt, tokens - len(prompt), Sampling()))
        if handle == running - 1:
            engine.turn()
    while engine.stats().running < running:
        engine.turn()
    for _ in range(warmup):
        engine.turn()
    gc.collect()
    times_ms: list[float] = []
    for _ in range(steps):
        runner.spent_s = 0.0
        begun = time.perf_counter()
        out = engine.turn()
        times_ms.append((time.perf_counter() - begun - runner.spent_s) * 1000)
        assert len(out[0].tokens) == running, "every step must serve every sequence"
    times_ms.sort()
    return {
        "median_ms": statistics.median(times_ms),
        "p99_ms": times_ms[int(len(times_ms) * 0.99)],
        "max_ms": times_ms[-1],
    }


def main() -> None:
    """Run the grid, print it, write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--quick", action="store_true", help="small queues and indexes only")
    args = parser.parse_args()
    big_queue, big_index = (1000, 10_000) if args.quick else (100_000, 1_000_000)
    grid = [(n, 0, 0) for n in (1, 64, 256, 1024)]
    grid += [(n, queue, 0) for n in (256, 1024) for queue in (1000, big_queue)]
    grid += [(n, 0, big_index) for n in (256, 1024)] + [(256, big_queue, big_index)]
    rows = []
    print(f"{'loop':8}{'running':>8}{'waiting':>9}{'indexed':>9}{'median':>9}{'p99':>9}{'max':>9}")
    for running, waiting, indexed in grid:
        for overlap in (False, True):
            times = measure(running, waiting, indexed, overlap, args.steps)
            name = "overlap" if overlap else "plain"
            rows.append(
                {"loop": name, "running": running, "waiting": waiting, "indexed": indexed} | times
            )
            shown = "".join(f"{times[key]:9.3f}" for key in ("median_ms", "p99_ms", "max_ms"))
            print(f"{name:8}{running:8}{waiting:9}{indexed:9}{shown}", flush=True)
    conditions = {
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "processor": processor(),
        "steps": args.steps,
        "unit": "ms of plan + apply, one step",
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"conditions": conditions, "rows": rows}, indent=1) + "\n")


def processor() -> str:
    """The processor's name, where the system tells."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    names = [line.split(":")[1].strip() for line in text.splitlines() if "model name" in line]
    return names[0] if names else platform.processor()


if __name__ == "__main__":
    main()
