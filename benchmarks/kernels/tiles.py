"""Gate, up and their activation of many tokens: one kernel beside the library's product.

    python -m benchmarks.kernels.tiles [--hidden 5120 --ffn 13824] [--tokens 512,1024,4096]

Under a load that lasts: a card that has computed for tenths of a second is at its power limit,
and what is fastest in a burst may not be so there. Each candidate runs for a quarter of a second,
twice; the second half of each run counts, the better of both. Checks the fastest against float64;
the library keeps a size where ours gains less than a hundredth, and so does what the size before
has. Writes an entry for the first number of tokens, and for each that has another configuration
than the one before; `scripts/tune_step --merge` puts them into the card's file of
`headrace.kernels.tuned`, in place of all that it has of the shape.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.errors
from torch import Tensor

from headrace.kernels import pdl
from headrace.kernels.activation import activation
from headrace.kernels.gate_up_tiles import TileConfig, gate_up_tiles, gate_up_tiles_reference
from headrace.kernels.tuned import card_file, tile_entry

CANDIDATES = (
    TileConfig(),
    TileConfig(flat=False),
    TileConfig(stages=3),
    TileConfig(128, 64, 64, 4, 4, flat=False),
    TileConfig(128, 64, 64, 8, 4, flat=False),
    TileConfig(256, 64, 64, 8, 4),
)
TOKENS = (128, 256, 512, 640, 768, 1024, 2048, 4096)
RUN_S, COUNTED_S = 0.12, 0.12
GAIN = 1.01  # by which ours must be ahead
CHECKED = 64  # rows whose results are compared with float64
MAX_ERROR = 1e-2

Run = Callable[[], Any]


def lasting_us(run: Run, once_ms: float) -> float:
    """Microseconds a call, after so long a load."""
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    for _ in range(int(RUN_S * 1e3 / once_ms) + 1):
        run()
    count = int(COUNTED_S * 1e3 / once_ms) + 1
    began.record()
    for _ in range(count):
        run()
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended)) / count * 1e3


def once_ms(run: Run) -> float:
    """About how long a call takes; the first compiles."""
    run()
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    began.record()
    for _ in range(4):
        run()
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 4


class Layer:
    """What the first half of a feed-forward layer reads and writes, for `tokens` tokens."""

    def __init__(self, hidden: int, ffn: int, tokens: int, device: torch.device) -> None:
        def draw(*sizes: int) -> Tensor:
            return torch.randn(sizes, device=device).to(torch.bfloat16)

        self.x, self.weight = draw(tokens, hidden), draw(2 * ffn, hidden).mul_(hidden**-0.5)
        self.scale = torch.rand(tokens, device=device) + 0.5
        self.both = torch.empty(tokens, 2 * ffn, dtype=torch.bfloat16, device=device)
        self.inner = torch.empty(tokens, ffn, dtype=torch.bfloat16, device=device)
        self.pdl = pdl.supported(device)
        self.multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count

    def library(self) -> None:
        """As a step without an entry."""
        torch.mm(self.x, self.weight.t(), out=self.both)
        activation(self.both, scale=self.scale, out=self.inner, with_pdl=self.pdl)

    def ours(self, config: TileConfig) -> None:
        """As a step with it."""
        count = self.multiprocessors
        more: dict[str, Any] = {"scale": self.scale, "config": config, "multiprocessors": count}
        gate_up_tiles(self.x, self.weight, out=self.inner, **more)

    def error(self, config: TileConfig) -> float:
        """Of the first and the last rows, relative."""
        self.inner.fill_(float("nan"))
        self.ours(config)
        rows = [*range(CHECKED), *range(-CHECKED, 0)] if len(self.x) > 2 * CHECKED else slice(None)
        expected = gate_up_tiles_reference(self.x[rows], self.weight, scale=self.scale[rows])
        return float((self.inner[rows].double() - expected).norm() / expected.norm())


def measure(
    layer: Layer, tokens: int, before: TileConfig | None
) -> tuple[TileConfig | None, dict[str, float]]:
    """The configuration to keep, None for the library, and microseconds by candidate. `before`:
    that of fewer tokens."""
    runs: dict[str, tuple[TileConfig | None, Run]] = {"library": (None, layer.library)}
    runs |= {str(c): (c, functools.partial(layer.ours, c)) for c in CANDIDATES}
    once: dict[str, float] = {}
    for name, (_, run) in runs.items():
        try:
            once[name] = once_ms(run)
        except triton.errors.TritonError as refused:
            print(f"{tokens} tokens, {name}: {refused}", flush=True)
    us: dict[str, float] = {}
    for _ in range(2):
        for name, ms in once.items():
            us[name] = min(us.get(name, float("inf")), lasting_us(runs[name][1], ms))
    best = min(us, key=lambda name: us[name])
    names = ("library", str(before), best)
    kept = next(name for name in names if us.get(name, float("inf")) < us[best] * GAIN)
    config = runs[kept][0]
    if config is None:
        return None, us
    error = layer.error(config)
    assert error < MAX_ERROR, f"{tokens} tokens, {config}: relative error {error:.1e}"
    return config, us


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=5120)
    parser.add_argument("--ffn", type=int, default=13824)
    parser.add_argument("--tokens", default=",".join(str(n) for n in TOKENS))
    parser.add_argument("--out", type=Path, help="file to write (default: in $OUT)")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this measures a GPU, and torch finds none here")
    card, device = torch.cuda.get_device_name(), torch.device("cuda")
    made: list[dict[str, Any]] = []
    before: TileConfig | None = None
    for tokens in sorted(int(n) for n in args.tokens.split(",")):
        layer = Layer(args.hidden, args.ffn, tokens, device)
        config, us = measure(layer, tokens, before)
        flops = 4 * tokens * args.hidden * args.ffn
        print(f"{tokens} tokens: {'library' if config is None else config}", flush=True)
        for name, time_us in sorted(us.items(), key=lambda item: item[1]):
            print(f"  {time_us:8.1f} us {flops / time_us / 1e6:6.1f} TFLOP/s  {name}", flush=True)
        if made and config == before:
            continue
        before, chosen = config, "library" if config is None else str(config)
        times = {"us": round(us[chosen], 1), "library_us": round(us["library"], 1)}
        made.append(tile_entry(2 * args.ffn, args.hidden, tokens, config) | times)
    path = args.out or Path(os.environ.get("OUT", ".")) / f"tiles-{card_file(card).name}"
    facts = {
        "card": card,
        "date": datetime.date.today().isoformat(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "dtype": "bfloat16",
        "tiles": made,
    }
    path.write_text(json.dumps(facts, indent=1) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
