"""What sampling adds to a decode step: every stage alone and all of them, beside plain top_p.

    python -m benchmarks.sampling [--shape tiny] [--backend cpu] [--batches 1,32,256] [--steps 30]
                                  [--only "greedy,everything"]
    python -m benchmarks.sampling --stages [--vocab 49152]

The first form times whole steps of a runner with dummy weights: a batch of sequences decodes from
position `--context` on, over a cache that holds nothing, each with a history of as many ids. Works
on every backend. The second times the CPU pipeline alone, for one row and for eight.
Prints a table; nothing is written.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from random import Random

from msgspec.structs import replace

from benchmarks.gpu.shapes import CONFIGS, write_folder
from headrace.backends.choose import settled
from headrace.config import Settings
from headrace.engine.protocol import Runner
from headrace.messages import Dry, Join, Lz, Output, Repetition, Rules, Sampling, StepPlan
from headrace.sources.files import ModelFiles

BLOCK_SIZE = 16
PLAIN = Sampling(temperature=0.8, top_p=0.9)
GREEDY = Sampling(temperature=0.0)
RULES = Rules(
    bias=[(i, -1.0) for i in range(50)],
    banned=list(range(50, 70)),
    bad_words=[[100 + i, 200 + i] for i in range(20)],
    min_tokens=10_000,
    held=[3, 4],
)
CASES: Mapping[str, Sampling] = {
    "greedy": GREEDY,
    "plain (top_p)": PLAIN,
    "top_k": replace(PLAIN, top_p=1.0, top_k=40),
    "min_p": replace(PLAIN, top_p=1.0, min_p=0.05),
    "top_n_sigma": replace(PLAIN, top_p=1.0, top_n_sigma=1.5),
    "typical_p": replace(PLAIN, top_p=1.0, typical_p=0.9),
    "top_p + rules": replace(PLAIN, rules=RULES),
    "top_p + penalties": replace(PLAIN, repetition=Repetition(1.1, 0.2, 0.1)),
    "top_p + lz": replace(PLAIN, lz=Lz(0.15)),
    "top_p + dry": replace(PLAIN, dry=Dry(0.8, breakers=list(range(1000, 1500)))),
    "everything": Sampling(
        temperature=0.8,
        top_k=100,
        top_p=0.9,
        min_p=0.01,
        typical_p=0.95,
        top_n_sigma=2.0,
        rules=RULES,
        repetition=Repetition(1.1, 0.2, 0.1),
        dry=Dry(0.8, breakers=list(range(1000, 1500))),
        lz=Lz(0.15),
    ),
}


def history(length: int, seed: int, vocab: int) -> list[int]:
    """Ids with repeats, as texts have them."""
    random = Random(seed)
    words: list[int] = []
    while len(words) < length:
        known = bool(words) and random.random() < 0.5
        start = random.randrange(len(words)) if known else 0
        words += words[start : start + 5] if known else [random.randrange(vocab)]
    return words[:length]


def plan(
    step: int, batch: int, position: int, joins: list[Join], leaves: list[int], *, known: bool
) -> StepPlan:
    """One token of every row; `known`: the host sends it."""
    rows = list(range(batch))
    return StepPlan(
        step,
        leaves,
        joins,
        [],
        [[]],
        rows,
        [position] * batch,
        [1] * batch,
        [[7] if known else None for _ in rows],
        [Output.SAMPLE] * batch,
        [],
        rows,
        rows,
    )


class Decoder:
    """Decodes batches on one runner, a case after another."""

    def __init__(self, runner: Runner, context: int) -> None:
        self.runner, self.context, self._step = runner, context, 0
        self._held: list[int] = []

    def step_s(self, batch: int, sampling: Sampling, steps: int) -> float:
        """Median seconds of a step, with one step ahead as the engine has it."""
        capacity, position = self.runner.capacity, self.context - 1
        blocks = -(-(self.context + steps + 4) // BLOCK_SIZE)
        joins = [
            Join(
                row,
                replace(sampling, seed=row),
                0,
                [list(range(row * blocks, (row + 1) * blocks))],
                "",
                self.context // 2,
                history(self.context, row, capacity.vocab_size) if sampling.needs_history else [],
            )
            for row in range(batch)
        ]
        leaves, self._held = self._held, list(range(batch))
        times, before = [], None
        for i in range(steps + 3):
            self._step += 1
            first = i == 0
            ticket = self.runner.launch(
                plan(
                    self._step,
                    batch,
                    position + i,
                    joins if first else [],
                    leaves if first else [],
                    known=first,
                )
            )
            ticket.finish()
            if before is not None:
                before.result()
                times.append(time.perf_counter())
            before = ticket
        assert before is not None
        before.result()
        gaps = [b - a for a, b in pairwise(times[1:])]
        return statistics.median(gaps)


def time_steps(args: argparse.Namespace) -> None:
    """A table of milliseconds a step: cases down, batches across."""
    from headrace.runner.build import load_runner

    batches = [int(n) for n in args.batches.split(",")]
    blocks = max(batches) * (-(-(args.context + args.steps + 4) // BLOCK_SIZE))
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_folder(args.shape, Path(scratch))
        settings = settled(
            Settings(
                model=str(folder),
                backend=args.backend,
                load_format="dummy",
                block_size=BLOCK_SIZE,
                kv_blocks=blocks + 8,
                max_num_seqs=max(batches),
                max_model_len=args.context + args.steps + BLOCK_SIZE,
            )
        )
        runner, _ = load_runner(settings, ModelFiles("bench", "hf", folder), lambda *_: None)
        decoder = Decoder(runner, args.context)
        print(f"{args.shape} on {args.backend}, vocabulary {runner.capacity.vocab_size}, ms a step")
        print("| case |" + "".join(f" {n} |" for n in batches))
        print("|---|" + "---:|" * len(batches))
        for name, sampling in CASES.items():
            if args.only and name not in args.only.split(","):
                continue
            cells = [f"{decoder.step_s(n, sampling, args.steps) * 1e3:.3f}" for n in batches]
            print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
        runner.close()


def time_stages(args: argparse.Namespace) -> None:
    """A table of milliseconds a call of the CPU pipeline, for 1 and for 8 rows."""
    import numpy as np

    from headrace.sampling.history import Ids
    from headrace.sampling.params import Columns
    from headrace.sampling.pipeline import Logits, sample
    from headrace.sampling.shaper import Shaper

    print(f"CPU pipeline alone, one thread, vocabulary {args.vocab}, ms (least of {args.steps})")
    print("| case | 1 row | 8 rows |\n|---|---:|---:|")
    for name, sampling in CASES.items():
        cells = []
        for rows in (1, 8):
            draw = np.random.default_rng(0)
            logits = 3 * draw.standard_normal((rows, args.vocab), np.float32)
            columns = Columns.of(
                [(replace(sampling, seed=i), 0, args.context) for i in range(rows)]
            )
            shapers = [
                Shaper.of(Join(i, sampling, 0, [], "", 9, history(args.context, i, args.vocab)))
                for i in range(rows)
            ]
            best = logits.argmax(-1)

            def call(
                logits: Logits = logits,
                columns: Columns = columns,
                best: Ids = best,
                shapers: list[Shaper | None] = shapers,
            ) -> None:
                sample(logits, columns, best=best, shapers=shapers)

            cells.append(f"{least_s(call, args.steps) * 1e3:.3f}")
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


def least_s(call: Callable[[], None], times: int) -> float:
    """The shortest of some runs, by the thread's own clock: neighbours do not count."""
    call()
    taken = []
    for _ in range(times):
        begun = time.thread_time()
        call()
        taken.append(time.thread_time() - begun)
    return min(taken)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--shape", default="tiny", choices=sorted(CONFIGS))
    parser.add_argument("--backend", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--batches", default="1,32,256")
    parser.add_argument("--only", default="", help="cases of the first form, by name")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--stages", action="store_true", help="the CPU pipeline alone")
    args = parser.parse_args()
    (time_stages if args.stages else time_steps)(args)


if __name__ == "__main__":
    main()
