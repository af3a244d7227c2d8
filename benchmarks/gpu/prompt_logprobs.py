"""Device memory that log-probabilities of a long prompt add:

    python -m benchmarks.gpu.prompt_logprobs [--shape qwen2.5-14b] [--prompt 8000] [--most 20]

One process, dummy weights. The prompt is computed without and with `prompt_logprobs`, each after a
short one that did the same, and the allocator's peak of both is said, beside what the whole card
has in use. Ends with 1 if it adds 300 MB or more.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.gpu.offline import settings_of
from benchmarks.gpu.shapes import CONFIGS, write_folder

LIMIT_BYTES = 300e6


def peak_bytes(llm: Any, prompt: list[int], most: int | None) -> tuple[int, int, float]:
    """(allocator's peak, the card's bytes in use afterwards, seconds) of one request."""
    import headrace

    params = headrace.SamplingParams(
        temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=most
    )
    llm.generate([prompt[:64]], params, progress=False)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    began_s = time.perf_counter()
    (answer,) = llm.generate([prompt], params, progress=False)
    took_s = time.perf_counter() - began_s
    torch.cuda.synchronize()
    if most is not None:
        said = answer.prompt_logprobs
        assert said is not None, "no log-probabilities"
        assert len(said) == len(prompt), "a token without its log-probability"
    free, total = torch.cuda.mem_get_info()
    return torch.cuda.max_memory_allocated(), total - free, took_s


@click.command()
@click.option("--shape", type=click.Choice(sorted(CONFIGS)), default="qwen2.5-14b")
@click.option("--prompt", default=8000, show_default=True)
@click.option("--most", default=20, show_default=True)
def main(shape: str, prompt: int, most: int) -> None:
    """Measure it on a card."""
    import headrace

    draw = random.Random(0)
    ids = [draw.randrange(10, CONFIGS[shape]["vocab_size"]) for _ in range(prompt)]
    folder = write_folder(shape, Path(tempfile.gettempdir()))
    with headrace.LLM(str(folder), **settings_of(shape, "cuda", ())) as llm:
        plain, plain_used, plain_s = peak_bytes(llm, ids, None)
        asked, asked_used, asked_s = peak_bytes(llm, ids, most)
    for what, peak, used, took_s in (
        (f"{prompt} prompt tokens", plain, plain_used, plain_s),
        (f"with prompt_logprobs {most}", asked, asked_used, asked_s),
    ):
        print(f"{what}: peak {peak / 1e6:.0f} MB, card {used / 1e6:.0f} MB, {took_s * 1e3:.0f} ms")
    added = max(asked - plain, asked_used - plain_used)
    print(f"added: {added / 1e6:.1f} MB")
    sys.exit(int(added >= LIMIT_BYTES))


if __name__ == "__main__":
    main()
