"""All matrices of some layers in a row, as a step runs them: what bounds a step of few tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from benchmarks.kernels.candidates import PREFETCHES_BYTES
from benchmarks.kernels.clock import Clock
from benchmarks.kernels.layers import Shape, Step
from headrace.kernels import pdl
from headrace.kernels.product import Config
from headrace.kernels.tuned import KINDS

Configs = Mapping[str, Config | None]  # kind -> configuration; None: the library


def replaced(configs: Configs, **fields: bool | int) -> dict[str, Config | None]:
    """The same with these fields in every configuration."""
    return {
        kind: None if config is None else dataclasses.replace(config, **fields)  # type: ignore[arg-type]
        for kind, config in configs.items()
    }


class Chain:
    """The weights of `layers` layers and one head, random, of one dtype on one device."""

    def __init__(self, shape: Shape, layers: int, dtype: torch.dtype, device: torch.device) -> None:
        sizes = shape.matrices()
        self.pdl = pdl.supported(device)

        def draw(kind: str) -> Tensor:
            n, k = sizes[kind]
            return torch.randn(n, k, device=device, dtype=dtype).mul_(k**-0.5)

        body = [(kind, draw(kind)) for _ in range(layers) for kind in KINDS if kind != "head"]
        self.weights = [*body, ("head", draw("head"))]
        self.size_bytes = sum(w.numel() * w.element_size() for _, w in self.weights)

    def launch(self, step: Step, configs: Configs, with_pdl: bool) -> None:
        """Every product once, in a step's order; dependent launches where the card has them."""
        with_pdl = with_pdl and self.pdl
        for kind, weight in self.weights:
            config = configs[kind]
            if config is None:
                step.library(kind, weight, with_pdl)
            else:
                step.ours(kind, weight, config, with_pdl)

    def terabytes_per_s(self, us: float) -> float:
        """Of weights."""
        return self.size_bytes / us / 1e6


def variants(configs: Configs) -> dict[str, tuple[Configs, bool]]:
    """name -> (configurations, dependent launches): what one can switch for a whole step."""
    made: dict[str, tuple[Configs, bool]] = {
        "library": (dict.fromkeys(configs), False),
        "no dependent launches": (configs, False),
        "norm apart": (replaced(configs, fold_norm=False), True),
    }
    for size in PREFETCHES_BYTES:
        made[f"prefetch {size}"] = (replaced(configs, prefetch_bytes=size), True)
        apart = replaced(configs, prefetch_bytes=size, fold_norm=False)
        made[f"prefetch {size}, norm apart"] = (apart, True)
    return made


def measure(
    chain: Chain, steps: Sequence[Step], configs: Configs, clock: Clock
) -> tuple[dict[str, dict[int, float]], Configs]:
    """Microseconds of each variant by tokens, and the configurations of the fastest of ours."""
    made = variants(configs)
    times: dict[str, dict[int, float]] = {}
    for name, (chosen, with_pdl) in made.items():
        times[name] = {
            step.m: clock(lambda s=step, c=chosen, p=with_pdl: chain.launch(s, c, p), 7)  # type: ignore[misc]
            for step in steps
        }
    totals = {name: sum(by_m.values()) for name, by_m in times.items() if "prefetch" in name}
    best, _ = made[min(totals, key=lambda name: totals[name])]
    return times, best
