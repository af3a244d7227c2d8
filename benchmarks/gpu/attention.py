"""Attention kernels on this card: decode against the copy rate, prefill in TFLOP/s.

    python -m benchmarks.gpu.attention [--part decode|prefill|flash|flashinfer|all]

Decode: microseconds a call and bytes of K and V a second, inside a CUDA graph of several calls over
different blocks of one pool, after the cache of the card was overwritten. Prefill: our Triton
kernel against torch's flash and cuDNN attention over gathered K and V (`dense`). FlashAttention 3
and FlashInfer (no part of all: they must be installed, and FlashInfer compiles for minutes):
against our kernel and cuDNN, and the time their plan, one a step, takes the host.
Every figure's outputs are first compared with plain
torch in float64. Heads as in a 14B model: 40 query heads, 8 KV heads of 128, bfloat16, blocks of
16. Candidates of attention_configs.py are timed on some shapes; all are compiled first, in
parallel.
Prints tables; writes attention.json to $OUT where it is set.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.backends.cuda import flash_chunks, flashinfer_chunks
from headrace.backends.cuda.chunk_library import ChunkLibrary
from headrace.kernels.attention import attend_reference, cached
from headrace.kernels.attention_configs import (
    DECODE_CANDIDATES,
    PREFILL_CANDIDATES,
    DecodeConfig,
    PrefillConfig,
    decode_config,
    prefill_config,
)
from headrace.kernels.attention_decode import Scratch, decode, most_splits
from headrace.kernels.attention_prefill import PrefillScratch, prefill
from headrace.kernels.chunks import Chunks, Tiling
from headrace.kernels.columns import StepColumns
from headrace.kernels.dense_prefill import Buffer, Span, cudnn, dense, flash

HEADS, KV_HEADS, HEAD_DIM, PAGE = 40, 8, 128, 16
DTYPE = torch.bfloat16
SCALE = HEAD_DIM**-0.5
TOKEN_BYTES = 2 * KV_HEADS * HEAD_DIM * 2  # K and V of one token
DECODE_TOKENS = (1, 8, 32, 64, 256)
CONTEXTS = (100, 1000, 4200, 8000)
COMPARED = ((1, 8000), (32, 4200), (256, 1000))  # shapes that candidates are timed on
POOL_BLOCKS = 256 * 8000 // PAGE
SPANS = {
    "0 + 2048": [(0, 2048)],
    "0 + 8000": [(0, 8000)],
    "4096 + 896": [(4096, 896)],
    "7168 + 896": [(7168, 896)],
    "6000 + 256": [(6000, 256)],
    "4 x (0 + 2048)": [(0, 2048)] * 4,
    "256 x (0 + 32)": [(0, 32)] * 256,
    "896 at 4096, 32 decodes at 4200": [(4096, 896), *[(4200, 1)] * 32],
}
LIBRARIES = ("flash", "flashinfer")
RIVALS = ("0 + 8000", "4096 + 896", "7168 + 896", "4 x (0 + 2048)", "256 x (0 + 32)")
ERROR_LIMIT = 1e-2  # ||out - reference|| / ||reference|| in bfloat16

Row = dict[str, Any]


def elapsed_ms(run: Callable[[], object]) -> float:
    """Of one call, by events of the device."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def milliseconds(run: Callable[[], object], flush: Tensor, repeats: int = 7) -> float:
    """Median time of `run` on the device, each time after the card's cache was overwritten."""
    times = []
    for _ in range(repeats + 2):
        flush.random_(0, 127)
        times.append(elapsed_ms(run))
    return statistics.median(times[2:])


def copy_rate(device: torch.device) -> float:
    """Bytes read plus bytes written a second, of a large copy."""
    source = torch.randint(0, 127, (1 << 31,), dtype=torch.int8, device=device)
    target, flush = torch.empty_like(source), torch.empty(1, dtype=torch.int8, device=device)
    return 2 * source.numel() / (milliseconds(lambda: target.copy_(source), flush) / 1e3)


def check(out: Tensor, reference: Tensor, what: str) -> None:
    error = float((out.double() - reference).norm() / reference.norm())
    assert error < ERROR_LIMIT, f"{what}: relative error {error:.2e}"


