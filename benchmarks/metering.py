"""What the same request is billed alone and in a crowd, and whether bills add up.

    python -m benchmarks.metering [--backend cpu] [--model M] [--threads 1]

In process, the default model on one thread, so that processor time is device time. `alone_ms` is
compute_s of one request by itself, `crowd_ms` the mean among `crowd` like it; `saved` is what
batching saved: crowd * (device time alone) / (device time of the crowd), and alone_ms / crowd_ms
should be that. Then a decode beside long prompts, and the sum of all bills beside the processor
time of the process over a mixed run with aborts. Writes benchmarks/results/metering.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

from benchmarks.engine_overhead import processor
from headrace.backends.choose import settled
from headrace.config import Settings
from headrace.engine.loop import Engine
from headrace.engine.shares import FS
from headrace.launch import find_model, make_cache
from headrace.messages import Abort, Done, Sampling, Submit

RESULTS = Path(__file__).parent / "results" / "metering.json"
GREEDY = Sampling(temperature=0.0)
PROMPT_TOKENS, OUTPUT_TOKENS = 32, 24


class Bench:
    """One engine; every run is charged from zero."""

    def __init__(self, settings: Settings) -> None:
        from headrace.runner.build import load_runner

        files = find_model(settings, print)
        runner, _ = load_runner(settings, files, lambda phase, seconds: None)
        facts = runner.capacity
        self.work = facts.work
        self._vocab = facts.vocab_size
        kv = make_cache(facts, prefix_caching=False)
        self.engine = Engine(settings, kv, runner, overlap=settings.backend == "cuda")
        self._handle = 0
        self.dones: dict[int, Done] = {}

    def submit(self, prompt_tokens: int, output_tokens: int) -> int:
        """A request of its own; returns its handle."""
        self._handle += 1
        prompt = [(self._handle * 977 + i * 31) % self._vocab for i in range(prompt_tokens)]
        self.engine.submit(0, Submit(self._handle, prompt, output_tokens, GREEDY))
        return self._handle

    def turn(self) -> None:
        """One turn."""
        for out in self.engine.turn().values():
            self.dones |= {done.handle: done for done in out.dones}

    def run(self) -> float:
        """To the end of all; device seconds since the last run."""
        while self.engine.has_work:
            self.turn()
        busy_fs, self.engine.meter.busy_fs = self.engine.meter.busy_fs, 0
        return busy_fs / FS


def crowds(bench: Bench) -> list[dict[str, float]]:
    """The same request alone and among others like it."""
    rows = []
    for crowd in (2, 8, 24):
        alone = bench.submit(PROMPT_TOKENS, OUTPUT_TOKENS)
        alone_busy_s = bench.run()
        handles = [bench.submit(PROMPT_TOKENS, OUTPUT_TOKENS) for _ in range(crowd)]
        busy_s = bench.run()
        bills = [bench.dones[handle].compute_s for handle in handles]
        alone_s, crowd_s = bench.dones[alone].compute_s, sum(bills) / crowd
        row = {
            "crowd": crowd,
            "alone_ms": alone_s * 1000,
            "crowd_ms": crowd_s * 1000,
            "alone_over_crowd": alone_s / crowd_s,
            "saved": crowd * alone_busy_s / busy_s,
            "largest_over_mean": max(bills) / crowd_s,
        }
        rows.append(row)
        print("  ".join(f"{key} {value:.3f}" for key, value in row.items()), flush=True)
    return rows


def beside_prompts(bench: Bench) -> dict[str, float]:
    """What a decode is billed a token, alone and while long prompts are computed beside it."""
    alone = bench.submit(8, 40)
    bench.run()
    decode = bench.submit(8, 40)
    for _ in range(4):
        bench.turn()
    prompts = [bench.submit(1000, 1) for _ in range(2)]
    bench.run()
    row = {
        "alone_ms_a_token": bench.dones[alone].compute_s * 1000 / 40,
        "beside_ms_a_token": bench.dones[decode].compute_s * 1000 / 40,
        "prompt_ms_a_token": sum(bench.dones[p].compute_s for p in prompts) * 1000 / 2000,
    }
    print(row, flush=True)
    return row


def mixed(bench: Bench) -> dict[str, float]:
    """All bills of a mixed run with aborts beside the time that the process computed."""
    began_s = time.process_time()
    handles = []
    for number in range(20):
        handles.append(bench.submit(20 + number * 37 % 200, 8 + number * 13 % 40))
        for _ in range(3):
            bench.turn()
        if number % 5 == 4:
            bench.engine.abort(0, Abort(handles[-2]))
    busy_s = bench.run()
    spent_s = time.process_time() - began_s
    billed_s = sum(bench.dones[handle].compute_s for handle in handles)
    row = {
        "billed_s": billed_s,
        "busy_s": busy_s,
        "process_s": spent_s,
        "billed_over_process": billed_s / spent_s,
    }
    print(row, flush=True)
    return row


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--model", default="")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    fields: dict[str, Any] = {"backend": args.backend, "model": args.model}
    if args.backend == "cpu":
        fields |= {"threads": args.threads, "kv_blocks": 2048}
    settings = settled(Settings(**fields))
    bench = Bench(settings)
    print(f"parts of a step: {bench.work}")
    results = {"crowds": crowds(bench), "beside": beside_prompts(bench), "mixed": mixed(bench)}
    conditions = {
        "date": time.strftime("%Y-%m-%d"),
        "backend": args.backend,
        "model": args.model or "default",
        "threads": args.threads,
        "python": platform.python_version(),
        "processor": processor(),
    }
    bench.engine.close()
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"conditions": conditions, **results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
