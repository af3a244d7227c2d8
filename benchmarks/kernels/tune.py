"""Finds the fastest configuration of each matrix of a decoder on the card it runs on.

    scripts/tune_kernels [--quick] [--out FILE] [--hidden 5120 --heads 40 ...]

Compiles candidates side by side, times each over several weights inside one CUDA graph (so that no
weight is found in the L2 cache), checks the fastest against float64, and compares them with the
library's product and kernels of their own around it. Then the matrices of some layers in a row,
with and without dependent launches, prefetch and folded norm; the fastest switches are kept.
Prints tables, writes the card's file of `headrace.kernels.tuned`.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
import triton.errors
from torch import Tensor

from benchmarks.kernels.candidates import candidates
from benchmarks.kernels.chain import Chain, Configs, measure, variants
from benchmarks.kernels.clock import Clock, graph_us
from benchmarks.kernels.layers import Shape, Step
from headrace.kernels import pdl
from headrace.kernels.launch import compiling
from headrace.kernels.product import Config
from headrace.kernels.tuned import KINDS, card_file, entry

BUCKETS = {16: (1, 16), 32: (32,), 64: (64,), 128: (128,)}  # bucket -> tokens it is timed with
FINALISTS = 5
MAX_ERROR = 1e-2


@dataclasses.dataclass
class Outcome:
    """Of one matrix and bucket. Times in microseconds by tokens; config None: the library won."""

    kind: str
    n: int
    k: int
    bucket: int
    config: Config | None
    best: Config
    us: dict[int, float]
    library_us: dict[int, float]
    error: float
    tried: int

    def line(self, element_bytes: int) -> str:
        """Of the table."""
        size = self.n * self.k * element_bytes
        c = self.best
        made = f"{c.block_n}x{c.block_k} w{c.warps} s{c.stages} split {c.split_k}"
        cells = [f"{self.kind:8} {self.n:6}x{self.k:<6} {self.bucket:3} {made:26}"]
        for m, us in self.us.items():
            other = self.library_us[m]
            cells.append(
                f"m={m:<2} {us:7.1f} us {size / us / 1e6:5.2f} TB/s"
                f" (library {other:7.1f}, {size / other / 1e6:5.2f})"
            )
        return "  ".join(cells) + f"  error {self.error:.1e}, {self.tried} tried"

    def json(self) -> dict[str, Any]:
        """An entry of the card's file."""
        times = {"us": self.us, "library_us": self.library_us}
        return entry(self.kind, self.n, self.k, self.bucket, self.config) | times


class Tuner:
    """Times candidates of one shape, dtype and device; `workers` 0 compiles as it goes."""

    def __init__(
        self,
        shape: Shape,
        dtype: torch.dtype,
        device: torch.device,
        *,
        clock: Clock = graph_us,
        workers: int = 0,
        buckets: Mapping[int, Sequence[int]] = BUCKETS,
    ) -> None:
        self.clock, self.workers, self.buckets = clock, workers, buckets
        self.shape, self.dtype, self.device = shape, dtype, device
        self.pdl = pdl.supported(device)
        tokens = [m for ms in buckets.values() for m in ms]
        self.steps = {m: Step(shape, m, dtype, device) for m in tokens}

    def compile(self, launches: Sequence[tuple[str, Tensor, Config, int]]) -> None:
        """(kind, weight, configuration, tokens) of launches to come, side by side."""
        if not self.workers:
            return
        with compiling(self.workers, trying=True):
            for kind, weight, config, m in launches:
                self.steps[m].ours(kind, weight, config, self.pdl)

    def weights(self, kind: str, copies: int) -> list[Tensor]:
        """Random ones, of the size of a trained model's."""
        n, k = self.shape.matrices()[kind]
        made = [torch.randn(n, k, device=self.device, dtype=self.dtype) for _ in range(copies)]
        return [weight.mul_(k**-0.5) for weight in made]

    def time(
        self, kind: str, weights: list[Tensor], config: Config | None, m: int, n: int
    ) -> float:
        """Microseconds a matrix, from n replays; None: the library."""
        step = self.steps[m]

        def launches() -> None:
            for weight in weights:
                if config is None:
                    step.library(kind, weight, self.pdl)
                else:
                    step.ours(kind, weight, config, self.pdl)

        return self.clock(launches, n) / len(weights)

    def tune(self, kind: str, weights: list[Tensor], most: int) -> list[Outcome]:
        """An outcome for each bucket of tokens."""
        n, k = weights[0].shape
        lists = {bucket: candidates(bucket, n, k, most=most) for bucket in self.buckets}
        todo = [
            (kind, weights[0], c, max(self.buckets[bucket]))
            for bucket in self.buckets
            for c in lists[bucket]
        ]
        self.compile(todo)
        made = []
        for bucket, configs in lists.items():
            library_us = {m: self.time(kind, weights, None, m, 5) for m in self.buckets[bucket]}
            first: list[tuple[float, int]] = []
            for i, config in enumerate(configs):
                try:
                    first.append(
                        (self.time(kind, weights, config, max(self.buckets[bucket]), 3), i)
                    )
                except triton.errors.TritonError as error:
                    print(f"{kind}, {config}: {error}", flush=True)
            finalists = [configs[i] for _, i in sorted(first)[:FINALISTS]]
            timed = [
                ({m: self.time(kind, weights, config, m, 9) for m in self.buckets[bucket]}, config)
                for config in finalists
            ]
            us, best = min(timed, key=lambda pair: sum(pair[0].values()))
            wrong = self.check(kind, weights[-1], best, bucket)
            ours = sum(us.values()) <= sum(library_us.values())
            chosen = best if ours else None
            made.append(
                Outcome(kind, n, k, bucket, chosen, best, us, library_us, wrong, len(first))
            )
        return made

    def check(self, kind: str, weight: Tensor, config: Config, bucket: int) -> float:
        """Largest relative error among the bucket's tokens, which must be that of rounding."""
        errors = []
        for m in self.buckets[bucket]:
            step = self.steps[m]
            reference = step.reference(kind, weight)
            errors.append(
                step.error(reference, lambda s=step: s.ours(kind, weight, config, self.pdl))  # type: ignore[misc]
            )
        error = max(errors)
        assert error < MAX_ERROR, f"{kind}, {config}: relative error {error:.1e}"
        return error

    def chain(self, outcomes: list[Outcome], layers: int) -> dict[str, Any]:
        """Tunes what holds for a whole step, in place; TB/s by variant and tokens."""
        chain = Chain(self.shape, layers, self.dtype, self.device)
        table: dict[str, dict[int, float]] = {}
        for bucket, ms in self.buckets.items():
            mine = [outcome for outcome in outcomes if outcome.bucket == bucket]
            configs: Configs = {outcome.kind: outcome.config for outcome in mine}
            firsts = dict(chain.weights)
            self.compile(
                [
                    (kind, firsts[kind], config, max(ms))
                    for made, _ in variants(configs).values()
                    for kind, config in made.items()
                    if config is not None
                ]
            )
            times, best = measure(chain, [self.steps[m] for m in ms], configs, self.clock)
            for outcome in mine:
                outcome.config = best[outcome.kind]
            for name, by_m in times.items():
                rates = {m: round(chain.terabytes_per_s(us), 3) for m, us in by_m.items()}
                table.setdefault(name, {}).update(rates)
        return {"layers": layers, "size_bytes": chain.size_bytes, "terabytes_per_s": table}


