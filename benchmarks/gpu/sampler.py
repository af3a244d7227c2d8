"""Microseconds a call of the sampler, inside a CUDA graph:

    python -m benchmarks.gpu.sampler [--wide 256] [--kernels everything --kernels plain]

Prints a table; writes sampler.json into $OUT where that is set. Logits are random normals, bf16,
152064 a row (Qwen2.5's vocabulary); `floor` is one read of them at the speed of a large copy.
The second part is what rules, penalties, masks, typical_p and log-probabilities cost over sequences
of 1024 tokens that repeat themselves, edited rows `--wide` at a time; the runner's
number is the default. `--kernels`: of these cases also what each kernel takes, for the most rows.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import triton
from torch import Tensor

from headrace.kernels import edited, pdl
from headrace.kernels.draw_params import Kind, is_few, kind_of, pack
from headrace.kernels.edit_params import EDIT_WIDTH, edits, lists_of, pack_edits
from headrace.kernels.launch import compiling
from headrace.kernels.logprobs import ENTRY, LogprobScratch, logprobs
from headrace.kernels.sampling import Scratch, sample
from headrace.messages import Dry, Lz, Repetition, Rules, Sampling
from headrace.runner.draws import WIDE_ROWS

VOCAB = 152064
DRAWS = (1, 64, 256)
CALLS = 10  # a graph
REPLAYS = 20
LENGTH, BLOCK = 1024, 16  # tokens of a sequence, and of a block of the cache
CASES: dict[str, tuple[float, Sampling]] = {
    # name: standard deviation of the logits, parameters
    "greedy": (3.0, Sampling(temperature=0.0)),
    "plain": (3.0, Sampling(temperature=0.8)),
    "full: top_p 0.95, peaked": (5.0, Sampling(temperature=0.7, top_p=0.95)),
    "full: top_p 0.9, flat": (1.0, Sampling(top_p=0.9)),
    "full: top_k 50, top_p 0.9": (3.0, Sampling(top_k=50, top_p=0.9)),
    "full: min_p 0.05": (3.0, Sampling(min_p=0.05)),
    "full: top_k 100000 (whole rows)": (3.0, Sampling(top_k=100000, top_p=0.99)),
}
RULES = Rules(
    bias=[(i * 499, 1.5) for i in range(300)],
    banned=list(range(50)),
    bad_words=[[i, i + 1, i + 2] for i in range(100, 200)],
    min_tokens=10**6,
    held=[7, 8],
)
REPETITION = Repetition(1.1, 0.1, 0.1)
DRY = Dry(0.8, 1.75, 2, breakers=[1, 2, 3])
LZ = Lz(0.15)
ALL = Sampling(
    temperature=0.8,
    top_k=50,
    top_p=0.95,
    min_p=0.01,
    typical_p=0.95,
    top_n_sigma=3.0,
    logprobs=20,
    rules=RULES,
    repetition=REPETITION,
    dry=DRY,
    lz=LZ,
)
FAMILIES: dict[str, tuple[Sampling, bool]] = {
    # name: parameters, whether every row has a grammar mask. Logits have deviation 3.
    "mask": (Sampling(temperature=0.8), True),
    "rules": (Sampling(temperature=0.8, rules=RULES), False),
    "repetition": (Sampling(temperature=0.8, repetition=REPETITION), False),
    "dry": (Sampling(temperature=0.8, dry=DRY), False),
    "lz": (Sampling(temperature=0.8, lz=LZ), False),
    "top_n_sigma": (Sampling(temperature=0.8, top_n_sigma=3.0), False),
    "typical_p alone": (Sampling(temperature=0.8, typical_p=0.9), False),
    "top_k 50, typical_p": (Sampling(temperature=0.8, top_k=50, typical_p=0.9), False),
    "logprobs 0": (Sampling(temperature=0.8, logprobs=0), False),
    "logprobs 20": (Sampling(temperature=0.8, logprobs=20), False),
    "everything": (ALL, True),
}


def copy_speed(device: torch.device) -> float:
    """Bytes a second, read and written, of a copy of 1 GiB."""
    source = torch.empty(2**29, dtype=torch.bfloat16, device=device).normal_()
    target = torch.empty_like(source)
    took_ms = triton.testing.do_bench(lambda: target.copy_(source), return_mode="median")
    return float(2 * source.numel() * 2 / (took_ms / 1e3))


class Bench:
    """Rows that all ask the same, over one vocabulary, on one device."""

    def __init__(self, device: torch.device, wide_rows: int) -> None:
        most = max(DRAWS)
        self.device, self.wide_rows = device, min(most, wide_rows)
        self.scratch = Scratch.allocate(most, VOCAB, device)
        self.wide = edited.Wide.allocate(self.wide_rows, VOCAB, device)
        self.logprobs = LogprobScratch.allocate(most, VOCAB, device)
        self.entries = torch.zeros((most, ENTRY), dtype=torch.int32, device=device)
        self.masks = torch.randint(
            -(2**31), 2**31, (most, VOCAB // 32), dtype=torch.int32, device=device
        )
        self.numbers = torch.arange(most, dtype=torch.int32, device=device)
        self.last, self.tokens = torch.empty_like(self.numbers), torch.empty_like(self.numbers)
        blocks = most * LENGTH // BLOCK
        order = torch.randperm(blocks, dtype=torch.int32, device=device)
        self.tables = order.view(most, LENGTH // BLOCK)
        maker = random.Random(0)
        ids = [maker.randrange(VOCAB) for _ in range(LENGTH // 4)]
        sequence = torch.tensor(ids * 4, dtype=torch.int32, device=device).view(-1, BLOCK)
        self.slots = torch.empty((blocks, BLOCK), dtype=torch.int32, device=device)
        self.slots[self.tables.long()] = sequence
        self.positions = torch.full((most,), LENGTH - 1, dtype=torch.int32, device=device)

    def calls(self, sampling: Sampling, draws: int, *, masked: bool) -> Callable[[Tensor], None]:
        """What the runner launches for so many rows."""
        device, numbers, with_pdl = self.device, self.numbers, pdl.supported(self.device)
        params = torch.tensor([pack(sampling, j) for j in range(draws)], dtype=torch.int32)
        packed = torch.tensor([pack_edits(sampling, LENGTH // 2, 0)], dtype=torch.int32)
        params, table = params.to(device), packed.expand(draws, EDIT_WIDTH).contiguous().to(device)
        arena = torch.tensor([*lists_of(sampling), 0], dtype=torch.int32, device=device)
        rows = edited.Rows(table, arena, self.tables, self.slots)
        slots = numbers if masked else torch.full_like(numbers, -1)
        changes, kind = masked or edits(sampling), kind_of(sampling)

        def draw(logits: Tensor, sources: Tensor, some: slice, kind: Kind) -> None:
            sample(
                logits, sources, params, self.positions, numbers[some], numbers[some], self.last,
                self.tokens[some], kind=kind, scratch=self.scratch, edits=table, with_pdl=with_pdl,
            )  # fmt: skip

        def call(logits: Tensor) -> None:
            if not changes:
                draw(logits, numbers[:draws], slice(0, draws), kind)
            for begin in range(0, draws if changes else 0, self.wide_rows):
                some = slice(begin, min(begin + self.wide_rows, draws))
                one = numbers[some]
                edited.edit(
                    logits, self.masks, self.positions, edited.Draws(one, one, one, slots[some]),
                    rows, self.wide, sigma=sampling.top_n_sigma > 0 and not is_few(sampling),
                    with_pdl=with_pdl,
                )  # fmt: skip
                draw(self.wide.logits, numbers[: some.stop - begin], some, kind)
            if sampling.logprobs >= 0:
                some = slice(0, draws)
                logprobs(
                    logits, numbers[some], self.tokens, numbers[some], self.entries[some],
                    listed=sampling.logprobs > 0, scratch=self.logprobs, with_pdl=with_pdl,
                )  # fmt: skip

        return call

    def call_us(
        self, sampling: Sampling, draws: int, spread: float, *, masked: bool = False
    ) -> float:
        """Median over replays, of a graph of calls on rotating logits."""
        torch.manual_seed(draws)
        sets = [
            (torch.randn(draws, VOCAB, device=self.device) * spread).bfloat16()
            for _ in range(max(1, min(4, 256 // draws)))
        ]
        call = self.calls(sampling, draws, masked=masked)
        call(sets[0])
        torch.cuda.synchronize()
        assert int(self.tokens[:draws].min()) >= 0, "a row was not drawn"
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(CALLS):
                call(sets[i % len(sets)])
        times_us = []
        for _ in range(REPLAYS + 3):
            begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times_us.append(float(begin.elapsed_time(end)) * 1e3 / CALLS)
        return statistics.median(times_us[3:])

    def kernel_us(
        self, sampling: Sampling, draws: int, spread: float, *, masked: bool = False
    ) -> list[tuple[str, float]]:
        """Microseconds of each kernel of a call, in the order of their launches."""
        logits = (torch.randn(draws, VOCAB, device=self.device) * spread).bfloat16()
        call = self.calls(sampling, draws, masked=masked)
        call(logits)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(CALLS):
                call(logits)
            torch.cuda.synchronize()
        taken: dict[str, float] = {}
        for event in sorted(profile.events(), key=lambda event: event.time_range.start):
            if event.device_time > 0:
                taken[event.name] = taken.get(event.name, 0.0) + event.device_time / CALLS
        return list(taken.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wide", type=int, default=WIDE_ROWS, help="edited rows at a time")
    parser.add_argument("--kernels", action="append", default=[], help="a case, by name")
    args = parser.parse_args()
    wide_rows = args.wide
    device = torch.device("cuda")
    card = torch.cuda.get_device_name(device)
    speed = copy_speed(device)
    floors = {draws: draws * VOCAB * 2 / speed * 1e6 for draws in DRAWS}
    print(f"{card}, torch {torch.__version__}, triton {triton.__version__}")
    print(f"{'us a call':34}" + "".join(f"{f'D={draws}':>9}" for draws in DRAWS))
    print(f"{'floor':34}" + "".join(f"{floors[draws]:9.1f}" for draws in DRAWS))
    bench = Bench(device, wide_rows)
    asked = {name: (spread, sampling, False) for name, (spread, sampling) in CASES.items()}
    asked |= {name: (3.0, sampling, masked) for name, (sampling, masked) in FAMILIES.items()}
    with compiling(os.cpu_count() or 1):
        for _, sampling, masked in asked.values():
            bench.calls(sampling, 1, masked=masked)(bench.wide.logits[:1].bfloat16())
    results: dict[str, dict[int, float]] = {}
    for name, (spread, sampling, masked) in asked.items():
        results[name] = {n: bench.call_us(sampling, n, spread, masked=masked) for n in DRAWS}
        print(f"{name:34}" + "".join(f"{results[name][n]:9.1f}" for n in DRAWS), flush=True)
    for name in args.kernels:
        spread, sampling, masked = asked[name]
        print(name + ":", flush=True)
        for kernel, took_us in bench.kernel_us(sampling, max(DRAWS), spread, masked=masked):
            print(f"    {kernel:30}{took_us:9.1f}")
    if out := os.environ.get("OUT"):
        report = {
            "card": card,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "vocab": VOCAB,
            "wide_rows": wide_rows,
            "copy_bytes_per_s": speed,
            "floor_us": floors,
            "call_us": results,
        }
        (Path(out) / "sampler.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
