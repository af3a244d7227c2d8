"""What a streamed token costs a server outside the model's kernels, in CPU microseconds.

    python -m benchmarks.cpu.server_cost [--model SOURCE] [--streams 64] [--rounds 3] [--peers DIR]

headrace and llama-server serve the same file to the same client: `streams` streams that begin at
once, 32 random ids -> 64 tokens, greedy. CPU seconds are those of all processes of a server.
`perf record` (Linux; the processes are the caller's own) tells which share of them the kernels
took: for headrace the native library, for llama-server the functions that compute, quantise, copy
KV. Each computes with one thread, so that no time goes into waiting for another. The rest is what
serving costs: scheduling, graphs and plans, sampling, text, JSON, HTTP, the system's calls. What
the C library copies, clears and computes (exp) may belong to either, so it is told apart. `--out`
writes JSON with the ten largest names of each rest.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import tempfile
from collections import defaultdict
from operator import itemgetter
from pathlib import Path
from typing import Any

import psutil

from benchmarks.cpu.peers import INTO
from benchmarks.cpu.servers import PLANS, Scene, running
from benchmarks.http_share import Wave, prompts
from headrace.bench.report import conditions
from headrace.sources.resolve import resolve

PROMPT, OUTPUT, CONTEXT = 32, 64, 128  # tokens of a stream; of its room
SERVERS = ("headrace", "llama-server Q4_1")
KERNELS = re.compile(
    r"^(void )?(ggml_(compute_forward|vec|gemv|gemm|graph_compute|barrier|cpu|repack|fp16|fp32"
    r"|quantize)|quantize_|dequantize_|repack_|tinyBLAS|llamafile_|GOMP_|gomp_"
    r"|void \(anonymous namespace\)|\(anonymous namespace\)::tinyBLAS|.*ggml::cpu::|block_q"
    r"|apply_unary_op|.*binary_op)"
)
EITHER = "either"  # what kernels and the rest both call
COPIES = re.compile(r"_*(mem(set|move|cpy)|clear_page|copy_page)")
_LINE = re.compile(r"^\s*([\d.]+)%\s*\|([^|]*)\|[^|]*\[[.k]\] ([^|]*)")


def is_kernel(dso: str, symbol: str) -> bool:
    """Whether a sample lies in what computes the model."""
    library = "/native/" in dso or dso.startswith(("libgomp", "libheadrace"))
    return library or bool(KERNELS.match(symbol))


def recorded(file: Path) -> tuple[float, dict[str, float]]:
    """The kernels' share of all samples, and the rest by name, in shares."""
    report = subprocess.run(
        [
            *("perf", "report", "--stdio", "-i", str(file), "--sort", "dso,symbol"),
            *("--no-children", "-F", "overhead,dso,symbol", "-v", "-t", "|"),
        ],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    kernels, total = 0.0, 0.0
    rest: dict[str, float] = defaultdict(float)
    for line in report.splitlines():
        parts = _LINE.match(line)
        if parts is None:
            continue
        share, dso, symbol = float(parts[1]), parts[2].strip(), parts[3].strip()
        total += share
        if is_kernel(dso, symbol):
            kernels += share
        elif COPIES.match(symbol) or "/libm.so" in dso:
            rest[EITHER] += share
        else:
            rest[f"{Path(dso).name} {symbol}"[:80]] += share
    return kernels / total, {name: share / total for name, share in rest.items()}


def measure(name: str, scene: Scene, rounds: int) -> dict[str, Any]:
    """The figures of one server."""
    plan = PLANS[name](scene)
    if name.startswith("headrace"):
        plan.command.extend(["--threads", str(scene.threads)])
    with running(plan, 60.0) as server, tempfile.TemporaryDirectory() as folder:
        tree = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
        port = int(server.url.rpartition(":")[2])
        _seconds(port, scene.sequences, -1)
        file = Path(folder) / "perf"
        pids = ",".join(str(process.pid) for process in tree)
        perf = subprocess.Popen(
            ["perf", "record", "-q", "-F", "499", "-p", pids, "-o", str(file)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        before_s, took_s = _cpu_s(tree), 0.0
        for i in range(rounds):
            took_s += _seconds(port, scene.sequences, i)
        spent_s = _cpu_s(tree) - before_s
        perf.send_signal(signal.SIGINT)
        perf.wait()
        kernels, rest = recorded(file)
    tokens = rounds * scene.sequences * OUTPUT
    total_us = spent_s / tokens * 1e6
    either = rest.pop(EITHER, 0.0)
    return {
        "server": name,
        "version": plan.version,
        "settings": plan.settings(),
        "tok_s": tokens / took_s,
        "us_per_token": total_us,
        "kernels_share": kernels,
        "either_us_per_token": total_us * either,
        "rest_us_per_token": total_us * (1 - kernels - either),
        "rest": {
            who: round(total_us * share, 2)
            for who, share in sorted(rest.items(), key=itemgetter(1))[:-11:-1]
        },
    }


def _seconds(port: int, streams: int, seed: int) -> float:
    """Of one wave, over new connections: llama-server closes idle ones after 5 s."""
    wave = Wave(port, streams)
    took_s, _ = wave.run(prompts(streams, PROMPT, seed), OUTPUT, "")
    wave.close()
    return took_s


def _cpu_s(tree: list[psutil.Process]) -> float:
    return float(sum(sum(process.cpu_times()[:2]) for process in tree))


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="", help="as headrace serve takes it; a GGUF file")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--servers", default=",".join(SERVERS))
    parser.add_argument("--peers", type=Path, default=INTO)
    parser.add_argument("--out", type=Path, default=None, help="JSON")
    args = parser.parse_args()
    files = resolve(args.model, say=print)
    streams = args.streams
    scene = Scene(
        files=files,
        peers=args.peers,
        context_tokens=streams * CONTEXT,
        slots=streams,
        sequences=streams,
        threads=1,
    )
    rows = []
    for name in args.servers.split(","):
        rows.append(measure(name, scene, args.rounds))
        print(json.dumps(rows[-1], indent=1), flush=True)
    if args.out is not None:
        facts = conditions(model=files.path.name, streams=str(streams))
        args.out.write_text(json.dumps({"conditions": facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
