"""Kernels that a start compiles, and what each takes:

    python -m benchmarks.gpu.compiles [--shape qwen2.5-14b] [--set gpu_memory_utilization=0.6]

One process with an empty kernel cache and dummy weights, up to the point where it would serve.
Here they are compiled by threads, which are heard of, where a start has them compiled by children
and takes less. Seconds are of a thread beside as many others as there are cores; `span` is from the
first compilation's begin to the last one's end.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import click

from benchmarks.gpu.drive import cache_environment
from benchmarks.gpu.offline import settings_of
from benchmarks.gpu.shapes import CONFIGS, write_folder


class Heard:
    """For Triton's listener: kernels, and when their compilations began and ended."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, float, float]] = []
        self.slowest_stage: Counter[str] = Counter()

    def __call__(self, *, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            ended_s = time.monotonic()
            self.spans.append((src.name, ended_s - times.total / 1e6, ended_s))
            for stage, took_us in times.lowering_stages:
                self.slowest_stage[stage] += took_us


@click.command()
@click.option("--shape", type=click.Choice(sorted(CONFIGS)), default="qwen2.5-14b")
@click.option("--set", "given", multiple=True, help="a setting: max_num_seqs=512")
@click.option("--most", default=25, show_default=True, help="kernels listed")
def main(shape: str, given: tuple[str, ...], most: int) -> None:
    """List them, the slowest first."""
    with tempfile.TemporaryDirectory() as empty:
        os.environ.update(cache_environment(Path(empty)))  # before triton
        import triton

        heard = Heard()
        triton.knobs.compilation.listener = heard
        import headrace
        from headrace.kernels import launch

        folder = write_folder(shape, Path(tempfile.gettempdir()))
        began_s = time.monotonic()
        with mock.patch.object(launch, "run_forked", return_value=0):
            headrace.LLM(str(folder), **settings_of(shape, "cuda", given)).close()
        took_s = time.monotonic() - began_s
    taken = sorted(((end - begin, name) for name, begin, end in heard.spans), reverse=True)
    first, last = min(s[1] for s in heard.spans), max(s[2] for s in heard.spans)
    threads_s = sum(took for took, _ in taken)
    print(
        f"start {took_s:.1f} s, {len(taken)} kernels, {threads_s:.1f} s of threads on "
        f"{os.cpu_count()} cores, span {last - first:.1f} s"
    )
    stages = ", ".join(f"{name} {us / 1e6:.1f} s" for name, us in heard.slowest_stage.most_common())
    print(f"by stage: {stages}")
    for took, name in taken[:most]:
        print(f"{took:7.2f} s  {name}")


if __name__ == "__main__":
    main()
