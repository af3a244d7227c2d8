"""One layer of a decode step on the card, kernel by kernel, as the step's graph runs it.

    python -m benchmarks.gpu.timeline [--shape qwen3-30b-a3b] [--rows 1,8,32]

Dummy weights. Kernels of dependent launches overlap: a kernel's own duration holds its wait for the
one before. So each is shown with `adds`, by how much its end lies after the end of the kernel
before; those of one layer add up to the layer. Medians over the layers of the decode steps.
The bytes that a layer must read are not known here: see `benchmarks.gpu.offline`.
"""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from benchmarks.gpu.offline import settings_of
from benchmarks.gpu.shapes import CONFIGS, write_folder

# Launched once a layer; the first that a profile holds begins a layer.
MARKERS = ("_decode_kernel", "latent_decode_kernel")
STEPS = 12


class Ran(NamedTuple):
    """One kernel of a profile, microseconds."""

    name: str
    grid: tuple[int, ...]
    shared_bytes: int
    began: float
    ended: float

    @property
    def key(self) -> tuple[str, tuple[int, ...]]:
        """The same work in another layer."""
        return self.name, self.grid


class Line(NamedTuple):
    """One kernel of a layer: medians in microseconds."""

    name: str
    grid: tuple[int, ...]
    shared_bytes: int
    took: float
    adds: float


def kernels_of(trace: dict[str, Any]) -> list[Ran]:
    """Of a profile in Chrome's format, by their ends."""
    found = []
    for event in trace["traceEvents"]:
        if event.get("cat") == "kernel":
            facts, began = event["args"], float(event["ts"])
            grid = tuple(int(n) for n in facts["grid"])
            shared = int(facts.get("shared memory", 0))
            found.append(Ran(event["name"], grid, shared, began, began + float(event["dur"])))
    return sorted(found, key=lambda ran: ran.ended)


def layers_of(kernels: Sequence[Ran], marker: str) -> list[tuple[float, list[Ran]]]:
    """Runs of kernels from one marker to the next, each with the end of the kernel before it; only
    those whose kernels are the most usual ones."""
    at = [i for i, ran in enumerate(kernels) if ran.name == marker and i]
    pieces = [(kernels[i - 1].ended, list(kernels[i:j])) for i, j in itertools.pairwise(at)]
    kinds = Counter(tuple(ran.key for ran in piece) for _, piece in pieces)
    usual = kinds.most_common(1)[0][0] if kinds else ()
    return [(before, piece) for before, piece in pieces if tuple(r.key for r in piece) == usual]


def lines_of(layers: Sequence[tuple[float, list[Ran]]]) -> list[Line]:
    """Medians over layers of the same kernels."""
    lines = []
    for i, ran in enumerate(layers[0][1]):
        took = [piece[i].ended - piece[i].began for _, piece in layers]
        adds = [piece[i].ended - (piece[i - 1].ended if i else before) for before, piece in layers]
        medians = statistics.median(took), statistics.median(adds)
        lines.append(Line(ran.name, ran.grid, ran.shared_bytes, *medians))
    return lines


def recorded(llm: Any, rows: int) -> list[Ran]:
    """Kernels of a wave of `rows` short requests; its graphs are there."""
    import torch

    import headrace

    params = headrace.SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True)
    prompts = [[(7 * i + j) % 9000 + 1000 for j in range(32)] for i in range(rows)]
    for _ in range(2):
        llm.generate(prompts, params, progress=False)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        llm.generate(prompts, params, progress=False)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return kernels_of(json.loads(path.read_text()))


def show(kernels: Sequence[Ran], rows: int) -> None:
    """Print the layer, and what a step is beside its layers."""
    names = Counter(ran.name for ran in kernels)
    marker = next(name for name in MARKERS if names[name])
    layers = layers_of(kernels, marker)
    lines = lines_of(layers)
    print(f"== {rows} rows: {len(layers)} layers of {len(lines)} kernels, "
          f"{sum(line.adds for line in lines):.1f} us each")  # fmt: skip
    for line in lines:
        grid = "x".join(str(n) for n in line.grid)
        print(f"  adds {line.adds:6.2f} us, took {line.took:6.2f}  {grid:>12}  "
              f"{line.shared_bytes / 1024:5.0f} KiB  {line.name[:60]}")  # fmt: skip
    ends = [ran.ended for ran in kernels if ran.name == "begin_kernel"]
    steps = [after - before for before, after in itertools.pairwise(ends)]
    if steps:
        print(f"  a step: {statistics.median(steps):.0f} us from begin to begin")
    usual = {(line.name, line.grid) for line in lines}
    others: dict[tuple[str, tuple[int, ...]], list[float]] = {}
    for ran in kernels:
        if ran.key not in usual:
            others.setdefault(ran.key, []).append(ran.ended - ran.began)
    for (name, _), took in sorted(others.items(), key=lambda item: -sum(item[1]))[:12]:
        print(f"  beside these layers: {len(took):5} x {statistics.median(took):7.2f} us  "
              f"{name[:60]}")  # fmt: skip


@click.command()
@click.option("--shape", type=click.Choice(sorted(CONFIGS)), default="qwen3-30b-a3b")
@click.option("--rows", default="1,8,32", show_default=True)
@click.option("--set", "given", multiple=True, help="a setting: max_num_seqs=512")
def main(shape: str, rows: str, given: tuple[str, ...]) -> None:
    """Show a layer of a decode step, for each number of rows."""
    import headrace

    folder = write_folder(shape, Path(tempfile.gettempdir()))
    llm = headrace.LLM(str(folder), **settings_of(shape, "cuda", given))
    for count in rows.split(","):
        show(recorded(llm, int(count)), int(count))
    llm.close()


if __name__ == "__main__":
    main()
