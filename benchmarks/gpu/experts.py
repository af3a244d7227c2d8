"""Kernels of mixtures of experts and latent attention on this card: microseconds and rates.

    python -m benchmarks.gpu.experts [--part experts,latent,prefill] [--shape NAME] [--quick]

Inside CUDA graphs over several layers' weights, which no cache of the card holds; tokens are routed
at random. Every candidate configuration is timed, all are compiled first, side by side. Prints one
JSON line a figure: `us` a layer, `tbps` of the bytes that must be read (matrices of the experts
that are hit, lines of the cache), `tflops` of the products that must be made; at the end the best
configuration of each shape, as `headrace/kernels/tuned` holds it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import click
import torch
from torch import Tensor

from benchmarks.kernels.clock import graph_us
from headrace.kernels import pdl
from headrace.kernels.attention_prefill import PrefillScratch
from headrace.kernels.chunks import Chunks, Tiling
from headrace.kernels.columns import StepColumns
from headrace.kernels.dispatch import Dispatch, DispatchScratch, dispatch, route_and_dispatch
from headrace.kernels.experts import (
    CANDIDATES,
    ExpertsConfig,
    combine,
    default_configs,
    default_tile_rows,
    expert_down,
    expert_gate_up,
)
from headrace.kernels.latent import LatentShape, absorb, latent_write, value_up
from headrace.kernels.latent_decode import LATENT_CANDIDATES, latent_decode, latent_scratch
from headrace.kernels.latent_dense import (
    LATENT_DENSE_CANDIDATES,
    DenseKeys,
    gather_lines,
    latent_dense,
)
from headrace.kernels.latent_prefill import latent_prefill, latent_prefill_config
from headrace.kernels.launch import compiling
from headrace.kernels.router import Routing

LAYERS = 3  # whose weights take turns
REPLAYS = 20
DTYPE = torch.bfloat16
TOKENS = (1, 4, 8, 16, 32, 64, 128, 256, 1024, 8192)
LATENT = LatentShape(heads=16, rank=512, nope=128, rope=64, dv=128)
PAGE = 16


@dataclasses.dataclass(frozen=True)
class Shape:
    """Of the mixture of one model."""

    hidden: int
    ffn: int
    routing: Routing


SHAPES = {
    "qwen3-30b-a3b": Shape(2048, 768, Routing(128, 8)),
    "deepseek-v2-lite": Shape(2048, 1408, Routing(64, 6, renormalise=False, shared=2)),
}
Run = Callable[[], object]


def say(**row: Any) -> None:
    print(json.dumps(row), flush=True)


def timed(name: str, run: Run, layers: int, read_bytes: float, flops: float, **more: Any) -> float:
    """Print a figure of `run`, which goes through so many layers -> microseconds of one."""
    us = graph_us(run, REPLAYS) / layers
    rates = {"tbps": round(read_bytes / us / 1e6, 3), "tflops": round(flops / us / 1e6, 1)}
    say(kernel=name, us=round(us, 2), **rates, **more)
    return us


class Mixture:
    """Weights of LAYERS layers, and the routing of one step of `tokens` tokens in each."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        total = shape.routing.total

        def draw(*sizes: int) -> list[Tensor]:
            like = (torch.empty(sizes, dtype=DTYPE, device=device) for _ in range(LAYERS))
            return [tensor.normal_(0.0, 0.02) for tensor in like]

        self.gate_up = draw(total, 2 * shape.ffn, shape.hidden)
        self.down = draw(total, shape.hidden, shape.ffn)

    def plans(self, tokens: int, tile_rows: int) -> list[Dispatch]:
        """Of each layer, by random logits."""
        found = []
        for layer in range(LAYERS):
            plan = DispatchScratch(tokens, self.shape.routing, self.device).of(tokens, tile_rows)
            rng = torch.Generator(self.device).manual_seed(layer)
            logits = torch.randn(
                tokens, self.shape.routing.experts, generator=rng, device=self.device
            )
            route_and_dispatch(logits, self.shape.routing, plan, with_pdl=True)
            found.append(plan)
        return found


