"""What a step costs outside the kernels: the engine's turns in `LLM` with kernels that do nothing.

    python -m benchmarks.cpu.outside

A line for each way to draw and number of sequences: microseconds of processor time a turn, the
least of all turns, so that other load on the machine does not count; and calls that Python makes
on the engine's thread.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np

from headrace import LLM, SamplingParams
from headrace.native.pool import Pool

_TOKENS, _RUNS, _SPREAD = 40, 6, 8.0  # _SPREAD: of the random logits
_DRAWS = {  # name -> temperature, top_p
    "greedy": (0.0, 1.0),
    "temperature 0.8": (0.8, 1.0),
    "temperature 0.8, top_p 0.95": (0.8, 0.95),
}


def measure(llm: Any, count: int, draws: tuple[float, float]) -> tuple[float, float]:
    """(seconds, calls) of a turn with `count` sequences that decode."""
    engine, turn = llm._engine, llm._engine.turn
    prompts = [[5 + (i * 7 + j) % 1000 for i in range(24)] for j in range(count)]
    temperature, top_p = draws
    params = SamplingParams(
        max_tokens=_TOKENS, ignore_eos=True, seed=1, temperature=temperature, top_p=top_p
    )
    taken_s: list[float] = []
    calls = 0

    def timed() -> Any:
        began_s = time.process_time()
        out = turn()
        taken_s.append(time.process_time() - began_s)
        return out

    def counted(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    engine.turn = timed
    for _ in range(_RUNS):
        llm.generate(prompts, params)
    sys.setprofile(counted)
    llm.generate(prompts, params)
    sys.setprofile(None)
    engine.turn = turn
    return min(taken_s), calls / _TOKENS


def main() -> None:
    """Prints the table."""
    Pool.run = lambda self, ops, step: None  # type: ignore[method-assign]
    llm: Any = LLM()
    forward = llm._engine.runner._forward
    forward.reserve(512, 1)  # all prompts at once: no other buffers later
    buffers = forward._buffers
    buffers.best.fill(7)
    buffers.finite.fill(1)
    buffers.logits[:] = np.random.default_rng(0).normal(0, _SPREAD, buffers.logits.shape)
    for name, draws in _DRAWS.items():
        for count in (1, 16):
            seconds, calls = measure(llm, count, draws)
            print(f"{name:30} {count:3} sequences {seconds * 1e6:8.0f} us {calls:8.0f} calls")
    llm.close()


if __name__ == "__main__":
    main()
