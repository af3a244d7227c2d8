"""Policies over real devices: a worker a GPU, one gateway a policy before all of them.

    python -m benchmarks.gateway.devices [--gpus N] [--policies token_cost,p2c] [--seconds S]
    python -m benchmarks.gateway.devices --cpu [--model MODEL]

Each worker is `headrace serve` with a GPU of its own and random weights of the shape of a 14B
model; prompts are token ids. The caches are made so small that what prompts share fits into all of
them together, not into one. First some cold prompts say how fast a worker is: loads and the
simulator go by it. A load of 1 is where computing every prompt whole would take all of all
devices' time. Each policy gets the same arrivals and lengths, with ids that nobody has seen.

With `--cpu`: `headrace up --replicas 2` of the default model, once a policy; prompts are chats.

Writes benchmarks/results/gateway-devices-DATE.json, .md, .svg, .png (with `--cpu`, gateway-cpu-).
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import click
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.gateway.load import KEY
from benchmarks.gateway.replays import (
    SHARED_BLOCKS,
    WORKLOADS,
    Point,
    Sizes,
    curves,
    measured_point,
    trace,
    workload,
    write,
)
from benchmarks.gateway.routers import FLEET, Router, free_port, running, spawned
from benchmarks.gpu.shapes import CONFIGS, write_folder
from headrace import __version__
from headrace.bench.load import Target, first_model, run_loop
from headrace.bench.measure import Meter
from headrace.bench.stats import Level, Shape
from headrace.bench.workload import Workload as Load
from headrace.replicas import visible_gpus
from headrace.sim.device import H100_14B, Device
from tests.e2e.serve_process import ServeProcess

RESULTS = Path(__file__).parents[1] / "results"
POLICIES = ("token_cost", "prefix_affinity", "least_requests", "round_robin", "random")
PREFIXES = 12  # a worker
KV_SHARE = 1.3  # a worker's cache over its share of the shared prefixes
KV_BLOCK = 16  # tokens
COLD_PROMPTS = 6  # whose median says how fast a worker is
FAKE_IDS = 256  # the fake model's tokens are bytes
READY_S = 300.0  # a model may have to be fetched first
MODEL_BLOCKS = 32  # blocks of the workloads: the longest prompt and its answer
COUNTED = {
    "headrace_gateway_tokens": "kind",
    "headrace_gateway_placements": "worker",
    "headrace_gateway_worker_index": "state",
}  # families of the gateway's metrics, each by one of its labels
INDEX_BYTES = 256 * 2**20


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """What the load generator sends."""

    kind: Literal["words", "ids"]
    endpoint: Literal["chat", "completions"]
    vocabulary: int = 0  # of ids

    def load(self, **more: Any) -> Load:
        """A workload of the load generator."""
        ids = (min(1000, self.vocabulary // 2), self.vocabulary) if self.vocabulary else (0, 1)
        return Load(kind=self.kind, endpoint=self.endpoint, id_range=ids, **more)


class Front(msgspec.Struct, frozen=True, kw_only=True):
    """A gateway that takes requests."""

    url: str
    policy: str

    def counts(self) -> dict[tuple[str, str], float]:
        """(label, its value) -> tokens by kind, requests by worker, workers by state of the index
        of what they hold."""
        headers = {"authorization": f"Bearer {KEY}"}
        request = urllib.request.Request(self.url + "/metrics", headers=headers)
        with urllib.request.urlopen(request, timeout=10) as answer:
            text = answer.read().decode()
        found: dict[tuple[str, str], float] = {}
        for family in text_string_to_metric_families(text):
            label = COUNTED.get(family.name, "")
            for sample in family.samples if label else ():
                if not sample.name.endswith("_created"):
                    key = (label, sample.labels[label])
                    found[key] = found.get(key, 0.0) + sample.value
        return found


def grown(before: dict[tuple[str, str], float], after: dict[tuple[str, str], float]) -> Any:
    """What happened between two looks at the counts of a gateway."""
    return {key: value - before.get(key, 0.0) for key, value in after.items()}


class Bench:
    """Runs levels, and keeps what came of them."""

    def __init__(self, kind: Kind, sizes: Sizes, seconds: float, folder: Path, rows: Path) -> None:
        self.kind, self.sizes, self.seconds = kind, sizes, seconds
        self._file, self.rows = folder / "trace.jsonl", rows
        self._nonce = f"{time.time():.0f}"
        self.device = H100_14B
        self.points: list[Point] = []

    def _meter(self, url: str, load: Load) -> Meter:
        target = Target(url=url, model="", api_key=KEY, timeout_s=120.0)
        model = run_loop(first_model(target))
        return Meter(msgspec.structs.replace(target, model=model), load)

    def calibrate(self, url: str) -> None:
        """Cold prompts, one after another: how fast a worker is."""
        tokens = WORKLOADS[0][1] * self.sizes.block
        load = self.kind.load(
            requests=COLD_PROMPTS, prompt_tokens=tokens, max_tokens=2, nonce=f"{self._nonce} cold"
        )
        meter = self._meter(url, load)
        run_loop(meter.warm_up(1))
        level = run_loop(meter.level(Shape(concurrency=1)))
        assert level.ttft_s is not None, f"no cold prompt was answered: {level.errors}"
        length = level.prompt_tokens / level.requests
        self.device = slowed(level.ttft_s.p50, length, self.sizes.kv_tokens)
        print(f"cold prompts of {length:.0f} tokens: TTFT {level.ttft_s.p50:.3f} s", flush=True)

    def level(self, front: Front, number: int, load: float) -> None:
        """One workload at one load through one gateway."""
        asked = workload(number, load, self.device, self.seconds, self.sizes)
        trace(asked, self._file, self.sizes.block)
        sent = self.kind.load(
            trace=str(self._file),
            trace_block_tokens=self.sizes.block,
            requests=0,
            nonce=f"{self._nonce} {front.policy} {number} {load}",
        )
        before = front.counts()
        level: Level = run_loop(self._meter(front.url, sent).level(Shape(trace=True)))
        seen = grown(before, front.counts())
        placed = [count for (what, _), count in seen.items() if what == "worker"]
        point = measured_point(
            asked,
            "headrace",
            front.policy,
            load,
            level,
            predicted_share=seen.get(("kind", "predicted_cached"), 0.0) / level.prompt_tokens,
            busiest=max(placed) * self.sizes.workers / sum(placed),
        )
        self.points.append(point)
        with self.rows.open("ab") as rows:
            rows.write(msgspec.json.encode(point) + b"\n")
        failures = {**level.errors, **level.sheds}
        print(
            f"{point.workload} {load} {front.policy}: TTFT {point.ttft_mean_s:.3f} s, hits "
            f"{point.hit_share:.0%} (predicted {point.predicted_share:.0%}), "
            f"{point.requests_per_s:.1f}/s, failed {point.failed} {failures or ''}",
            flush=True,
        )


def slowed(ttft_s: float, prompt_tokens: float, kv_tokens: int) -> Device:
    """The H100 of the simulator, its times so that one such prompt takes `ttft_s`."""
    cost = H100_14B.cost
    times = ttft_s / (cost.token_s * prompt_tokens + cost.pair_s * prompt_tokens**2 / 2)
    fields = ("floor_s", "token_s", "base_s", "pair_s", "read_s")
    return msgspec.structs.replace(
        H100_14B,
        name=f"{H100_14B.name}, {times:.3g} times as long",
        cost=msgspec.structs.replace(cost, **{f: getattr(cost, f) * times for f in fields}),
        kv_tokens=kv_tokens,
    )


@contextlib.contextmanager
def workers(shape: str, backend: str, sizes: Sizes, folder: Path) -> Iterator[list[str]]:
    """URLs of the workers, one a GPU, started side by side."""
    gpus = visible_gpus() if backend == "cuda" else []
    positions: int = CONFIGS[shape]["max_position_embeddings"]
    flags = [
        *("--backend", backend, "--kv-blocks", str(sizes.kv_tokens // KV_BLOCK)),
        *("--block-size", str(KV_BLOCK), "--log-level", "warning"),
        *("--max-num-batched-tokens", str(H100_14B.max_step_tokens)),
    ]
    if backend == "fake":  # the simulator's device
        file = folder / "device.json"
        file.write_bytes(msgspec.json.encode(H100_14B))
        flags += ["--fake-device", str(file)]
    if backend != "cpu":
        flags += ["--itl-target-ms", str(1e3 * H100_14B.target_s)]
    if backend != "fake":
        model = write_folder(shape, folder, tokenizer=True)
        length = min(positions, MODEL_BLOCKS * sizes.block)
        flags = [str(model), "--load-format", "dummy", "--max-model-len", str(length), *flags]
    with contextlib.ExitStack() as stack:
        started = []
        for i in range(sizes.workers):
            own = [f"--kv-events-endpoint=ipc://{folder}/events-{i}"]
            own += [f"--kv-events-replay-endpoint=ipc://{folder}/replay-{i}"]
            if gpus:
                one = ServeProcess(*flags, *own, wait=False, CUDA_VISIBLE_DEVICES=gpus[i])
            else:
                one = ServeProcess(*flags, *own, wait=False)
            started.append(stack.enter_context(one))
        for server in started:
            server.wait_ready()
        yield [server.url for server in started]


@contextlib.contextmanager
def replicas(policy: str, model: str, sizes: Sizes, folder: Path) -> Iterator[Front]:
    """`headrace up` with that policy, once all replicas are ready."""
    port, file, log = free_port(), folder / f"{policy}.toml", folder / f"up-{policy}.log"
    file.write_text(
        FLEET.format(port=port, policy=policy, workers="", key=KEY, index_bytes=INDEX_BYTES)
    )
    command = [
        *(sys.executable, "-m", "headrace.cli.main", "up", *([model] if model else [])),
        *("--replicas", str(sizes.workers), "--fleet", str(file), "--backend", "cpu"),
        *("--kv-blocks", str(sizes.kv_tokens // KV_BLOCK), "--block-size", str(KV_BLOCK)),
    ]
    with spawned(command, log) as process:
        deadline_s = time.monotonic() + READY_S
        while not re.search(r"^ready in ", log.read_text(), re.MULTILINE):
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"not ready: {log.read_text()[-2000:]}")
            time.sleep(0.1)
        yield Front(url=f"http://127.0.0.1:{port}", policy=policy)


def over_gpus(
    bench: Bench, shape: str, backend: str, policies: Sequence[str], loads: Sequence[float],
    budget_s: float,
) -> None:  # fmt: skip
    """All policies over the same workers, level by level, while the time lasts."""
    with tempfile.TemporaryDirectory(prefix="fleet-") as name, contextlib.ExitStack() as stack:
        folder, began_s = Path(name), time.monotonic()
        urls = stack.enter_context(workers(shape, backend, bench.sizes, folder))
        print(f"{len(urls)} workers ready in {time.monotonic() - began_s:.1f} s", flush=True)
        bench.calibrate(urls[0])
        fronts = []
        for policy in policies:
            router = stack.enter_context(
                running(Router("headrace", policy), urls, folder, folder, INDEX_BYTES)
            )
            fronts.append(Front(url=f"http://127.0.0.1:{router.port}", policy=policy))
        turns = [
            (front, number, load)
            for load in sorted(loads, reverse=True)
            for number in range(len(WORKLOADS))
            for front in fronts
        ]
        for front, number, load in turns:
            if budget_s and time.monotonic() - began_s > budget_s:
                print(f"no time for {front.policy}, workload {number}, load {load}", flush=True)
                continue
            bench.level(front, number, load)
        for front in fronts:
            states = {what: n for (label, what), n in front.counts().items() if label == "state"}
            print(f"{front.policy}: workers by what is known of them: {states}", flush=True)


def over_cpu(bench: Bench, model: str, policies: Sequence[str], loads: Sequence[float]) -> None:
    """Replicas anew for each policy."""
    for policy in policies:
        with (
            tempfile.TemporaryDirectory(prefix="fleet-") as name,
            replicas(policy, model, bench.sizes, Path(name)) as front,
        ):
            if not bench.points:
                bench.calibrate(front.url)
            for load in loads:
                for number in range(len(WORKLOADS)):
                    bench.level(front, number, load)


def card() -> str:
    """What nvidia-smi calls the first GPU; "" without one."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return subprocess.check_output(query, text=True).splitlines()[0]
    return ""