def tile_sizes(tokens: int, routing: Routing) -> list[int]:
    """Worth a try."""
    usual = default_tile_rows(tokens, routing)
    return [rows for rows in (usual // 2, usual, usual * 2) if rows in CANDIDATES]


def launches(mixture: Mixture, tokens: int) -> Iterator[tuple[str, int, ExpertsConfig, Run]]:
    """The two grouped products in every configuration."""
    shape = mixture.shape
    x = torch.randn(tokens, shape.hidden, device=mixture.device).to(DTYPE)
    items = tokens * shape.routing.each
    inner = torch.randn(items, shape.ffn, device=mixture.device).to(DTYPE)
    y = torch.empty(items, shape.hidden, dtype=DTYPE, device=mixture.device)
    for rows in tile_sizes(tokens, shape.routing):
        plans = mixture.plans(tokens, rows)
        for config in CANDIDATES[rows]:
            options: dict[str, Any] = {"config": config, "with_pdl": True}

            def up(plans: list[Dispatch] = plans, options: dict[str, Any] = options) -> None:
                for weight, plan in zip(mixture.gate_up, plans, strict=True):
                    expert_gate_up(x, weight, plan, out=inner, **options)

            def down(plans: list[Dispatch] = plans, options: dict[str, Any] = options) -> None:
                for weight, plan in zip(mixture.down, plans, strict=True):
                    expert_down(inner, weight, plan, out=y, **options)

            yield "gate_up", rows, config, up
            yield "down", rows, config, down


def measure_experts(name: str, tokens_list: tuple[int, ...], device: torch.device) -> None:
    """Every candidate of both products, and the best."""
    shape = SHAPES[name]
    mixture = Mixture(shape, device)
    best: dict[tuple[str, int, int], tuple[float, ExpertsConfig]] = {}
    with compiling(os.cpu_count() or 8, trying=True):
        for tokens in tokens_list:
            for *_, run in launches(mixture, tokens):
                run()
    for tokens in tokens_list:
        plan = mixture.plans(tokens, 16)[0]
        hit = len(set(plan.experts.reshape(-1).tolist()))
        items = tokens * shape.routing.each
        for kind, rows, config, run in launches(mixture, tokens):
            size = shape.hidden * shape.ffn * (2 if kind == "gate_up" else 1)
            facts = {"shape": name, "tokens": tokens, "hit": hit, "tile_rows": rows}
            facts["config"] = list(dataclasses.astuple(config))
            try:
                us = timed(kind, run, LAYERS, 2.0 * size * hit, 2.0 * size * items, **facts)
            except Exception as error:  # a candidate that this card refuses
                say(kernel=kind, failed=repr(error), **facts)
                continue
            key = (kind, tokens, rows)
            if key not in best or us < best[key][0]:
                best[key] = (us, config)
        measure_layer(mixture, name, tokens, device)
    for (kind, tokens, rows), (us, config) in best.items():
        say(best=kind, shape=name, tokens=tokens, tile_rows=rows, us=round(us, 2),
            config=dataclasses.asdict(config))  # fmt: skip


def measure_layer(mixture: Mixture, name: str, tokens: int, device: torch.device) -> None:
    """Route, both products and the sum, one after another, with the default configuration."""
    shape = mixture.shape
    rows = default_tile_rows(tokens, shape.routing)
    of_up, of_down = default_configs(rows)
    plan = DispatchScratch(tokens, shape.routing, device).of(tokens, rows)
    logits = torch.randn(tokens, shape.routing.experts, device=device)
    x = torch.randn(tokens, shape.hidden, device=device).to(DTYPE)
    items = tokens * shape.routing.each
    inner = torch.empty(items, shape.ffn, dtype=DTYPE, device=device)
    y = torch.empty(items, shape.hidden, dtype=DTYPE, device=device)
    tally = torch.zeros(2, shape.routing.total, dtype=torch.int64, device=device)

    def route() -> None:
        for _ in range(LAYERS):
            route_and_dispatch(logits, shape.routing, plan, tally=tally, with_pdl=True)

    def layer() -> None:
        for up, down in zip(mixture.gate_up, mixture.down, strict=True):
            route_and_dispatch(logits, shape.routing, plan, tally=tally, with_pdl=True)
            expert_gate_up(x, up, plan, out=inner, config=of_up, with_pdl=True)
            expert_down(inner, down, plan, out=y, config=of_down, with_pdl=True)
            combine(y, plan, residual=x, out=x, with_pdl=True)

    route()
    hit = len(set(plan.experts.reshape(-1).tolist()))
    size = 3 * shape.hidden * shape.ffn
    facts = {"shape": name, "tokens": tokens, "hit": hit, "tile_rows": rows}
    timed("route", route, LAYERS, 0.0, 0.0, **facts)
    if tokens > 16:
        timed("dispatch alone", lambda: dispatch(shape.routing, plan, with_pdl=True), 1, 0, 0,
              **facts)  # fmt: skip
    timed("layer", layer, LAYERS, 2.0 * size * hit, 2.0 * size * items, **facts)


class Lines:
    """A cache of `context` tokens for each of `tokens` rows, whose last token is the step's."""

    def __init__(self, tokens: int, context: int, device: torch.device) -> None:
        width = -(-context // PAGE)
        blocks = tokens * width
        self.cache = torch.empty(blocks + 1, 1, PAGE, LATENT.line, dtype=DTYPE, device=device)
        self.cache.normal_()
        tables = torch.randperm(blocks, device=device).view(tokens, width)
        tables = torch.cat((tables, torch.full((1, width), blocks, device=device))).int()
        ones = torch.ones(tokens, dtype=torch.int32, device=device)
        rows = torch.arange(tokens, dtype=torch.int32, device=device)
        self.columns = StepColumns(rows, ones * (context - 1), ones, tables.contiguous())


def measure_latent(tokens_list: tuple[int, ...], device: torch.device) -> None:
    """The kernels of a decode step, by tokens and context."""
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    scale = LATENT.query**-0.5
    up = torch.randn(LATENT.heads * (LATENT.nope + LATENT.dv), LATENT.rank, device=device).to(DTYPE)
    angles = torch.randn(32768, LATENT.rope // 2, device=device)
    for tokens in tokens_list:
        both = torch.randn(tokens, LATENT.heads * LATENT.query + LATENT.line, device=device)
        both = both.to(DTYPE)
        q, kv = both[:, : -LATENT.line], both[:, -LATENT.line :]
        gain = torch.ones(LATENT.rank, dtype=DTYPE, device=device)
        turned = torch.empty(tokens, LATENT.heads, LATENT.query, dtype=DTYPE, device=device)
        wide = torch.empty(tokens, LATENT.heads, LATENT.line, dtype=DTYPE, device=device)
        sums = torch.empty(tokens, LATENT.heads, LATENT.rank, dtype=DTYPE, device=device)
        out = torch.empty(tokens, LATENT.heads, LATENT.dv, dtype=DTYPE, device=device)
        part = 2.0 * LATENT.heads * LATENT.nope * LATENT.rank
        for context in (100, 1000, 4200):
            if tokens * context > 4 << 20:
                continue
            lines = Lines(tokens, context, device)
            facts = {"tokens": tokens, "context": context}
            if context == 100:
                write = functools.partial(
                    latent_write, q, kv, (gain, 1e-6), lines.columns, angles, angles,
                    lines.cache, LATENT, out=turned, with_pdl=True,
                )  # fmt: skip
                timed("latent_write", write, 1, 0, 0, **facts)
                timed("absorb", lambda: absorb(turned, up, LATENT, out=wide, with_pdl=True), 1,  # noqa: B023
                      part, part * tokens, **facts)  # fmt: skip
                timed("value_up", lambda: value_up(sums, up, LATENT, out=out, with_pdl=True), 1,  # noqa: B023
                      part, part * tokens, **facts)  # fmt: skip
            wide.normal_()
            for splits in (sms, 2 * sms) if tokens < 64 else (2 * sms,):
                scratch = latent_scratch(tokens, LATENT, splits, device)
                for config in LATENT_CANDIDATES:
                    decode = functools.partial(
                        latent_decode, wide, lines.cache, lines.columns, LATENT, scale=scale,
                        splits=splits, scratch=scratch, out=sums, config=config, with_pdl=True,
                    )  # fmt: skip
                    try:
                        timed("latent_decode", decode, 1, 2.0 * tokens * context * LATENT.line,
                              0, splits=splits, config=list(dataclasses.astuple(config)),
                              **facts)  # fmt: skip
                    except Exception as error:  # a candidate that this card refuses
                        say(kernel="latent_decode", failed=repr(error), **facts)


def measure_prefill(device: torch.device) -> None:
    """Chunks in the latent space against chunks over keys and values made anew."""
    scale = LATENT.query**-0.5
    up = torch.randn(LATENT.heads * (LATENT.nope + LATENT.dv), LATENT.rank, device=device).to(DTYPE)
    places = torch.cuda.get_device_properties(device).multi_processor_count
    for start, count in ((0, 512), (3584, 512), (0, 2048), (0, 8000)):
        lines = Lines(1, start + count, device)
        pairs = count * start + count * (count + 1) / 2
        facts = {"start": start, "count": count}
        config = latent_prefill_config(DTYPE)
        tiling = Tiling(LATENT.heads, 1, config.rows, config.tile_keys, places)
        words = torch.from_numpy(Chunks.plan([0], [start], [count], [0], tiling)).to(device)
        chunks = Chunks.of(words, 1, tiling.rows)
        wide = torch.randn(count, LATENT.heads, LATENT.line, device=device).to(DTYPE)
        sums = torch.empty(count, LATENT.heads, LATENT.rank, dtype=DTYPE, device=device)
        scratch = PrefillScratch(tiling, LATENT.rank, device)
        timed("latent_prefill",
              lambda: latent_prefill(wide, lines.cache, lines.columns.tables, chunks, LATENT,  # noqa: B023
                                     scale=scale, scratch=scratch, out=sums, with_pdl=True),  # noqa: B023
              1, 0, 2 * pairs * LATENT.heads * (LATENT.line + LATENT.rank), **facts)  # fmt: skip
        q = torch.randn(count, LATENT.heads, LATENT.query, device=device).to(DTYPE)
        out = torch.empty(count, LATENT.heads, LATENT.dv, dtype=DTYPE, device=device)
        gathered = torch.empty(start + count, LATENT.line, dtype=DTYPE, device=device)
        for dense in LATENT_DENSE_CANDIDATES:
            tiling = Tiling(1, LATENT.heads, dense.rows, dense.tile_keys, 0)
            words = torch.from_numpy(Chunks.plan([0], [start], [count], [0], tiling)).to(device)
            chunks = Chunks.of(words, 1, tiling.rows)
            ends = chunks.starts + chunks.counts
            plan = DenseKeys(chunks, ends - ends, ends, start + count, start + count)
            gather = functools.partial(
                gather_lines, lines.cache, lines.columns.tables, plan, out=gathered, with_pdl=True
            )
            gather()
            both = (gathered[:, : LATENT.rank] @ up.T).view(start + count, LATENT.heads, -1)
            timed("latent_dense",
                  lambda: latent_dense(q, both, gathered, plan, LATENT, scale=scale, out=out,  # noqa: B023
                                       config=dense, with_pdl=True),  # noqa: B023
                  1, 0, 2 * pairs * LATENT.heads * (LATENT.query + LATENT.dv),
                  config=list(dataclasses.astuple(dense)), **facts)  # fmt: skip
        timed("gather_lines", gather, 1, 2.0 * gathered.numel(), 0, **facts)


@click.command()
@click.option("--part", default="experts,latent,prefill", show_default=True)
@click.option("--shape", type=click.Choice(["all", *SHAPES]), default="all", show_default=True)
@click.option("--quick", is_flag=True, help="fewer sizes")
def main(part: str, shape: str, quick: bool) -> None:
    """Time the kernels."""
    device = torch.device("cuda")
    assert pdl.supported(device), "these figures are for Hopper cards"
    say(card=torch.cuda.get_device_name(device), torch=torch.__version__)
    tokens = (1, 16, 64, 256, 8192) if quick else TOKENS
    parts = part.split(",")
    with torch.inference_mode():
        for name in SHAPES if shape == "all" else [shape]:
            if "experts" in parts:
                measure_experts(name, tokens, device)
                torch.cuda.empty_cache()
        if "latent" in parts:
            measure_latent(tuple(n for n in tokens if n <= 256), device)
        if "prefill" in parts:
            measure_prefill(device)


if __name__ == "__main__":
    main()
