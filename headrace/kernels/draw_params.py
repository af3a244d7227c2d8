"""The device's table of sampling parameters: eight int32 a row, and what a batch of rows needs."""

from __future__ import annotations

from typing import Literal

import numpy as np

from headrace.messages import Sampling

Kind = Literal["greedy", "plain", "few", "full", "typical"]
# Each can do what those before it can.
KINDS: tuple[Kind, ...] = ("greedy", "plain", "few", "full", "typical")

FEW = 256  # largest top_k of rows whose tokens are few
WIDTH = 8  # temperature, top_k, top_p, min_p, seed low, seed high, choice, rest of top_p
GREEDY_BELOW = 1e-5  # as in sampling.params
_LARGEST = 3e38  # a temperature at which every finite logit has the same weight


def pack(sampling: Sampling, choice: int) -> list[int]:
    """One row of the table, [WIDTH] of int32.

    Temperature (0.0 for a greedy row), top_p, min_p and the rest of top_p are float32 bits;
    top_p and its rest sum to the float64 within 2^-48, so that p times a count is not off by one.
    """
    greedy = sampling.temperature < GREEDY_BELOW
    top_p = np.float32(sampling.top_p)
    floats = (
        0.0 if greedy else min(sampling.temperature, _LARGEST),
        top_p,
        sampling.min_p,
        sampling.top_p - float(top_p),
    )
    temperature, p, min_p, rest = np.array(floats, np.float32).view(np.int32).tolist()
    words = np.array([sampling.seed & 0xFFFFFFFF, sampling.seed >> 32, choice], np.uint32)
    low, high, which = words.view(np.int32).tolist()
    return [temperature, min(sampling.top_k, 2**31 - 1), p, min_p, low, high, which, rest]


def is_few(sampling: Sampling) -> bool:
    """Whether a sampled row's top_k leaves so few tokens that one program does the rest."""
    return 0 < sampling.top_k <= FEW


def kind_of(sampling: Sampling) -> Kind:
    """The least kind of call that can draw such a row."""
    if sampling.temperature < GREEDY_BELOW:
        return "greedy"
    if is_few(sampling):
        return "few"
    if sampling.typical_p < 1.0:
        return "typical"
    truncates = sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0
    return "full" if truncates else "plain"
