"""What prefix lint costs a gateway, in CPU microseconds: best of several runs.

    python -m benchmarks.gateway.lint

A look at one prompt by its size; `see`, which every request pays; and both together over 50,000
requests of one tenant whose prompts all begin with the time of day, as the gateway calls them.
"""

from __future__ import annotations

import random
import time

import msgspec

from headrace.gateway.lint import Lint
from headrace.gateway.prompt import Prompt, PromptReader
from headrace.gateway.sse import Usage

SIZES = (1_500, 6_000, 24_000, 64_000)
RUNS = 7
REQUESTS = 50_000
DIFFERENT = 200  # prompts of a size


def prompts(chars: int) -> list[Prompt]:
    """A clock, so many characters that stay, a question."""
    drawn = random.Random(1)
    stays = ""
    while len(stays) < chars:
        stays += " ".join(f"{drawn.getrandbits(24):06x}" for _ in range(12)) + ". "
    reader = PromptReader(False)
    made = []
    for at in range(DIFFERENT):
        system = f"The time is 16:{at // 60:02}:{at % 60:02}. {stays[:chars]}"
        asked = f"Question {at}: {drawn.getrandbits(400):x}?"
        turns = [{"role": "system", "content": system}, {"role": "user", "content": asked}]
        body = msgspec.json.encode({"model": "m", "messages": turns})
        made.append(reader.read("/v1/chat/completions", body, {}))
    return made


def fresh() -> Lint:
    return Lint(16 * 2**20, excerpts=False, found=lambda *_: None)


def best_us(work: list[float], count: int) -> float:
    return min(work) / count * 1e6


def look_us(some: list[Prompt]) -> float:
    """One look, whatever the credit says."""
    taken = []
    for _ in range(RUNS):
        lint = fresh()
        lint.see("t", some[0])
        began_s = time.thread_time()
        for prompt in some:
            lint.look("t", "id", prompt, Usage())
        taken.append(time.thread_time() - began_s)
    return best_us(taken, len(some))


def see_us(prompt: Prompt) -> float:
    """A request whose prompt is too short to be looked at."""
    taken = []
    for _ in range(RUNS):
        lint = fresh()
        began_s = time.thread_time()
        for _ in range(REQUESTS):
            lint.see("t", prompt)
        taken.append(time.thread_time() - began_s)
    return best_us(taken, REQUESTS)


def whole_us(some: list[Prompt]) -> tuple[float, int]:
    """As the gateway does it: a request's share, and how many were looked at."""
    taken, looked = [], 0
    for _ in range(RUNS):
        lint = fresh()
        looked = 0
        began_s = time.thread_time()
        for at in range(REQUESTS):
            prompt = some[at % DIFFERENT]
            if lint.see("t", prompt):
                lint.look("t", "id", prompt, Usage())
                looked += 1
        taken.append(time.thread_time() - began_s)
    return best_us(taken, REQUESTS), looked


def main() -> None:
    """A line for each size."""
    short = PromptReader(False).read("/v1/completions", b'{"prompt": "x"}', {})
    print(f"see, of every request: {see_us(short):.2f} us")
    print("| characters | a look, us | a request's share, us | looked at, of 50,000 |")
    print("|---|---|---|---|")
    for chars in SIZES:
        some = prompts(chars)
        share_us, looked = whole_us(some)
        print(f"| {chars:,} | {look_us(some):.0f} | {share_us:.2f} | {looked:,} |")


if __name__ == "__main__":
    main()
