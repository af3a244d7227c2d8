"""How often a model fills a structured answer with blanks until its limit (bug B067).

    python -m benchmarks.blanks [--model M] [--runs 20] [--tokens 200]

A flat schema of eight strings, a system prompt with an example in JSON, a terse text of the user,
temperature 0.1. Prints how the runs ended and the longest run of blanks outside of strings.
"""

from __future__ import annotations

import json
import re
from collections import Counter

import click

from headrace import LLM, SamplingParams, StructuredOutputs

FIELDS = ("name", "city", "email", "phone", "title", "company", "country", "notes")
SCHEMA = {
    "type": "object",
    "properties": {field: {"type": "string"} for field in FIELDS},
    "required": list(FIELDS),
    "additionalProperties": False,
}
SYSTEM = """You extract contact data. Answer in JSON, for example:
{
  "name": "Ann Lee",
  "city": "Oslo",
  "email": "ann@example.org"
}"""
_STRINGS = re.compile(r'"(\\.|[^"\\])*("|$)', re.DOTALL)


def longest_blank(text: str) -> int:
    """Characters of the longest run of white space outside of strings."""
    bare = _STRINGS.sub('""', text)
    return max((len(run) for run in re.findall(r"\s+", bare)), default=0)


@click.command()
@click.option("--model", default="")
@click.option("--runs", default=20)
@click.option("--tokens", default=200)
def main(model: str, runs: int, tokens: int) -> None:
    """Print the sums."""
    chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Bob, Rome, ACME"}]
    asked = StructuredOutputs(json=SCHEMA)
    params = [
        SamplingParams(temperature=0.1, max_tokens=tokens, seed=seed, structured_outputs=asked)
        for seed in range(runs)
    ]
    with LLM(model, max_num_seqs=runs) as llm:
        done = llm.chat([chat] * runs, params, progress=False)
    ends = Counter(one.finish_reason for one in done)
    whole = sum(
        json.loads(one.text).keys() == set(FIELDS) for one in done if one.finish_reason == "stop"
    )
    blanks = [longest_blank(one.text) for one in done]
    print(f"{runs} runs of at most {tokens} tokens: {dict(ends)}; {whole} whole and valid")
    print(f"longest blank between tokens of JSON: {max(blanks)} characters")
    filled = sum(
        one.finish_reason == "length" and blank > 22
        for one, blank in zip(done, blanks, strict=True)
    )
    print(f"runs that ended in blanks: {filled}")
    for one in done:
        if one.finish_reason == "length":
            print(f"  seed {one.prompt_index}: ... {one.text[-60:]!r}")


if __name__ == "__main__":
    main()