def _sizes(count: int, block: int, prefixes: int, output_tokens: int) -> Sizes:
    share = prefixes * SHARED_BLOCKS * block
    kv_tokens = round(KV_SHARE * share / KV_BLOCK) * KV_BLOCK
    return Sizes(
        workers=count,
        block=block,
        prefixes=prefixes * count,
        output_tokens=output_tokens,
        kv_tokens=kv_tokens,
    )


def _numbers(_: click.Context, param: click.Parameter, value: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in value.split(","))
    except ValueError:
        raise click.BadParameter(f"{value!r}: numbers, with commas between", param=param) from None


def _names(_: click.Context, __: click.Parameter, value: str) -> tuple[str, ...]:
    return tuple(part for part in value.split(",") if part)


@click.command(help=__doc__)
@click.option("--gpus", type=click.IntRange(2), default=None, help="workers; default: all GPUs")
@click.option("--policies", callback=_names, default="", help="with commas between")
@click.option("--loads", callback=_numbers, default="0.9,2.0", show_default=True)
@click.option("--seconds", type=float, default=0.0, help="of arrivals a level")
@click.option("--shape", type=click.Choice(sorted(CONFIGS)), default="qwen2.5-14b")
@click.option("--backend", type=click.Choice(["cuda", "cpu", "fake"]), default="cuda")
@click.option("--block", type=int, default=128, help="tokens of a block of the workloads")
@click.option("--budget-s", type=float, default=0.0, help="0 = no limit; else the last levels go")
@click.option("--cpu", is_flag=True, help="two replicas of the default model on this processor")
@click.option("--model", default="", help="with --cpu: another model")
@click.option("--out", type=click.Path(path_type=Path), default=RESULTS)
def main(
    gpus: int | None,
    policies: tuple[str, ...],
    loads: tuple[float, ...],
    seconds: float,
    shape: str,
    backend: str,
    block: int,
    budget_s: float,
    cpu: bool,
    model: str,
    out: Path,
) -> None:
    """Measure, simulate, write."""
    day = time.strftime("%Y-%m-%d")
    stem = out / f"gateway-{'cpu' if cpu else 'devices'}-{day}"
    out.mkdir(parents=True, exist_ok=True)
    run: Callable[[Bench], None]
    if cpu:
        policies = policies or ("token_cost", "round_robin")
        sizes = _sizes(2, 32, 4, 16)
        kind = Kind(kind="words", endpoint="chat")
        what = f"{sizes.workers} replicas of {model or 'the default model'}, {platform.machine()}"
        run = lambda bench: over_cpu(bench, model, policies, loads)  # noqa: E731
    else:
        policies = policies or POLICIES
        count = gpus or max(2, len(visible_gpus()))
        sizes = _sizes(count, block, PREFIXES, 24)
        kind = Kind(kind="ids", endpoint="completions", vocabulary=_vocabulary(shape, backend))
        what = f"{count} workers, {shape} on {card() or backend}"
        run = lambda bench: over_gpus(bench, shape, backend, policies, loads, budget_s)  # noqa: E731
    with tempfile.TemporaryDirectory(prefix="fleet-") as name:
        bench = Bench(
            kind, sizes, seconds or (30.0 if cpu else 7.0), Path(name), stem.with_suffix(".jsonl")
        )
        try:
            run(bench)
        finally:
            if bench.points:
                _write(bench, stem, f"{what}, {day}", policies)


def _vocabulary(shape: str, backend: str) -> int:
    size: int = CONFIGS[shape]["vocab_size"]
    return FAKE_IDS if backend == "fake" else size


def _write(bench: Bench, stem: Path, title: str, policies: Sequence[str]) -> None:
    loads = sorted({point.load for point in bench.points})
    simulated = curves(bench.device, bench.seconds, bench.sizes, loads, policies)
    facts = {
        "title": title,
        "headrace": __version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "seconds": bench.seconds,
        "sizes": bench.sizes,
        "device": bench.device,
    }
    print(write([*bench.points, *simulated], stem, facts))
    bench.rows.unlink()  # kept for a run that is cut short


if __name__ == "__main__":
    main()
