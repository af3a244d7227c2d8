"""The uniform number behind a draw: a pure function of (seed, choice, position).

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011):
    key      = seed, low and high 32 bits
    counter  = position low, position high, choice, 0
    u        = (low 32 bits of the result's words 0 and 1, 53 bits in all) / 2^53
No state: a draw is the same alone, in a batch, after preemption, and on another machine.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_LOW = 0xFFFFFFFF
_FEW = 4  # draws that plain integers number faster than arrays

Uint64s = npt.NDArray[np.uint64]


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """One block of Philox4x32-10 in plain integers: the reference."""
    a, b, c, d = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        left, right = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, b, c, d = (right >> 32) ^ b ^ k0, right & _LOW, (left >> 32) ^ d ^ k1, left & _LOW
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return a, b, c, d


def uniform_reference(seed: int, choice: int, position: int) -> float:
    """0 <= u < 1 for one draw."""
    counter = (position & _LOW, position >> 32, choice, 0)
    word0, word1, _, _ = philox(counter, (seed & _LOW, seed >> 32))
    return float((word0 << 21) | (word1 >> 11)) / 2.0**53


def uniform(seeds: Uint64s, choices: Uint64s, positions: Uint64s) -> npt.NDArray[np.float64]:
    """0 <= u < 1, [n] float64, for n draws; equals `uniform_reference` bit by bit."""
    if len(seeds) <= _FEW:
        rows = zip(seeds.tolist(), choices.tolist(), positions.tolist(), strict=True)
        return np.array([uniform_reference(*row) for row in rows], np.float64)
    low, shift = np.uint64(_LOW), np.uint64(32)
    m0, m1 = (np.uint64(m) for m in _MULTIPLIERS)
    s0, s1 = (np.uint64(s) for s in _KEY_STEPS)
    a, b = positions & low, positions >> shift
    c, d = choices & low, np.zeros_like(positions)
    k0, k1 = seeds & low, seeds >> shift
    for _ in range(_ROUNDS):
        left, right = a * m0, c * m1  # 32 x 32 bits: fits in 64
        a, b, c, d = (right >> shift) ^ b ^ k0, right & low, (left >> shift) ^ d ^ k1, left & low
        k0, k1 = (k0 + s0) & low, (k1 + s1) & low
    bits = (a << np.uint64(21)) | (b >> np.uint64(11))
    return bits.astype(np.float64) / 2.0**53
