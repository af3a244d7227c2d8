"""The uniform number behind a draw, on the device: Philox4x32-10, as in `sampling.rng`.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. All 53 bits equal those of
`sampling.rng.uniform_reference`, which is this kernel's reference.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def uniform(seed_low, seed_high, choice, position):
    """0 <= u < 1, float64, from four int32 (their bits are taken as unsigned)."""
    m0 = tl.full((), 0xD2511F53, tl.uint32)
    m1 = tl.full((), 0xCD9E8D57, tl.uint32)
    k0 = seed_low.to(tl.uint32, bitcast=True)
    k1 = seed_high.to(tl.uint32, bitcast=True)
    a = position.to(tl.uint32, bitcast=True)
    b = tl.zeros_like(a)  # high half of the position
    c = choice.to(tl.uint32, bitcast=True)
    d = tl.zeros_like(a)
    for _ in tl.static_range(10):
        left_high, left_low = tl.umulhi(a, m0), a * m0
        right_high, right_low = tl.umulhi(c, m1), c * m1
        a, b, c, d = right_high ^ b ^ k0, right_low, left_high ^ d ^ k1, left_low
        k0 += tl.full((), 0x9E3779B9, tl.uint32)
        k1 += tl.full((), 0xBB67AE85, tl.uint32)
    bits = (a.to(tl.int64) << 21) | (b >> 11).to(tl.int64)
    return bits.to(tl.float64) * 1.1102230246251565e-16  # 2^-53
