"""vLLM on the same card with the same work: offline, or over HTTP with `--http`.

    python -m benchmarks.gpu.peer [--http] [--warm-start] [--out ROWS.jsonl]

vLLM must be importable by the Python that runs this. It runs in a process of its own, with kernel
caches of its own that are empty at first; `--warm-start` starts it once more with the caches that
the first start has left. Dummy weights drawn as headrace draws them (`peer_dummy`), no tokenizer,
ids as prompts; offline without prefix cache. Limits of the card are taken from the row that
`offline` wrote to the same file.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import uvloop

from benchmarks.gpu import peer_dummy
from benchmarks.gpu.drive import (
    Clock,
    Generate,
    Rows,
    cache_environment,
    process_age_s,
    read_limits,
    run_works,
)
from benchmarks.gpu.shapes import CONFIGS, shape_of, write_folder
from benchmarks.gpu.work import LISTS, MODEL_LEN, Limits, chosen

QUIET = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it compiles with nvcc at the first sampled token
    "HF_HUB_OFFLINE": "1",
}
START_WITHIN_S = 400.0


def limits_in(file: Path | None) -> Limits | None:
    """The last limits in a file of rows."""
    lines = file.read_text().splitlines() if file is not None and file.exists() else []
    found = [row for row in map(json.loads, lines) if "limit_flops_s" in row]
    return read_limits(found[-1]) if found else None


def start(folder: Path, began: str, rows: Rows) -> Any:
    """A vLLM that has made its first token; says how long that took since the process began."""
    from vllm import LLM, SamplingParams

    import_s = process_age_s()
    llm = LLM(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        gpu_memory_utilization=0.9,
        max_model_len=MODEL_LEN,
        enable_prefix_caching=False,
    )
    built_s = process_age_s()
    one = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    llm.generate([{"prompt_token_ids": [5] * 32}], one, use_tqdm=False)
    rows.say(
        work=f"start {began}",
        import_s=import_s,
        built_s=built_s,
        seconds=process_age_s(),
        version=importlib.metadata.version("vllm"),
    )
    return llm


def generator(llm: Any) -> Generate:
    """The function that `run_works` calls."""
    from vllm import SamplingParams

    def generate(prompts: list[list[int]], tokens: int, temperature: float) -> None:
        params = SamplingParams(
            temperature=temperature, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        answers = llm.generate(asked, params, use_tqdm=False)
        counts = {len(answer.outputs[0].token_ids) for answer in answers}
        assert counts == {tokens}, f"answers of {counts} tokens, asked for {tokens}"

    return generate


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
    return port


@contextlib.contextmanager
def server(folder: Path, flags: tuple[str, ...], environment: dict[str, str]) -> Iterator[str]:
    """vLLM's HTTP server; the URL once it answers. Raises RuntimeError if it does not."""
    port = free_port()
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)),
        *("--load-format", "dummy", "--dtype", "bfloat16"),
        *([] if (folder / "tokenizer.json").exists() else ["--skip-tokenizer-init"]),
        *("--gpu-memory-utilization", "0.9", "--max-model-len", str(MODEL_LEN)),
        *("--host", "127.0.0.1", "--port", str(port), *flags),
    ]
    process = subprocess.Popen(command, env=environment, stdout=sys.stderr, process_group=0)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline_s = time.monotonic() + START_WITHIN_S
        while not _answers(url):
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"vLLM's server did not start (exit code {process.poll()})")
            time.sleep(0.25)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url + "/health", timeout=2.0) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def measure_http(
    shape: str, folder: Path, flags: tuple[str, ...], cache: Path, clock: Clock, rows: Rows
) -> None:
    """Start the server, measure it, stop it."""
    from benchmarks.gpu.client import measure

    began_s = time.perf_counter()
    environment = os.environ | QUIET | cache_environment(cache) | peer_dummy.environment(cache)
    with server(folder, flags, environment) as url:
        rows.say(work="http ready", seconds=time.perf_counter() - began_s, flags=" ".join(flags))
        uvloop.run(measure(url, "", CONFIGS[shape]["vocab_size"], clock, rows))


def run_child(name: str, cache: Path, clock: Clock, arguments: list[str]) -> int:
    """This program again, as the process that holds the model. Its exit code."""
    left = ["--budget-s", str(max(1.0, clock.left_s))] if clock.left_s < float("inf") else []
    command = [sys.executable, "-m", "benchmarks.gpu.peer", *arguments, *left, "--child", name]
    environment = os.environ | QUIET | cache_environment(cache) | peer_dummy.environment(cache)
    return subprocess.run(command, env=environment, check=False).returncode


@click.command()
@click.option("--shape", type=click.Choice(sorted(CONFIGS)), default="qwen2.5-14b")
@click.option("--works", type=click.Choice(sorted(LISTS)), default="all", show_default=True)
@click.option("--only", default="", help="works whose name holds one of these, comma-separated")
@click.option("--http", "over_http", is_flag=True, help="its HTTP server instead")
@click.option("--flag", "flags", multiple=True, help="a flag of its HTTP server, --key=value")
@click.option("--with-tokenizer", is_flag=True, help="its HTTP server with a made-up tokenizer")
@click.option("--warm-start", is_flag=True, help="start it a second time")
@click.option("--child", default="", hidden=True)
@click.option("--models", type=click.Path(path_type=Path), default=Path(tempfile.gettempdir()))
@click.option("--out", type=click.Path(path_type=Path), default=None, help="JSON lines, appended")
@click.option("--budget-s", type=float, default=0.0, help="0 = no limit; the last works give way")
def main(
    shape: str,
    works: str,
    only: str,
    over_http: bool,
    flags: tuple[str, ...],
    with_tokenizer: bool,
    warm_start: bool,
    child: str,
    models: Path,
    out: Path | None,
    budget_s: float,
) -> None:
    """Measure vLLM."""
    clock, folder = Clock(budget_s), write_folder(shape, models, tokenizer=with_tokenizer)
    rows = Rows(out, engine="vllm", shape=shape)
    if importlib.util.find_spec("vllm") is None:
        rows.say(failed="vllm cannot be imported", python=sys.executable)
        raise SystemExit(1)
    if child:
        llm = start(folder, child, rows)
        if child == "cold":
            of_list = chosen(works, only)
            run_works(generator(llm), of_list, shape_of(shape), limits_in(out), clock, rows)
        return
    with tempfile.TemporaryDirectory() as cache:
        if over_http:
            measure_http(shape, folder, flags, Path(cache), clock, rows)
            return
        arguments = ["--shape", shape, "--works", works, "--models", str(models)]
        arguments += ["--only", only] if only else []
        arguments += ["--out", str(out)] if out else []
        codes = [run_child("cold", Path(cache), clock, arguments)]
        if warm_start:
            codes.append(run_child("warm", Path(cache), clock, arguments))
    raise SystemExit(max(codes))


if __name__ == "__main__":
    main()
