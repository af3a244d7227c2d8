"""headrace offline on one card: start, waves, prefill, batches, each beside the card's limit.

    python -m benchmarks.gpu.offline [--shape qwen2.5-14b] [--backend cuda] [--out ROWS.jsonl]

Dummy weights, token ids, prefix cache off, end-of-sequence ignored: every engine does the same
work. One JSON line a figure. `--starts cold,warm` first starts two processes that make one token
and end: one with an empty kernel cache, one with the cache that the first has left.
`tiny` with `--works small --backend cpu` tries the benchmark itself.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from benchmarks.gpu.drive import (
    Clock,
    Generate,
    Rows,
    cache_environment,
    limits_row,
    process_age_s,
    run_works,
)
from benchmarks.gpu.shapes import CONFIGS, shape_of, write_folder
from benchmarks.gpu.work import LISTS, MODEL_LEN, Limits, chosen
from headrace.models.shape import Shape


def start(folder: Path, settings: dict[str, Any], began: str, rows: Rows) -> Any:
    """An LLM that has made its first token; says how long that took since the process began."""
    import headrace

    import_s = process_age_s()
    llm = headrace.LLM(str(folder), **settings)
    built_s = process_age_s()
    one = headrace.SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    llm.generate([[5] * 32], one, progress=False)
    rows.say(
        work=f"start {began}",
        import_s=import_s,
        built_s=built_s,
        seconds=process_age_s(),
        kv_blocks=llm.info.kv_blocks,
        max_num_seqs=llm.info.max_num_seqs,
        version=headrace.__version__,
    )
    return llm


def start_alone(name: str, cache: Path, arguments: list[str], rows: Rows) -> None:
    """A process of its own that starts, makes one token and ends."""
    command = [sys.executable, "-m", "benchmarks.gpu.offline", *arguments, "--start-only", name]
    environment = os.environ | cache_environment(cache)
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        rows.say(work=f"start {name}", failed=f"exit code {done.returncode}")
    for line in done.stdout.splitlines():
        rows.say(**json.loads(line))


def settings_of(shape: str, backend: str, given: tuple[str, ...]) -> dict[str, Any]:
    """Settings of the LLM. `given`: key=value of the command line, values in JSON or plain."""
    positions: int = CONFIGS[shape]["max_position_embeddings"]
    found: dict[str, Any] = {
        "backend": backend,
        "load_format": "dummy",
        "dtype": "bfloat16",
        "prefix_caching": False,
        "max_model_len": min(MODEL_LEN, positions),
    }
    for item in given:
        key, _, text = item.partition("=")
        try:
            found[key] = json.loads(text)
        except ValueError:
            found[key] = text
    return found


def measure_limits(backend: str, rows: Rows) -> Limits:
    """The device's rates, said and returned."""
    import torch

    from benchmarks.gpu import limits

    on_card = backend == "cuda"
    device = torch.device("cuda" if on_card else "cpu")
    found = limits.measure(device) if on_card else limits.measure(device, 1 << 24, 256)
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    rows.say(card=limits.card_name(device), **versions, **limits_row(found))
    return found


@click.command()
@click.option("--shape", type=click.Choice(sorted(CONFIGS)), default="qwen2.5-14b")
@click.option("--backend", default="cuda", show_default=True)
@click.option("--works", type=click.Choice(sorted(LISTS)), default="all", show_default=True)
@click.option("--only", default="", help="works whose name holds one of these, comma-separated")
@click.option("--starts", default="", help="cold, warm or both: processes that only start")
@click.option("--start-only", default="", help="start under this name, make one token, end")
@click.option("--set", "given", multiple=True, help="a setting: max_num_seqs=512")
@click.option("--models", type=click.Path(path_type=Path), default=Path(tempfile.gettempdir()))
@click.option("--out", type=click.Path(path_type=Path), default=None, help="JSON lines, appended")
@click.option("--budget-s", type=float, default=0.0, help="0 = no limit; works at the end give way")
def main(
    shape: str,
    backend: str,
    works: str,
    only: str,
    starts: str,
    start_only: str,
    given: tuple[str, ...],
    models: Path,
    out: Path | None,
    budget_s: float,
) -> None:
    """Measure headrace on a card."""
    clock = Clock(budget_s)
    settings, folder = settings_of(shape, backend, given), write_folder(shape, models)
    if start_only:
        start(folder, settings, start_only, Rows(None)).close()
        return
    rows = Rows(out, engine="headrace", shape=shape)
    with tempfile.TemporaryDirectory() as empty:
        passed = ["--shape", shape, "--backend", backend, "--models", str(models)]
        passed += [part for item in given for part in ("--set", item)]
        for name in (part for part in starts.split(",") if part):
            start_alone(name, Path(empty), passed, rows)
        if starts:
            os.environ.update(cache_environment(Path(empty)))  # before torch and triton
        limits = measure_limits(backend, rows)
        llm = start(folder, settings, "in this process, limits included", rows)
        began_s = time.perf_counter()
        hit = ExpertsHit(llm, shape_of(shape))
        run_works(
            generator(llm), chosen(works, only), shape_of(shape), limits, clock, rows, hit.facts
        )
        rows.say(measured_s=time.perf_counter() - began_s)
        llm.close()


class ExpertsHit:
    """Routed experts that a step read in a layer, on average since it was asked last."""

    def __init__(self, llm: Any, shape: Shape) -> None:
        mixture = shape.mixture
        self._llm = llm
        self._layers = 0 if mixture is None else mixture.layers
        self._steps = self._hit = 0

    def facts(self) -> dict[str, float]:
        """Nothing where the model is no mixture."""
        if not self._layers:
            return {}
        for _ in range(2):  # counts on a card come a call late
            stats = self._llm._engine.stats()
            time.sleep(0.1)
        stats = self._llm._engine.stats()
        steps, hit = stats.steps - self._steps, stats.runner["experts_hit"] - self._hit
        self._steps, self._hit = stats.steps, stats.runner["experts_hit"]
        return {"experts_hit": hit / (steps * self._layers)} if steps else {}


def generator(llm: Any) -> Generate:
    """The function that `run_works` calls."""
    import headrace

    def generate(prompts: list[list[int]], tokens: int, temperature: float) -> None:
        params = headrace.SamplingParams(
            temperature=temperature, max_tokens=tokens, ignore_eos=True
        )
        answers = llm.generate(prompts, params, progress=False)
        wrong = [a for a in answers if len(a.token_ids) != tokens]
        assert not wrong, f"{len(wrong)} answers are not {tokens} tokens long: {wrong[0].error}"

    return generate


if __name__ == "__main__":
    main()
