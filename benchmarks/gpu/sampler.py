"""Microseconds a call of the sampler, inside a CUDA graph: python -m benchmarks.gpu.sampler

Prints a table; writes sampler.json into $OUT where that is set. Logits are random normals, bf16,
152064 a row (Qwen2.5's vocabulary); `floor` is one read of them at the speed of a large copy.
"""

from __future__ import annotations

import json
import os
import statistics
from pathlib import Path

import torch
import triton

from headrace.kernels import pdl
from headrace.kernels.draw_params import Kind, pack
from headrace.kernels.sampling import Scratch, sample
from headrace.messages import Sampling

VOCAB = 152064
DRAWS = (1, 16, 64, 256)
CALLS = 10  # a graph
REPLAYS = 20
CASES: dict[str, tuple[Kind, float, Sampling]] = {
    # name: kind of call, standard deviation of the logits, parameters
    "greedy": ("greedy", 3.0, Sampling(temperature=0.0)),
    "plain": ("plain", 3.0, Sampling(temperature=0.8)),
    "full: top_p 0.95, peaked": ("full", 5.0, Sampling(temperature=0.7, top_p=0.95)),
    "full: top_p 0.9, flat": ("full", 1.0, Sampling(top_p=0.9)),
    "full: top_k 50, top_p 0.9": ("full", 3.0, Sampling(top_k=50, top_p=0.9)),
    "full: min_p 0.05": ("full", 3.0, Sampling(min_p=0.05)),
    "full: top_k 100000 (whole rows)": ("full", 3.0, Sampling(top_k=100000, top_p=0.99)),
}


def copy_speed(device: torch.device) -> float:
    """Bytes a second, read and written, of a copy of 1 GiB."""
    source = torch.empty(2**29, dtype=torch.bfloat16, device=device).normal_()
    target = torch.empty_like(source)
    took_ms = triton.testing.do_bench(lambda: target.copy_(source), return_mode="median")
    return float(2 * source.numel() * 2 / (took_ms / 1e3))


def call_us(name: str, draws: int, scratch: Scratch, device: torch.device) -> float:
    """Median over replays, of a graph of calls on rotating logits."""
    kind, spread, sampling = CASES[name]
    torch.manual_seed(draws)
    sets = [
        (torch.randn(draws, VOCAB, device=device) * spread).bfloat16()
        for _ in range(max(1, min(4, 256 // draws)))
    ]
    table = torch.tensor([pack(sampling, j) for j in range(draws)], dtype=torch.int32).to(device)
    numbers = torch.arange(draws, dtype=torch.int32, device=device)
    last, tokens = torch.empty_like(numbers), torch.empty_like(numbers)

    def call(i: int) -> None:
        logits = sets[i % len(sets)]
        sample(
            logits, table, numbers, numbers, numbers, last, tokens,
            kind=kind, scratch=scratch, with_pdl=pdl.supported(device),
        )  # fmt: skip

    call(0)
    torch.cuda.synchronize()
    assert int(tokens.min()) >= 0, "a row was not drawn"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(CALLS):
            call(i)
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


def main() -> None:
    device = torch.device("cuda")
    card = torch.cuda.get_device_name(device)
    speed = copy_speed(device)
    scratch = Scratch.allocate(max(DRAWS), VOCAB, device)
    floors = {draws: draws * VOCAB * 2 / speed * 1e6 for draws in DRAWS}
    print(f"{card}, torch {torch.__version__}, triton {triton.__version__}")
    print(f"{'us a call':34}" + "".join(f"{f'D={draws}':>9}" for draws in DRAWS))
    print(f"{'floor':34}" + "".join(f"{floors[draws]:9.1f}" for draws in DRAWS))
    results: dict[str, dict[int, float]] = {}
    for name in CASES:
        results[name] = {draws: call_us(name, draws, scratch, device) for draws in DRAWS}
        print(f"{name:34}" + "".join(f"{results[name][draws]:9.1f}" for draws in DRAWS))
    if out := os.environ.get("OUT"):
        report = {
            "card": card,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "vocab": VOCAB,
            "copy_bytes_per_s": speed,
            "floor_us": floors,
            "call_us": results,
        }
        (Path(out) / "sampler.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
