"""The yardstick on the card: transformers' generate(), one request after another.

    python -m benchmarks.gpu.naive [--shape qwen2.5-14b] [--device cuda] [--out ROWS.jsonl]

Two short waves with random weights. It says what a server without batching, paging and kernels of
its own would give; it is no competitor.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import tempfile
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.gpu.drive import Clock, Generate, Rows, process_age_s, run_works
from benchmarks.gpu.peer import limits_in
from benchmarks.gpu.shapes import CONFIGS, shape_of, write_folder
from benchmarks.gpu.work import LISTS


def build(folder: Path, device: torch.device) -> Any:
    """The model with random weights, in eval mode."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def generator(model: Any, device: torch.device) -> Generate:
    """The function that `run_works` calls."""

    @torch.inference_mode()
    def generate(prompts: list[list[int]], tokens: int, temperature: float) -> None:
        how: dict[str, Any] = {"do_sample": False}
        if temperature:
            how = {"do_sample": True, "temperature": temperature, "top_k": 0}
        for prompt in prompts:
            ids = torch.tensor([prompt], device=device)
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, **how
            )
            assert out.shape[1] == len(prompt) + tokens, "end-of-sequence is off"

    return generate


@click.command()
@click.option("--shape", type=click.Choice(sorted(CONFIGS)), default="qwen2.5-14b")
@click.option("--works", type=click.Choice(sorted(LISTS)), default="all", show_default=True)
@click.option("--device", default="cuda", show_default=True)
@click.option("--models", type=click.Path(path_type=Path), default=Path(tempfile.gettempdir()))
@click.option("--out", type=click.Path(path_type=Path), default=None, help="JSON lines, appended")
@click.option("--budget-s", type=float, default=0.0, help="0 = no limit; the last works give way")
def main(
    shape: str, works: str, device: str, models: Path, out: Path | None, budget_s: float
) -> None:
    """Measure transformers on the two smallest waves."""
    clock = Clock(budget_s)
    rows = Rows(out, engine="transformers", shape=shape)
    where = torch.device(device)
    model = build(write_folder(shape, models), where)
    version = importlib.metadata.version("transformers")
    rows.say(work="start", built_s=process_age_s(), version=version)
    waves = [dataclasses.replace(w, runs=1) for w in LISTS[works] if w.kind == "wave"][:2]
    run_works(generator(model, where), waves, shape_of(shape), limits_in(out), clock, rows)


if __name__ == "__main__":
    main()