class Bench:
    """A pool of random K and V, and what the timings share."""

    def __init__(self, device: torch.device, pool_blocks: int = POOL_BLOCKS) -> None:
        self.device = device
        shape = (pool_blocks + 1, KV_HEADS, PAGE, HEAD_DIM)
        self.k = torch.empty(shape, dtype=DTYPE, device=device).normal_()
        self.v = torch.empty(shape, dtype=DTYPE, device=device).normal_()
        self.flush = torch.empty(1 << 28, dtype=torch.int8, device=device)
        self.sms = torch.cuda.get_device_properties(device).multi_processor_count

    def tables(self, rows: int, context: int, sets: int) -> Tensor:
        """[sets, rows + 1, width]: blocks at random, none twice while the pool lasts."""
        width, pool = -(-context // PAGE), self.k.shape[0] - 1
        need = sets * rows * width
        ids = torch.cat([torch.randperm(pool, device=self.device) for _ in range(-(-need // pool))])
        tables = torch.full((sets, rows + 1, width), pool, dtype=torch.int32, device=self.device)
        tables[:, :-1] = ids[:need].view(sets, rows, width)
        return tables

    def queries(self, tokens: int) -> Tensor:
        return torch.randn(tokens, HEADS, HEAD_DIM, device=self.device).to(DTYPE)

    def reference(self, q: Tensor, table: Tensor, position: int) -> Tensor:
        """q [1, heads, d] at `position` of the sequence in `table`."""
        keys, values = (cached(x, table, position + 1) for x in (self.k, self.v))
        return attend_reference(q, keys, values, position, scale=SCALE)

    def time_decode(
        self, tokens: int, context: int, splits: int, config: DecodeConfig
    ) -> tuple[float, int]:
        """-> microseconds a call, and calls in the graph."""
        size = tokens * context * TOKEN_BYTES
        calls = max(2, min(32, (1 << 30) // size))
        tables = self.tables(tokens, context, calls)
        scratch = Scratch(tokens, HEADS, HEAD_DIM, KV_HEADS, splits, self.device)
        rows = torch.arange(tokens, dtype=torch.int32, device=self.device)
        positions = torch.full_like(rows, context - 1)
        columns = [StepColumns(rows, positions, rows, table) for table in tables]
        q = self.queries(tokens)
        out = torch.full_like(q, torch.nan)

        def call(i: int) -> None:
            decode(
                q,
                self.k,
                self.v,
                columns[i],
                scale=SCALE,
                splits=splits,
                scratch=scratch,
                out=out,
                config=config,
            )

        call(0)
        for t in {0, tokens // 2, tokens - 1}:
            expected = self.reference(q[t : t + 1], tables[0, t], context - 1)
            check(out[t : t + 1], expected, f"decode {tokens} x {context} {config}")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(calls):
                call(i)
        return milliseconds(graph.replay, self.flush) * 1e3 / calls, calls

    def time_prefill(
        self, spans: list[tuple[int, int]], run: Callable[[Tensor, Tensor, Tensor], object]
    ) -> tuple[float, float]:
        """run(q, tables, out) -> milliseconds of a call, and of its first one."""
        tables = self.tables(len(spans), max(s + c for s, c in spans), 1)[0]
        q = self.queries(sum(count for _, count in spans))
        out = torch.full_like(q, torch.nan)
        first_ms = elapsed_ms(lambda: run(q, tables, out))
        first = 0
        for row, (start, count) in enumerate(spans):
            if row in {0, 1, len(spans) - 1}:
                for j in {0, count // 3, count - 1}:
                    t = first + j
                    expected = self.reference(q[t : t + 1], tables[row], start + j)
                    check(out[t : t + 1], expected, f"prefill {start} + {count}, token {j}")
            first += count
        assert not out.isnan().any(), "tokens left unwritten"
        return milliseconds(lambda: run(q, tables, out), self.flush, 5), first_ms


def floating_operations(spans: list[tuple[int, int]]) -> int:
    """Two products over the keys that each query sees."""
    seen = sum(count * start + count * (count + 1) // 2 for start, count in spans)
    return 4 * HEADS * HEAD_DIM * seen


def triton_run(
    bench: Bench, spans: list[tuple[int, int]], config: PrefillConfig, split: bool
) -> Callable[[Tensor, Tensor, Tensor], object]:
    starts, counts = [s for s, _ in spans], [c for _, c in spans]
    firsts = [sum(counts[:i]) for i in range(len(spans))]
    places = bench.sms * config.resident * split
    tiling = Tiling(HEADS // KV_HEADS, KV_HEADS, config.rows, config.tile_keys, places)
    plan = Chunks.plan(range(len(spans)), starts, counts, firsts, tiling)
    chunks = Chunks.of(torch.from_numpy(plan).to(bench.device), len(spans), config.rows)
    scratch = PrefillScratch(tiling, HEAD_DIM, bench.device)

    def run(q: Tensor, tables: Tensor, out: Tensor) -> None:
        at = (q, bench.k, bench.v, tables, chunks)
        prefill(*at, scale=SCALE, scratch=scratch, out=out, config=config)

    return run


def dense_run(
    bench: Bench, spans: list[tuple[int, int]], attend: Any
) -> Callable[[Tensor, Tensor, Tensor], object]:
    parts = parts_of(spans)
    longest = max(start + count for start, count in spans)
    buffer = Buffer(longest, KV_HEADS, HEAD_DIM, DTYPE, bench.device)

    def run(q: Tensor, tables: Tensor, out: Tensor) -> None:
        at = (q, bench.k, bench.v, tables)
        dense(*at, parts, scale=SCALE, attend=attend, buffer=buffer, out=out)

    return run


def parts_of(spans: list[tuple[int, int]]) -> list[Span]:
    counts = [count for _, count in spans]
    return [Span(i, s, c, sum(counts[:i])) for i, (s, c) in enumerate(spans)]


def library_of(name: str, bench: Bench, tokens: int) -> ChunkLibrary:
    """For steps of `tokens` tokens. Exits where it cannot be had."""
    module = {"flash": flash_chunks, "flashinfer": flashinfer_chunks}[name]
    if why_not := module.unsupported(DTYPE, HEAD_DIM, bench.device):
        raise SystemExit(f"{name}: {why_not}")
    heads = (HEADS, KV_HEADS, HEAD_DIM, SCALE, DTYPE, bench.device)
    if name == "flash":
        return flash_chunks.FlashChunks(tokens, *heads)
    return flashinfer_chunks.FlashInferChunks(*heads)


class LibraryRun:
    """A step's chunks by a library, plan included; `plans_us` holds what those took the host."""

    def __init__(self, name: str, bench: Bench, spans: list[tuple[int, int]]) -> None:
        self._bench, self._parts = bench, parts_of(spans)
        self._library = library_of(name, bench, sum(count for _, count in spans))
        begun = time.perf_counter()
        tables = bench.tables(len(spans), max(map(sum, spans)), 1)[0]
        made_of = self._library.prepare(bench.k, bench.v, tables)
        self.ready_s = time.perf_counter() - begun
        self.name = f"{name}: {made_of}; plan included"
        self.left = len(self._library.plan(self._parts, tables)[1])
        self.plans_us: list[float] = []

    def __call__(self, q: Tensor, tables: Tensor, out: Tensor) -> None:
        begun = time.perf_counter()
        planned, _ = self._library.plan(self._parts, tables)
        self.plans_us.append((time.perf_counter() - begun) * 1e6)
        assert planned is not None, "a library that leaves chunks is not timed"
        planned.attend(q, self._bench.k, self._bench.v, out)


def measure_library(name: str, bench: Bench) -> list[Row]:
    """Beside our kernel and cuDNN."""
    rows: list[Row] = []
    for shown in RIVALS:
        spans = SPANS[shown]
        ways: dict[str, Callable[[Tensor, Tensor, Tensor], object]] = {}
        ways["triton"] = triton_run(bench, spans, prefill_config(DTYPE, HEAD_DIM), True)
        if len(spans) == 1:
            ways["dense cudnn"] = dense_run(bench, spans, cudnn)
        rival = LibraryRun(name, bench, spans)
        if rival.left:
            print(f"prefill {shown:32} {rival.name} leaves {rival.left} of {len(spans)} chunks")
            continue
        ways[rival.name] = rival
        for way, run in ways.items():
            ms, _ = bench.time_prefill(spans, run)
            rate = floating_operations(spans) / ms / 1e9
            rows.append({"spans": shown, "way": way, "ms": ms, "TFLOP/s": rate})
            print(f"prefill {shown:32} {way:32} {ms:8.3f} ms {rate:6.1f} TFLOP/s", flush=True)
        rows[-1] |= {"plan_us": statistics.median(rival.plans_us), "ready_s": rival.ready_s}
        print(f"  plan {rows[-1]['plan_us']:.0f} us, prepared in {rival.ready_s:.1f} s", flush=True)
    return rows


def measure_decode(bench: Bench, copy: float) -> list[Row]:
    rows: list[Row] = []
    wave, default = most_splits(KV_HEADS, bench.sms), decode_config(DTYPE, HEAD_DIM)
    tasks = [(t, n, wave, default) for t in DECODE_TOKENS for n in CONTEXTS]
    tasks += [(t, n, s, default) for t, n in COMPARED for s in (wave // 2, 2 * wave, 4 * wave)]
    tasks += [(t, n, wave, c) for t, n in COMPARED for c in DECODE_CANDIDATES if c != default]
    for tokens, context, splits, config in tasks:
        micros, calls = bench.time_decode(tokens, context, splits, config)
        rate = tokens * context * TOKEN_BYTES / micros * 1e6
        row = {"tokens": tokens, "context": context, "splits": splits, "config": str(config)}
        row |= {"us": micros, "TB/s": rate / 1e12, "of_copy": rate / copy, "calls": calls}
        rows.append(row)
        print(
            f"decode {tokens:4} x {context:5}  splits {splits:4}  tile {config.tile_keys:3} "
            f"warps {config.warps} stages {config.stages}  {micros:8.1f} us "
            f"{rate / 1e12:5.2f} TB/s  {rate / copy:6.1%} of copy",
            flush=True,
        )
    return rows


def measure_prefill(bench: Bench) -> list[Row]:
    rows: list[Row] = []
    for name, spans in SPANS.items():
        ways = {f"triton {c}": triton_run(bench, spans, c, True) for c in PREFILL_CANDIDATES}
        whole = prefill_config(DTYPE, HEAD_DIM)
        ways |= {f"whole tiles {whole}": triton_run(bench, spans, whole, False)}
        if len(spans) == 1:  # one call a chunk: not meant for many small ones
            ways |= {"dense flash": dense_run(bench, spans, flash)}
            ways |= {"dense cudnn": dense_run(bench, spans, cudnn)}
        for way, run in ways.items():
            ms, first_ms = bench.time_prefill(spans, run)
            rate = floating_operations(spans) / ms * 1e3
            rows.append({"spans": name, "way": way, "ms": ms, "first_ms": first_ms})
            rows[-1]["TFLOP/s"] = rate / 1e12
            print(
                f"prefill {name:32} {way:84} {ms:8.3f} ms (first {first_ms:8.1f})  "
                f"{rate / 1e12:6.1f} TFLOP/s",
                flush=True,
            )
    return rows


def compile_one(task: DecodeConfig | PrefillConfig) -> None:
    """In a process of its own, into Triton's cache on disk: a call of each kind on few tokens."""
    bench = Bench(torch.device("cuda"), pool_blocks=64)
    if isinstance(task, DecodeConfig):
        variants = DECODE_TOKENS if task == decode_config(DTYPE, HEAD_DIM) else (1, 32, 256)
        for tokens in variants:
            bench.time_decode(tokens, 20, 2, task)
    else:
        bench.time_prefill([(16, 16)], triton_run(bench, [(16, 16)], task, True))


def compile_all(part: str) -> None:
    tasks: list[DecodeConfig | PrefillConfig] = []
    if part != "prefill":
        tasks += {*DECODE_CANDIDATES, decode_config(DTYPE, HEAD_DIM)}
    if part != "decode":
        tasks += {*PREFILL_CANDIDATES, prefill_config(DTYPE, HEAD_DIM)}
    with ProcessPoolExecutor(len(tasks), mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_one, tasks))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parts = ["decode", "prefill", *LIBRARIES, "all"]
    parser.add_argument("--part", choices=parts, default="all")
    part = parser.parse_args().part
    if part not in LIBRARIES:
        compile_all(part)
    torch.manual_seed(0)
    device = torch.device("cuda")
    copy = copy_rate(device)
    report: Row = {"card": torch.cuda.get_device_name(), "torch": torch.__version__}
    report["copy_TB/s"] = copy / 1e12
    print(f"{report['card']}, torch {report['torch']}, copy {copy / 1e12:.2f} TB/s", flush=True)
    bench = Bench(device)
    if part in ("decode", "all"):
        report["decode"] = measure_decode(bench, copy)
    if part in ("prefill", "all"):
        report["prefill"] = measure_prefill(bench)
    if part in LIBRARIES:
        report[part] = measure_library(part, bench)
    if folder := os.environ.get("OUT"):
        (Path(folder) / "attention.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
