"""Steps of a storm, predicted and measured: 32 sequences decode while long prompts arrive.

    python -m benchmarks.gpu.storm [--target-ms 40] [--prompt 8000] [--every-s 1]

No HTTP: the engine alone. Prints, by tokens of a step, its predicted and its measured time on
the card; then the time between two tokens and to the first of a long prompt.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import click

from benchmarks.gpu.offline import settings_of
from benchmarks.gpu.shapes import CONFIGS, write_folder
from headrace.messages import Sampling, StepPlan, StepResult, Submit

STREAMS, SHORT, STORMS = 32, 64, 10


class Steps:
    """Measured steps by tokens, rounded up to tiles."""

    def __init__(self, cost: Any) -> None:
        self._cost = cost
        self.seen: dict[int, list[tuple[float, float]]] = defaultdict(list)

    def add(self, plan: StepPlan, result: StepResult) -> None:
        """For Engine's on_step."""
        rows = list(zip(plan.starts, plan.counts, strict=True))
        pairs = sum(count * (start + count / 2) for start, count in rows if count > 1)
        reads = sum(start + 1 for start, count in rows if count == 1)
        predicted_s = self._cost.seconds(sum(plan.counts), pairs, reads)
        self.seen[-(-sum(plan.counts) // 128) * 128].append((predicted_s, result.busy_s))

    def show(self) -> None:
        """What was measured at the start, and the table."""
        sizes = zip(self._cost.sizes, self._cost.size_s, strict=True)
        print("at the start:", *(f"{n}: {s * 1e3:.1f} ms" for n, s in sizes))
        print(" tokens  steps   predicted ms   measured ms   largest   largest excess")
        for tokens, times in sorted(self.seen.items()):
            n = len(times)
            predicted, measured = (sum(t[i] for t in times) / n * 1e3 for i in (0, 1))
            largest, excess = max(t[1] for t in times), max(t[1] - t[0] for t in times)
            print(f"{tokens:7} {n:6} {predicted:14.1f} {measured:13.1f} {largest * 1e3:9.1f} "
                  f"{excess * 1e3:16.1f}")  # fmt: skip


def storm(llm: Any, steps: Steps, prompt: int, every_s: float) -> None:
    """Drive the engine until all long prompts have their token."""
    engine, draw = llm._engine, random.Random(0)

    def submit(handle: int, length: int, tokens: int) -> None:
        ids = [draw.randrange(1000, 90000) for _ in range(length)]
        engine.submit(0, Submit(handle, ids, tokens, Sampling(temperature=0.0)))

    for handle in range(STREAMS):
        submit(handle, SHORT, 4000)
    last: dict[int, float] = {}
    gaps: list[float] = []
    sent: dict[int, float] = {}
    ttft: list[float] = []
    next_s = time.perf_counter() + 1.0
    while len(ttft) < STORMS:
        now_s = time.perf_counter()
        if now_s >= next_s and len(sent) < STORMS:
            handle = STREAMS + len(sent)
            sent[handle], next_s = now_s, next_s + every_s
            submit(handle, prompt, 1)
        for out in engine.turn().values():
            now_s = time.perf_counter()
            for handle in out.handles:
                if handle in sent:
                    ttft.append(now_s - sent[handle])
                elif handle in last and sent:
                    gaps.append(now_s - last[handle])
                last[handle] = now_s
    gaps.sort()
    ttft.sort()
    itl = " ".join(f"{gaps[int(len(gaps) * p)] * 1e3:.1f}" for p in (0.5, 0.99, 0.999999))
    first = " ".join(f"{ttft[int(len(ttft) * p)] * 1e3:.0f}" for p in (0.5, 0.999999))
    print(f"ITL p50, p99, max: {itl} ms; TTFT of long prompts p50, max: {first} ms")
    steps.show()


@click.command()
@click.option("--shape", type=click.Choice(sorted(CONFIGS)), default="qwen2.5-14b")
@click.option("--target-ms", default="40", show_default=True)
@click.option("--prompt", default=8000, show_default=True)
@click.option("--every-s", default=1.0, show_default=True)
def main(shape: str, target_ms: str, prompt: int, every_s: float) -> None:
    """Compare the model of step time with the card."""
    import headrace

    folder = write_folder(shape, Path(tempfile.gettempdir()))
    settings = settings_of(shape, "cuda", ()) | {"itl_target_ms": target_ms}
    with headrace.LLM(str(folder), **settings) as llm:
        engine: Any = llm._engine
        cost = engine.runner.capacity.cost
        print(cost)
        steps = Steps(cost)
        engine._on_step = steps.add
        storm(llm, steps, prompt, every_s)


if __name__ == "__main__":
    main()
