"""Microseconds of one core that the text side spends on a token: `python benchmarks/text_cost.py`.

Streams a fixed text of the default model through `ChoiceText`, a few tokens a call as an engine
step hands them out, with and without stop strings, and encodes short and long texts.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable

from headrace.sources.resolve import resolve
from headrace.text.choice import ChoiceText
from headrace.text.tokenizer import Tokenizer, load_tokenizer

PROSE = (
    "The old mill stood at the bend of the river, and its wheel had not turned for 40 years. "
    "Children said that it was haunted; né 🐙 漢字, wrote one of them on the door.\n"
)
STOPS: dict[str, list[str]] = {
    "no stop strings": [],
    "one, never begun": ["\n\n\n"],
    "four, often begun": [
        "the end",
        "The End",
        "a very long stop string that never comes",
        "\nUser",
    ],
}


def median_us(run: Callable[[], int], repeats: int = 9) -> float:
    """Median over `repeats` of the time of run() divided by the units it returns, in us."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        units = run()
        times.append((time.perf_counter() - start) / units * 1e6)
    return statistics.median(times)


def stream(tokenizer: Tokenizer, ids: list[int], stops: list[str], tokens_per_call: int) -> int:
    """One stream of all `ids`; returns their number."""
    choice = ChoiceText(tokenizer, stops)
    for at in range(0, len(ids), tokens_per_call):
        choice.feed(ids[at : at + tokens_per_call])
    choice.flush()
    return len(ids)


def main() -> None:
    tokenizer = load_tokenizer(resolve("", say=print))
    text = PROSE * 50
    ids = tokenizer.encode(text)
    print(f"{len(ids)} tokens, {len(text)} characters; us per token, median of 9")
    for name, stops in STOPS.items():
        for per_call in (1, 4):
            cost = median_us(functools.partial(stream, tokenizer, ids, stops, per_call))
            print(f"  stream, {name}, {per_call} a call: {cost:.2f}")
    for repeats in (1, 50, 1000):
        long = PROSE * repeats
        cost = median_us(lambda t=long: len(tokenizer.encode(t)))  # type: ignore[misc]
        print(f"  encode, {len(long)} characters: {cost:.2f}")


if __name__ == "__main__":
    main()