def copies(n: int, k: int, element_bytes: int) -> int:
    """Weights to rotate among: none is found in a cache, and no more than 3 GB."""
    return max(2, min(8, (3 << 30) // (n * k * element_bytes)))


def run(tuner: Tuner, *, most: int, layers: int, card: str) -> dict[str, Any]:
    """Everything, as the card's file holds it; prints as it goes."""
    outcomes: list[Outcome] = []
    element_bytes = tuner.dtype.itemsize
    for kind in KINDS:
        begun = time.perf_counter()
        n, k = tuner.shape.matrices()[kind]
        for outcome in tuner.tune(kind, tuner.weights(kind, copies(n, k, element_bytes)), most):
            outcomes.append(outcome)
            print(outcome.line(element_bytes), flush=True)
        print(f"  {kind}: {time.perf_counter() - begun:.0f} s", flush=True)
    chain = tuner.chain(outcomes, layers) if layers else None
    for name, rates in (chain or {"terabytes_per_s": {}})["terabytes_per_s"].items():
        print(f"chain, {name:28}", *(f"m={m} {rate:.2f} TB/s" for m, rate in rates.items()))
    return {
        "card": card,
        "date": datetime.date.today().isoformat(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "dtype": str(tuner.dtype).removeprefix("torch."),
        "chain": chain,
        "entries": [outcome.json() for outcome in outcomes],
    }


def merged(made: dict[str, Any], path: Path) -> dict[str, Any]:
    """With the entries that the file holds for other shapes and buckets. Tiles of one shape stay
    together: each is for all numbers of tokens up to the next."""
    if not path.exists():
        return made
    held: dict[str, Any] = json.loads(path.read_text())
    whole = held | made
    for name in ("entries", "decode", "tiles"):
        new = [*made.get(name, ())]
        keys = [_key(one) for one in new]
        kept = [one for one in held.get(name, ()) if _key(one) not in keys]
        if kept or new:
            whole[name] = kept + new
    return whole


def _key(one: dict[str, Any]) -> dict[str, Any]:
    """What an entry is for: its shape and bucket."""
    names = ("kind", "n", "k", "heads", "kv_heads", "head_dim", "bucket")
    return {name: one[name] for name in names if name in one}


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer candidates and layers")
    parser.add_argument("--chain", type=int, help="layers in a row (default 12; 0: none)")
    parser.add_argument("--most", type=int, help="candidates a matrix and bucket (default 48)")
    parser.add_argument("--out", type=Path, help="file to write (default: in $OUT, or the package)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    for field in dataclasses.fields(Shape):
        name = "--" + field.name.replace("_", "-")
        parser.add_argument(name, type=int, default=field.default)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("tune_kernels measures a GPU, and torch finds none here")
    shape = Shape(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Shape)})
    card = torch.cuda.get_device_name()
    packaged = card_file(card)
    path = args.out or Path(os.environ.get("OUT", packaged.parent)) / packaged.name
    tuner = Tuner(shape, torch.bfloat16, torch.device("cuda"), workers=args.workers)
    most = args.most or (12 if args.quick else 48)
    layers = (4 if args.quick else 12) if args.chain is None else args.chain
    made = run(tuner, most=most, layers=layers, card=card)
    path.write_text(json.dumps(merged(made, packaged), indent=1) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
