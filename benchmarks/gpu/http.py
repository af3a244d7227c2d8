"""headrace over HTTP on one card: seconds until it is ready, then what its users feel.

    python -m benchmarks.gpu.http [--shape qwen2.5-14b] [--set itl_target_ms=35] [--out ROWS.jsonl]

Starts `headrace serve` with dummy weights and a made-up tokenizer, in which every id has a text, so
that each token makes a chunk. See `client` for what is measured.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import click
import uvloop

from benchmarks.gpu.client import SMALL, Sizes, measure
from benchmarks.gpu.drive import Clock, Rows
from benchmarks.gpu.shapes import CONFIGS, write_folder
from benchmarks.gpu.work import MODEL_LEN
from headrace import __version__
from headrace.cli.child_server import ChildServer
from headrace.config import flag_of


def flags(shape: str, backend: str, given: tuple[str, ...]) -> list[str]:
    """Flags of `headrace serve`. `given`: key=value of the command line."""
    positions: int = CONFIGS[shape]["max_position_embeddings"]
    settings = {
        "backend": backend,
        "load_format": "dummy",
        "dtype": "bfloat16",
        "max_model_len": str(min(MODEL_LEN, positions)),
        **dict(item.split("=", 1) for item in given),
    }
    return [part for key, value in settings.items() for part in (flag_of(key), value)]


@click.command()
@click.option("--shape", type=click.Choice(sorted(CONFIGS)), default="qwen2.5-14b")
@click.option("--backend", default="cuda", show_default=True)
@click.option("--works", type=click.Choice(["all", "small"]), default="all")
@click.option("--set", "given", multiple=True, help="a setting with a value: max_num_seqs=512")
@click.option("--models", type=click.Path(path_type=Path), default=Path(tempfile.gettempdir()))
@click.option("--out", type=click.Path(path_type=Path), default=None, help="JSON lines, appended")
@click.option("--budget-s", type=float, default=0.0, help="0 = no limit; the last parts give way")
def main(
    shape: str,
    backend: str,
    works: str,
    given: tuple[str, ...],
    models: Path,
    out: Path | None,
    budget_s: float,
) -> None:
    """Measure `headrace serve`."""
    clock, rows = Clock(budget_s), Rows(out, engine="headrace", shape=shape)
    folder = write_folder(shape, models, tokenizer=True)
    began_s = time.perf_counter()
    with ChildServer([str(folder), *flags(shape, backend, given)], click.echo) as server:
        ready_s = time.perf_counter() - began_s
        rows.say(work="http ready", seconds=ready_s, version=__version__, flags=" ".join(given))
        sizes = SMALL if works == "small" else Sizes()
        vocab = CONFIGS[shape]["vocab_size"]
        uvloop.run(measure(server.url, "", vocab, clock, rows, sizes))


if __name__ == "__main__":
    main()
