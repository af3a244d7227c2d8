"""Milliseconds, GB/s and GFLOP/s of each kind of op in a step of the default model.

    python -m benchmarks.cpu.kernels [--threads N] [--precision exact|fast] [--context 100]
        [--rows 1,8,64] [--model PATH.gguf]

Every op kind of a decode step of `rows` sequences runs by itself over all layers (best of
`--repeats`); `sum` is their total, `step` the whole step at once. Bytes are those of the weights;
two floating-point operations a weight and row. The last line is a prefill of 512 tokens.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from headrace.backends.cpu.batch import Batch
from headrace.backends.cpu.device import cores
from headrace.backends.cpu.kv_memory import KvMemory
from headrace.backends.cpu.native import NativeForward
from headrace.models.kv_layout import layout_of
from headrace.models.outline import Outline
from headrace.models.registry import slots_of
from headrace.models.spec import from_gguf
from headrace.native import library as abi
from headrace.native.build import Unavailable
from headrace.native.library import Op
from headrace.native.pool import Pool
from headrace.runner import pack
from headrace.runner.checkpoint import GgufFile
from headrace.sources.resolve import resolve

KINDS = (
    "embed", "quantise", "linear", "gated", "rotate", "attend", "peaks", "gather", "add normed",
)  # fmt: skip
BLOCK, PREFILL = 16, 512


def name_of(op: Op) -> str:
    """Ops that are timed together."""
    kind = KINDS[op.kind]
    if op.kind not in (abi.LINEAR, abi.GATED):
        return kind
    of = " of head" if op.flags & abi.OF_HEAD else ""
    return f"{kind} {op.parts[0].contents.columns}->{op.width}{of}"


def load(path: Path, threads: int, exact: bool, rows: int, context: int) -> NativeForward:
    """The model over a KV cache for `rows` sequences, or one prefill."""
    found = abi.load()
    if isinstance(found, Unavailable):
        raise SystemExit(f"no native kernels: {found.reason}; {found.remedy}")
    checkpoint = GgufFile(path)
    spec = from_gguf(checkpoint.header)
    weights = pack.load(spec, slots_of(spec), checkpoint, found)
    width = max(-(-context // BLOCK) + 1, PREFILL // BLOCK)
    layout = layout_of(spec)
    memory = KvMemory(
        layers=layout.layers,
        places=layout.places,
        blocks=rows * width * len(layout.windows),
        kv_heads=spec.kv_heads,
        block_size=BLOCK,
        head_dim=spec.head_dim,
        dtype="float32" if exact else "bfloat16",
    )
    pool = Pool(found, threads)
    print(f"{path.name}: {pool.isa} kernels, {threads} threads, KV {memory.dtype}")
    sizes = {"positions": width * BLOCK, "rows": rows}
    outline = Outline(spec, weights.vectors)
    return NativeForward(outline, weights.packed, memory, pool, exact=exact, **sizes)


def best_ms(forward: NativeForward, batch: Batch, ops: Sequence[Op], repeats: int) -> float:
    """Of several runs: a machine that does something else only makes it longer."""
    array = (Op * len(ops))(*ops)
    times = []
    for _ in range(repeats):
        began_s = time.perf_counter()
        forward.run(batch, array)
        times.append(time.perf_counter() - began_s)
    return 1e3 * min(times)


def report(forward: NativeForward, batch: Batch, label: str, repeats: int) -> None:
    """One line a kind of op, then the step."""
    tokens = batch.ids.size
    forward.reserve(tokens, len(batch.chosen))
    forward.run(batch, (Op * len(forward.ops))(*forward.ops))
    groups: dict[str, list[Op]] = {}
    for op in forward.ops:
        groups.setdefault(name_of(op), []).append(op)
    print(f"\n{label}")
    total_ms = 0.0
    for name, ops in groups.items():
        took_ms = best_ms(forward, batch, ops, repeats)
        total_ms += took_ms
        line = f"  {name:20} {took_ms:8.3f} ms"
        parts = [op.parts[i].contents for op in ops for i in range(op.part_count)]
        if ops[0].kind in (abi.LINEAR, abi.GATED):
            measure = forward.pool.library.packed_bytes
            size_bytes = sum(measure(part.type, part.rows, part.columns) for part in parts)
            rows = len(batch.chosen) if ops[0].flags & abi.OF_HEAD else tokens
            work = 2 * rows * sum(part.rows * part.columns for part in parts)
            line += f" {size_bytes / took_ms / 1e6:7.1f} GB/s {work / took_ms / 1e6:8.1f} GFLOP/s"
        print(line)
    step_ms = best_ms(forward, batch, forward.ops, repeats)
    print(f"  {'sum':20} {total_ms:8.3f} ms")
    print(f"  {'step':20} {step_ms:8.3f} ms  {1e3 * tokens / step_ms:.0f} tokens/s")


def main() -> None:
    """Parse flags, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=cores())
    parser.add_argument("--precision", choices=("exact", "fast"), default="fast")
    parser.add_argument("--context", type=int, default=100)
    parser.add_argument("--rows", default="1,2,4,8,16,32,64")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--model", type=Path)
    flags = parser.parse_args()
    counts = [int(count) for count in flags.rows.split(",")]
    path = flags.model or resolve("", say=print).path
    forward = load(path, flags.threads, flags.precision == "exact", max(counts), flags.context)
    width = max(-(-flags.context // BLOCK) + 1, PREFILL // BLOCK)
    groups = forward.memory.groups
    tables = np.arange(groups * max(counts) * width).reshape(groups, max(counts), width)
    draw = np.random.default_rng(0)
    for n in counts:
        ids, every = draw.integers(0, 1000, n), list(range(n))
        batch = Batch(ids, tables, every, [flags.context] * n, [1] * n, [], every)
        report(forward, batch, f"decode, {n} sequences at {flags.context} tokens", flags.repeats)
    ids = draw.integers(0, 1000, PREFILL)
    report(forward, Batch(ids, tables, [0], [0], [PREFILL], [], [0]), f"prefill, {PREFILL}", 3)
    forward.close()


if __name__ == "__main__":
    main()
