"""The rate of the kernels' products on this machine, for `headrace plan`."""

from __future__ import annotations

import time

import numpy as np

from headrace.native import library as abi
from headrace.native.library import Library, Op, Step
from headrace.native.memory import zeros
from headrace.native.pool import Pool
from headrace.native.weights import Q8_0, Arena, PackedMatrix

_TOKENS, _WIDTH = 512, 1024  # rows of x; side of the matrix: about a mebibyte, which caches hold


def product_rate(library: Library, threads: int, rounds: int = 5) -> float:
    """FLOPs a second, two for each weight and row: int8 activations with a Q8_0 matrix that lies
    in the cache, the best of `rounds`. Some 50 ms."""
    matrix = PackedMatrix(library, Arena(), Q8_0, _WIDTH, _WIDTH)
    x = zeros((_TOKENS, _WIDTH), np.float32)
    out = zeros((_TOKENS, _WIDTH), np.float32)
    blocks = -(-_TOKENS // abi.TILE) * (_WIDTH // abi.BLOCK)
    acts = zeros((blocks * library.fast_block_bytes,), np.uint8)
    ready = Op(kind=abi.QUANTISE, width=_WIDTH, x=x.ctypes.data, acts=acts.ctypes.data)
    product = Op(
        kind=abi.LINEAR,
        part_count=1,
        width=_WIDTH,
        parts=abi.pointers([matrix.c]),
        out=out.ctypes.data,
        acts=acts.ctypes.data,
    )
    step = Step(tokens=_TOKENS, heads=1, kv_heads=1, head_dim=16)
    pool = Pool(library, threads)
    try:
        pool.run((Op * 1)(ready), step)
        took_s = min(_took_s(pool, product, step) for _ in range(rounds))
    finally:
        pool.close()
    return 2 * _TOKENS * _WIDTH * _WIDTH / took_s


def _took_s(pool: Pool, op: Op, step: Step) -> float:
    began_s = time.perf_counter()
    pool.run((Op * 1)(op), step)
    return time.perf_counter() - began_s
