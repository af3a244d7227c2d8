"""Where the time of a step goes on the card: kernels by name, for a few works of `offline`.

    python -m benchmarks.gpu.profile [--shape qwen2.5-14b] [--only "wave 1x,prefill 1x8000"]

Dummy weights. Prints for each work the wall time, the time some kernel ran, and the kernels that
took most of it with their count and mean. The profiler itself costs time: compare shares, not sums.
"""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import click

from benchmarks.gpu.offline import settings_of
from benchmarks.gpu.shapes import CONFIGS, write_folder

WORKS = {
    "wave 1": (1, 32, 24, 0.0),
    "wave 16": (16, 32, 24, 0.0),
    "wave 64": (64, 32, 24, 0.0),
    "wave 256": (256, 32, 24, 0.0),
    "wave 256 sampled": (256, 32, 24, 0.8),
    "prefill 2048": (1, 2048, 1, 0.0),
    "prefill 8000": (1, 8000, 1, 0.0),
    "long decode": (32, 4096, 8, 0.0),
    "batch": (512, 512, 128, 0.8),
}
SHOWN = 14


def profile(llm: Any, name: str, work: tuple[int, int, int, float]) -> None:
    """Run a work once plainly and once under the profiler; print both."""
    import torch

    import headrace

    requests, length, tokens, temperature = work
    params = headrace.SamplingParams(
        temperature=temperature, max_tokens=tokens, ignore_eos=True, seed=1
    )
    prompts = [[(7 * i + j) % 90000 + 1000 for j in range(length)] for i in range(requests)]

    def run() -> float:
        began_s = time.perf_counter()
        llm.generate(prompts, params, progress=False)
        return time.perf_counter() - began_s

    run()
    before = llm._engine.stats()
    plain_s = run()
    after = llm._engine.stats()
    steps = after.steps - before.steps
    counters = {key: after.runner[key] - before.runner.get(key, 0) for key in after.runner}
    kinds = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as recorded:
        run()
        torch.cuda.synchronize()
    spans: dict[str, list[float]] = defaultdict(list)
    busy: list[tuple[float, float]] = []
    for event in recorded.events():
        if event.device_type == torch._C._autograd.DeviceType.CUDA:
            spans[event.name].append(event.time_range.elapsed_us())
            busy.append((event.time_range.start, event.time_range.end))
    print(f"== {name}: {plain_s * 1e3:.1f} ms, {steps} steps, {counters}, "
          f"preemptions {after.preemptions - before.preemptions}; some kernel ran for "
          f"{covered_us(busy) / 1e3:.1f} ms of {span_us(busy) / 1e3:.1f}")  # fmt: skip
    for kernel, times in sorted(spans.items(), key=lambda item: -sum(item[1]))[:SHOWN]:
        total = sum(times)
        print(
            f"  {total / 1e3:9.2f} ms  {len(times):6} x {total / len(times):8.1f} us  {kernel[:90]}"
        )


def covered_us(busy: list[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    covered = end = 0.0
    for first, last in sorted(busy):
        covered += max(0.0, last - max(first, end))
        end = max(end, last)
    return covered


def span_us(busy: list[tuple[float, float]]) -> float:
    """From the first begin to the last end."""
    return max(last for _, last in busy) - min(first for first, _ in busy) if busy else 0.0


@click.command()
@click.option("--shape", type=click.Choice(sorted(CONFIGS)), default="qwen2.5-14b")
@click.option("--only", default="", help="works whose name begins with one of these")
@click.option("--set", "given", multiple=True, help="a setting: max_num_seqs=512")
def main(shape: str, only: str, given: tuple[str, ...]) -> None:
    """Profile headrace on a card."""
    import headrace

    folder = write_folder(shape, Path(tempfile.gettempdir()))
    llm = headrace.LLM(str(folder), **settings_of(shape, "cuda", given))
    wanted = tuple(part for part in only.split(",") if part)
    for name, work in WORKS.items():
        if not wanted or name.startswith(wanted):
            profile(llm, name, work)
    llm.close()


if __name__ == "__main__":
    main()
