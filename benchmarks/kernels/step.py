"""Chooses the kernels of decode by the time of a whole step on the card it runs on.

    scripts/tune_step --bucket 16 [--layers 16] [--shape qwen2.5-14b] [--budget-s 110]
                      [--like "NVIDIA H100 80GB HBM3"] [--kinds out,qkv]
    scripts/tune_step --merge step-16.json step-32.json ...     (no GPU: into the package's file)

Builds the model as the server does (random weights), captures the graph of a decode step and times
its replays. Begins with what the card's table has, then settles one choice at a time: each matrix
(its configuration's neighbours, others that look fast, and the library), attention, and the
switches of each matrix. `--like`: what another card's table has, and its neighbours, are tried
first. A change stays only if the step gains more than the noise; see `descent`.
Writes step-<bucket>.json in $OUT and prints steps before and after, and with the library alone.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.gpu.shapes import CONFIGS
from benchmarks.kernels.candidates import neighbours, shortlist, switches
from benchmarks.kernels.descent import LONG, Choices, Descent, Unfit
from benchmarks.kernels.scene import Scene, SceneTimer, weight_bytes
from benchmarks.kernels.tune import BUCKETS, merged
from headrace.backends.cuda.device import Card, find_card
from headrace.config import Settings
from headrace.kernels.attention_configs import DECODE_CANDIDATES
from headrace.kernels.attention_decode import most_splits
from headrace.kernels.product import FOLD_TOKENS
from headrace.kernels.tuned import (
    Decoding,
    Heads,
    card_file,
    choose,
    choose_decoding,
    decode_entry,
    entry,
)
from headrace.models.layers import Decoder
from headrace.models.spec import ModelSpec
from headrace.runner.build import read_facts
from headrace.runner.weights import load_model
from headrace.sources.files import ModelFiles

ORDER = ("gate_up", "down", "out", "qkv", "head", "decode")  # most bytes first
NORMED = ("qkv", "gate_up", "head")  # behind a norm
SHORT_TOKENS, LONG_TOKENS = 100, 4000  # behind each row
MOST_CACHED_TOKENS = 64000  # of all rows of a long step
CHECKED_LAYERS = 2  # rounding grows with every layer, mistakes show in the first
MAX_ERROR = 5e-2  # of their logits in bfloat16, against the library's
MAX_ROUTED_ERROR = 3e-1  # a token near a tie may go to another expert


def contexts(tokens: int, name: str) -> list[int]:
    """At which steps a choice is judged: attention at long ones too."""
    long = min(LONG_TOKENS, MOST_CACHED_TOKENS // tokens)
    return [SHORT_TOKENS, long] if name == "decode" else [SHORT_TOKENS]


def matrices(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """kind -> (N, K)."""
    inner = spec.heads * spec.head_dim
    rows = inner + 2 * spec.kv_heads * spec.head_dim
    if spec.latent is not None:
        latent = spec.latent
        assert not latent.q_rank, "queries through a latent of their own are not searched for"
        inner = spec.heads * latent.value_dim
        rows = spec.heads * (latent.plain_dim + latent.rope_dim) + latent.kv_rank + latent.rope_dim
    found = {
        "qkv": (rows, spec.hidden),
        "out": (spec.hidden, inner),
        "head": (spec.vocab_size, spec.hidden),
    }
    if any(layer.mlp == "dense" for layer in spec.every_layer()):
        found |= {"gate_up": (2 * spec.ffn, spec.hidden), "down": (spec.hidden, spec.ffn)}
    return found


def heads_of(spec: ModelSpec) -> Heads:
    """As the table keeps attention under."""
    return Heads(spec.heads, spec.kv_heads, spec.head_dim)


def standing(spec: ModelSpec, card: Card, bucket: int, name: str = "") -> dict[str, Any]:
    """What the package chooses now on this card, or would on the one of another name."""
    sizes, name = matrices(spec), name or card.name
    normed = spec.head_dim if spec.qk_norm else 0
    choices: dict[str, Any] = {
        kind: choose(kind, bucket, *size, device_name=name, normed_head=normed)
        for kind, size in sizes.items()
    }

    choices["decode"] = choose_decoding(
        bucket, heads_of(spec), torch.bfloat16, card.multiprocessors, name
    )
    return choices


def decodings(card: Card, spec: ModelSpec) -> list[Decoding]:
    """Attention's candidates."""
    most = most_splits(spec.kv_heads, card.multiprocessors)
    splits = sorted({max(1, most // 8), max(1, most // 4), max(1, most // 2), most})
    return [Decoding(config, n) for config in DECODE_CANDIDATES for n in splits]


class StepTuner:
    """One model, card and bucket; `workers`: threads that compile."""

    def __init__(
        self,
        model: Decoder,
        card: Card,
        bucket: int,
        *,
        tokens: Sequence[int],
        workers: int,
        until_s: float,
        most: int,
        like: str = "",
        kinds: Sequence[str] = (),
    ) -> None:
        self.model, self.card, self.bucket, self.most = model, card, bucket, most
        self.workers = workers
        every = matrices(model.spec)
        self.sizes = {kind: size for kind, size in every.items() if not kinds or kind in kinds}
        self.start = standing(model.spec, card, bucket)
        self.guide = standing(model.spec, card, bucket, like)
        self.scenes = [
            Scene(model, card, t, max(contexts(t, "decode")), self.start) for t in tokens
        ]
        self.timer = SceneTimer(self.scenes, contexts)
        self.descent = Descent(self.timer, dict(self.start), until_s)

    def compile(self, wanted: dict[str, list[Any]]) -> None:
        """Candidates by name, beside what stands."""
        base = self.descent.choices
        choices = [base] + [base | {name: one} for name, many in wanted.items() for one in many]
        begun_s = time.perf_counter()
        for scene in self.scenes:
            scene.compile(choices, self.workers)
        print(f"  {len(choices)} compiled in {time.perf_counter() - begun_s:.0f} s", flush=True)

    def run(self) -> None:
        """Settle every choice, then go on from there, then the switches of each matrix."""
        sizes, guide = self.sizes, self.guide
        first: dict[str, list[Any]] = {
            kind: [guide[kind], *shortlist(guide[kind], self.bucket, *size, most=self.most)]
            for kind, size in sizes.items()
        }
        if self.model.spec.latent is None:
            first["decode"] = decodings(self.card, self.model.spec)
        self._pass(first)
        settled = self.descent.choices
        self._pass(
            {
                kind: neighbours(config, self.bucket, *size)
                for kind, size in sizes.items()
                if (config := settled[kind]) is not None
            }
        )
        settled = self.descent.choices
        self._pass(
            {
                kind: switches(config, folds=kind in NORMED and self.bucket <= FOLD_TOKENS)
                for kind in sizes
                if (config := settled[kind]) is not None
            }
        )

    def _pass(self, wanted: dict[str, list[Any]]) -> None:
        if self.descent.late():
            print("the time is up before another pass", flush=True)
            return
        self.compile(wanted)
        for name in ORDER:
            if name in wanted:
                begun_s = time.perf_counter()
                self.descent.visit(name, wanted[name])
                took_s = time.perf_counter() - begun_s
                print(f"  {name}: {len(wanted[name])} tried in {took_s:.0f} s", flush=True)

    def check(self) -> float:
        """Largest relative error of a short model's logits against the library's."""
        reference = {**self.start, **dict.fromkeys(self.sizes)}
        blocks, errors = self.model.blocks, []
        self.model.blocks = blocks[:CHECKED_LAYERS]
        for scene in self.scenes:
            expected = scene.logits(SHORT_TOKENS, reference)
            out = scene.logits(SHORT_TOKENS, self.descent.choices)
            errors.append(float((out - expected).norm() / expected.norm()))
        self.model.blocks = blocks
        error = max(errors)
        most = MAX_ERROR if self.model.spec.experts is None else MAX_ROUTED_ERROR
        assert error < most, f"{self.descent.choices}: relative error {error:.1e}"
        return error

    def table(self) -> dict[str, dict[str, float]]:
        """name -> "tokens x context" -> milliseconds a step."""
        rows: dict[str, Choices] = {
            "library": {**self.start, **dict.fromkeys(self.sizes)},
            "before": self.start,
            "after": self.descent.choices,
        }
        made: dict[str, dict[str, float]] = {}
        for name, choices in rows.items():
            try:
                each = self.timer.each(choices, "decode", LONG)
            except Unfit as error:
                print(f"{name}: {error}")
                continue
            made[name] = {
                f"{tokens} x {context}": ms
                for tokens, times in each.items()
                for context, ms in zip(contexts(tokens, "decode"), times, strict=True)
            }
        return made

    def json(self, error: float, table: dict[str, dict[str, float]]) -> dict[str, Any]:
        """As the card's file holds it."""
        spec, chosen, sizes = self.model.spec, self.descent.choices, matrices(self.model.spec)
        return {
            "card": self.card.name,
            "date": datetime.date.today().isoformat(),
            "versions": {"torch": torch.__version__, "triton": triton.__version__},
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "step": {"layers": spec.layers, "error": error, "ms": table},
            "entries": [
                entry(kind, *size, self.bucket, chosen[kind]) for kind, size in sizes.items()
            ],
            "decode": []
            if spec.latent is not None
            else [decode_entry(heads_of(spec), self.bucket, chosen["decode"])],
        }


def show(table: dict[str, dict[str, float]], size_bytes: int) -> None:
    """Milliseconds, and the rate at which the weights passed."""
    for name, by_step in table.items():
        cells = (
            f"{step}: {ms:8.3f} ms {size_bytes / ms / 1e9:5.2f} TB/s"
            for step, ms in by_step.items()
        )
        print(f"{name:8}", "   ".join(cells), flush=True)


def build(shape: str, layers: int | None) -> Decoder:
    """Random weights on the GPU; `layers`: how many of the model's."""
    config = dict(CONFIGS[shape])
    if layers is not None:
        config["num_hidden_layers"] = layers
    folder = Path(tempfile.mkdtemp(prefix="tune-step-"))
    (folder / "config.json").write_text(json.dumps(config))
    settings = Settings(backend="cuda", load_format="dummy", dtype="bfloat16")
    facts = read_facts(settings, ModelFiles(shape, "hf", folder))
    device = torch.device("cuda", torch.cuda.current_device())
    model = load_model(facts.spec, None, getattr(torch, facts.dtype.value), device)
    model.fold_norms()  # as the server does in bfloat16
    return model


def tune(args: argparse.Namespace) -> None:
    """One bucket on this card."""
    begun_s = time.monotonic()
    card = find_card()
    model = build(args.shape, args.layers)
    tuner = StepTuner(
        model,
        card,
        args.bucket,
        tokens=BUCKETS[args.bucket],
        workers=args.workers,
        until_s=begun_s + args.budget_s,
        most=args.most,
        like=args.like,
        kinds=[kind for kind in args.kinds.split(",") if kind],
    )
    print(f"{card.name}: ready after {time.monotonic() - begun_s:.0f} s", flush=True)
    tuner.run()
    error, table = tuner.check(), tuner.table()
    show(table, weight_bytes(model))
    for name, chosen in tuner.descent.choices.items():
        print(f"  {name:8} {chosen}")
    print(f"error {error:.1e}, {tuner.descent.tried} timings, {time.monotonic() - begun_s:.0f} s")
    path = args.out or Path(os.environ.get("OUT", ".")) / f"step-{args.bucket}.json"
    path.write_text(json.dumps(tuner.json(error, table), indent=1) + "\n")
    print(f"wrote {path}")


def merge(paths: Iterable[Path], folder: Path | None = None) -> list[Path]:
    """Into the files of the cards they name; those files."""
    written = []
    for path in paths:
        made = json.loads(path.read_text())
        target = card_file(made["card"]) if folder is None else card_file(made["card"], folder)
        target.write_text(json.dumps(merged(made, target), indent=1) + "\n")
        written.append(target)
    return written


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bucket", type=int, choices=sorted(BUCKETS), default=16)
    parser.add_argument("--shape", choices=sorted(CONFIGS), default="qwen2.5-14b")
    parser.add_argument("--like", default="", help="card whose table says what to try first")
    parser.add_argument("--kinds", default="", help="matrices to settle (default: all)")
    parser.add_argument("--layers", type=int, default=16, help="of the model (default 16)")
    parser.add_argument("--most", type=int, default=48, help="candidates a matrix (default 48)")
    parser.add_argument("--budget-s", type=float, default=110, help="of the search, start included")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, help="file to write (default: in $OUT)")
    parser.add_argument("--merge", type=Path, nargs="+", help="files to merge; nothing is measured")
    args = parser.parse_args()
    if args.merge:
        for path in merge(args.merge):
            print(f"wrote {path}")
        return
    if not torch.cuda.is_available():
        raise SystemExit("tune_step measures a GPU, and torch finds none here")
    tune(args)


if __name__ == "__main__":
    main()
