"""Decode speed with a JSON schema against the same without: tokens/s at several batch sizes.

    python -m benchmarks.structured [--model M] [--backend cpu] [--batches 1,16,32] [--tokens 96]
                                    [--setting load_format=dummy] ...

Each pair runs the same requests, greedy, with ignore_eos: once free, once under a schema that no
output of that length can complete. Pairs alternate; the best of each is reported, and the ratio.
Forced tokens make a schema faster than its absence; --open leaves nothing to force.
"""

from __future__ import annotations

import time
from typing import Any

import click

from headrace import LLM, SamplingParams, StructuredOutputs

PROMPT = "List people as JSON, each with name, age and a short remark: "
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "remark": {"type": "string", "maxLength": 60},
    },
    "required": ["name", "age", "remark"],
    "additionalProperties": False,
}
PEOPLE = {"type": "array", "items": PERSON, "minItems": 1000, "maxItems": 1000}
OPEN = {"type": "array", "items": {"type": "string", "minLength": 4000}, "minItems": 1000}


def tokens_per_s(llm: LLM, batch: int, tokens: int, schema: dict[str, Any] | None) -> float:
    """Output tokens a second of `batch` requests, from the first token of all to the last."""
    asked = None if schema is None else StructuredOutputs(json=schema)
    params = SamplingParams(
        temperature=0, max_tokens=tokens, ignore_eos=True, structured_outputs=asked
    )
    prompts = [f"{PROMPT}({i}) " for i in range(batch)]
    began_s = time.perf_counter()
    done = llm.generate(prompts, params, progress=False)
    took_s = time.perf_counter() - began_s
    assert all(len(c.token_ids) == tokens for c in done), [c.finish_reason for c in done]
    return batch * tokens / took_s


@click.command()
@click.option("--model", default="")
@click.option("--backend", default="cpu")
@click.option("--batches", default="1,16,32")
@click.option("--tokens", default=96)
@click.option("--rounds", default=3)
@click.option("--open", "open_", is_flag=True, help="a schema that forces nothing")
@click.option("--setting", "extra", multiple=True, help="NAME=VALUE of headrace.LLM")
def main(
    model: str,
    backend: str,
    batches: str,
    tokens: int,
    rounds: int,
    open_: bool,
    extra: tuple[str, ...],
) -> None:
    """Print a Markdown table."""
    sizes = [int(size) for size in batches.split(",")]
    settings: dict[str, Any] = {"backend": backend, "max_num_seqs": max(sizes)}
    for pair in extra:
        name, _, value = pair.partition("=")
        settings[name] = int(value) if value.isdigit() else value
    schema = OPEN if open_ else PEOPLE
    print("| batch | free, tokens/s | schema, tokens/s | ratio |\n|---|---|---|---|")
    with LLM(model, **settings) as llm:
        for batch in sizes:
            tokens_per_s(llm, batch, 8, None)
            tokens_per_s(llm, batch, 8, schema)
            free, bound = 0.0, 0.0
            for _ in range(rounds):
                free = max(free, tokens_per_s(llm, batch, tokens, None))
                bound = max(bound, tokens_per_s(llm, batch, tokens, schema))
            print(f"| {batch} | {free:.1f} | {bound:.1f} | {bound / free:.3f} |", flush=True)


if __name__ == "__main__":
    main()
