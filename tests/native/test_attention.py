"""Rotary embedding with the KV write, and paged attention, against plain numpy."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.native import library as abi
from headrace.native.library import Op, Step
from headrace.native.pool import Pool
from tests.native import rig

FUZZ = settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
Array = npt.NDArray[Any]
ELEMENT: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),
    "int8": np.dtype(np.int8),
}
TOLERANCE = {"float32": 2e-5, "float16": 2e-5, "bfloat16": 2e-5, "int8": 2e-5}


def to_bfloat(x: rig.Floats) -> npt.NDArray[np.uint16]:
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


class Cache(msgspec.Struct):
    """K or V [blocks, kv_heads, block_size, d] with, for int8, a scale a line."""

    data: Array
    scales: rig.Floats

    @classmethod
    def random(cls, rng: np.random.Generator, shape: tuple[int, ...], kind: str) -> Cache:
        values = rng.standard_normal(shape, np.float32)
        scales = rng.uniform(0.001, 0.02, shape[:-1]).astype(np.float32)
        if kind == "bfloat16":
            return cls(to_bfloat(values), scales)
        if kind == "int8":
            return cls(rng.integers(-127, 128, shape).astype(np.int8), scales)
        return cls(values.astype(ELEMENT[kind]), scales)

    def floats(self, kind: str) -> rig.Floats:
        if kind == "bfloat16":
            return (self.data.astype(np.uint32) << 16).view(np.float32)
        values = self.data.astype(np.float32)
        return values * self.scales[..., None] if kind == "int8" else values


class Case(msgspec.Struct):
    """Sequences as (start, count): tokens [start, start + count) are computed in this step."""

    sequences: list[tuple[int, int]]
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    kind: str
    window: int = 0
    seed: int = 0
    softcap: float = 0.0

    def columns(self) -> tuple[Array, Array, Array]:
        """rows, positions, tables; tables hold blocks in a random order."""
        rng = np.random.default_rng(self.seed)
        counts = [count for _, count in self.sequences]
        rows = np.repeat(np.arange(len(counts)), counts).astype(np.int32)
        positions = np.concatenate(
            [np.arange(start, start + count) for start, count in self.sequences]
        ).astype(np.int32)
        width = max(-(-(start + count) // self.block_size) for start, count in self.sequences)
        blocks = len(counts) * width
        tables = rng.permutation(blocks).reshape(len(counts), width)
        return rows, positions, tables

    def step(self, rows: Array, positions: Array, tables: Array, **more: Any) -> Step:
        return Step(
            tokens=rows.size,
            rows=rig.address(rows),
            positions=rig.address(positions),
            tables=rig.address(tables),
            table_width=tables.shape[1],
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            block_size=self.block_size,
            kv_type=abi.KV_TYPES[self.kind],
            **more,
        )


def reference(case: Case, q: Array, k: Array, v: Array, columns: tuple[Array, ...]) -> Array:
    """q [T, heads, d], scaled; k and v [blocks, kv_heads, block_size, d] -> [T, heads, d]."""
    rows, positions, tables = columns
    out = np.empty(q.shape, np.float64)
    group = case.heads // case.kv_heads
    for t in range(rows.size):
        first = max(0, positions[t] + 1 - case.window) if case.window else 0
        seen = np.arange(first, positions[t] + 1)
        blocks, slots = tables[rows[t], seen // case.block_size], seen % case.block_size
        for h in range(case.heads):
            keys, values = k[blocks, h // group, slots], v[blocks, h // group, slots]
            scores = keys.astype(np.float64) @ q[t, h].astype(np.float64)
            if case.softcap:
                scores = case.softcap * np.tanh(scores / case.softcap)
            weights = np.exp(scores - scores.max())
            out[t, h] = weights @ values / weights.sum()
    return out


def check_attention(pool: Pool, case: Case, chosen: list[int] | None = None) -> None:
    """`chosen`: tokens that attend; None = all."""
    rng = np.random.default_rng(case.seed)
    columns = case.columns()
    rows, positions, tables = columns
    shape = (tables.size, case.kv_heads, case.block_size, case.head_dim)
    k, v = (Cache.random(rng, shape, case.kind) for _ in range(2))
    qkv = rng.standard_normal(
        (rows.size, case.heads + 2 * case.kv_heads, case.head_dim), np.float32
    )
    qkv /= np.float32(case.head_dim**0.5)
    out = np.full((rows.size, case.heads, case.head_dim), np.nan, np.float32)
    op = Op(
        kind=abi.ATTEND,
        x=rig.address(qkv),
        out=rig.address(out),
        k=rig.address(k.data),
        v=rig.address(v.data),
        k_scales=rig.address(k.scales),
        v_scales=rig.address(v.scales),
        window=case.window,
        softcap=case.softcap,
        flags=0 if chosen is None else abi.OF_HEAD,
    )
    head_rows = np.array([] if chosen is None else chosen, np.int32)
    heads = {"head_rows": rig.address(head_rows), "head_count": head_rows.size}
    rig.run(pool, [op], case.step(rows, positions, tables, **heads))
    wanted = reference(
        case, qkv[:, : case.heads], k.floats(case.kind), v.floats(case.kind), columns
    )
    if chosen is not None:
        left_out = np.setdiff1d(np.arange(rows.size), head_rows)
        assert np.isnan(out[left_out]).all(), "tokens that nobody chose are left alone"
        out, wanted = out[head_rows], wanted[head_rows]
    np.testing.assert_allclose(out, wanted, rtol=1e-4, atol=TOLERANCE[case.kind])


@pytest.mark.parametrize(
    "chosen",
    [[], [1], [0, 46, 1], [5, 4, 3, 2], [*range(7, 45), 70, 71, 73, 74]],
    ids=["none", "one", "anywhere", "backwards", "runs"],
)
def test_chosen_tokens(pool: Pool, chosen: list[int]) -> None:
    """Alone or, where they follow one another, together."""
    case = Case([(70, 1), (0, 45), (33, 29)], 6, 2, 64, 16, "float32")
    check_attention(pool, case, chosen)


@pytest.mark.parametrize("kind", ELEMENT)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256, 6])
def test_decode_prefill_and_mixed(pool: Pool, kind: str, head_dim: int) -> None:
    sequences = [(0, 1), (70, 1), (0, 45), (33, 100), (200, 1), (17, 3), (5, 33)]
    check_attention(pool, Case(sequences, 9, 3, head_dim, 16, kind))


@FUZZ
@given(
    sequences=st.lists(st.tuples(st.integers(0, 150), st.integers(1, 50)), min_size=1, max_size=4),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 9),
    half_dim=st.integers(1, 40),
    block_size=st.sampled_from([1, 4, 16, 32]),
    kind=st.sampled_from(list(ELEMENT)),
    window=st.sampled_from([0, 1, 7, 64, 100]),
    softcap=st.sampled_from([0.0, 0.7]),
    seed=st.integers(0, 2**31),
)
def test_any_shape(
    pool: Pool,
    sequences: list[tuple[int, int]],
    kv_heads: int,
    group: int,
    half_dim: int,
    block_size: int,
    kind: str,
    window: int,
    softcap: float,
    seed: int,
) -> None:
    heads, width = group * kv_heads, 2 * half_dim
    case = Case(sequences, heads, kv_heads, width, block_size, kind, window, seed, softcap)
    check_attention(pool, case)


def test_stale_lines_past_the_end_do_not_matter(pool: Pool) -> None:
    """A block's unused slots may hold anything, NaN included."""
    case = Case([(20, 1), (0, 21)], 4, 2, 64, 16, "float32")
    rng = np.random.default_rng(3)
    rows, positions, tables = case.columns()
    shape = (tables.size, 2, 16, 64)
    k, v = (rng.standard_normal(shape, np.float32) for _ in range(2))
    for row in range(2):
        k[tables[row, 1], :, 5:] = v[tables[row, 1], :, 5:] = np.nan
    qkv = rng.standard_normal((rows.size, 8, 64), np.float32)
    out = np.full((rows.size, 4, 64), np.nan, np.float32)
    op = Op(
        kind=abi.ATTEND,
        x=rig.address(qkv),
        out=rig.address(out),
        k=rig.address(k),
        v=rig.address(v),
    )
    rig.run(pool, [op], case.step(rows, positions, tables))
    assert np.isfinite(out).all()


@FUZZ
@given(
    tokens=st.integers(1, 11),
    heads=st.integers(1, 4),
    kv_heads=st.integers(1, 3),
    half_dim=st.integers(1, 40),
    kind=st.sampled_from(list(ELEMENT)),
    normed=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_rotate_and_write(
    pool: Pool,
    tokens: int,
    heads: int,
    kv_heads: int,
    half_dim: int,
    kind: str,
    normed: bool,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    case = Case([(3, tokens)], heads * kv_heads, kv_heads, 2 * half_dim, 4, kind, seed=seed)
    rows, positions, tables = case.columns()
    writes = rng.integers(0, 2, tokens).astype(np.int32)
    angles = rng.uniform(-3, 3, (20, half_dim))
    cosines, sines = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    before = rng.standard_normal((tokens, (heads + 2) * kv_heads, 2 * half_dim), np.float32)
    qkv = before.copy()
    shape = (tables.size, kv_heads, 4, 2 * half_dim)
    k, v = (Cache.random(rng, shape, kind) for _ in range(2))
    k_before, v_before = k.floats(kind).copy(), v.floats(kind).copy()
    norms = rng.standard_normal((2, 2 * half_dim), np.float32)
    op = Op(
        kind=abi.ROTATE,
        weight=rig.address(norms[0]) if normed else None,
        k_norm=rig.address(norms[1]) if normed else None,
        epsilon=1e-3,
        scale=0.3,
        cosines=rig.address(cosines),
        sines=rig.address(sines),
        out=rig.address(qkv),
        k=rig.address(k.data),
        v=rig.address(v.data),
        k_scales=rig.address(k.scales),
        v_scales=rig.address(v.scales),
    )
    rig.run(pool, [op], case.step(rows, positions, tables, writes=rig.address(writes)))
    wide = before.astype(np.float64)
    if normed:
        wide /= np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-3)
        wide[:, : case.heads] *= norms[0]
        wide[:, case.heads :] *= norms[1]  # v is taken from `before`
    low, high = wide[..., :half_dim], wide[..., half_dim:]
    c, s = cosines[positions][:, None], sines[positions][:, None]
    turned = np.concatenate([low * c - high * s, high * c + low * s], -1)
    q = turned[:, : case.heads] * 0.3
    np.testing.assert_allclose(qkv[:, : case.heads], q, rtol=1e-5, atol=1e-5)
    wanted_k, wanted_v = k_before, v_before
    for t in np.flatnonzero(writes):
        block, slot = tables[0, positions[t] // 4], positions[t] % 4
        wanted_k[block, :, slot] = turned[t, case.heads : case.heads + kv_heads]
        wanted_v[block, :, slot] = before[t, case.heads + kv_heads :]
    step = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 8e-3, "int8": 1e-4}[kind]
    for cache, wanted in ((k, wanted_k), (v, wanted_v)):
        # int8 rounds to 127 steps of a line's largest: it is off by half of one at most.
        rounding = float(np.abs(wanted).max()) / 250 if kind == "int8" else 0.0
        np.testing.assert_allclose(cache.floats(kind), wanted, rtol=step, atol=step + rounding)


@FUZZ
@given(
    tokens=st.integers(1, 20),
    width=st.integers(1, 100),
    chosen=st.booleans(),
    exact=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_norm_before_a_product(
    pool: Pool, tokens: int, width: int, chosen: bool, exact: bool, seed: int
) -> None:
    """`acts` is read back through a product with the identity."""
    rng = np.random.default_rng(seed)
    columns = -(-width // 32) * 32
    x = rng.standard_normal((tokens, columns), np.float32)
    weight = rng.standard_normal((columns,), np.float32)
    picked = np.flatnonzero(rng.integers(0, 2, tokens)).astype(np.int32)
    rows = picked if chosen else np.arange(tokens, dtype=np.int32)
    library = pool.library
    identity = np.zeros((columns, columns // 32, 34), np.uint8)  # Q8_0 with scale 1
    identity[:, :, :2] = np.ones((columns, columns // 32, 1), np.float16).view(np.uint8)
    identity[np.arange(columns), np.arange(columns) // 32, 2 + np.arange(columns) % 32] = 1
    matrix = rig.pack(library, identity.reshape(columns, -1), "Q8_0", columns)
    acts = rig.acts_buffer(library, tokens, columns)
    out = np.full((rows.size, columns), np.nan, np.float32)
    flags = (abi.OF_HEAD if chosen else 0) | (abi.EXACT if exact else 0)
    parts = abi.pointers([matrix.c])
    gathered = np.full((max(rows.size, 1), columns), np.nan, np.float32)
    ops = [
        Op(
            kind=abi.GATHER,
            flags=abi.OF_HEAD,
            width=columns,
            x=rig.address(x),
            out=rig.address(gathered),
        ),
        Op(
            kind=abi.QUANTISE,
            flags=flags,
            width=columns,
            x=rig.address(gathered if chosen else x),
            weight=rig.address(weight),
            epsilon=1e-5,
            acts=rig.address(acts),
        ),
        Op(
            kind=abi.LINEAR,
            flags=flags,
            part_count=1,
            width=columns,
            parts=parts,
            out=rig.address(out),
            acts=rig.address(acts),
        ),
    ]
    step = Step(
        tokens=tokens,
        head_count=rows.size,
        head_rows=rig.address(rows),
        heads=1,
        kv_heads=1,
        head_dim=16,
    )
    rig.run(pool, ops, step)
    wide = x[rows].astype(np.float64)
    normed = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * weight
    wanted = normed if exact else rig.quantised(normed.astype(np.float32))
    # A value on the edge between two steps of int8 may fall on either side.
    step_size = 0 if exact else np.abs(normed).max(initial=0) / 127
    np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-5 + step_size)


@FUZZ
@given(
    tokens=st.integers(1, 9),
    width=st.integers(1, 90),
    chosen=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_a_norm_before_the_sum(
    pool: Pool, tokens: int, width: int, chosen: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    x, before = (rng.standard_normal((tokens, width), np.float32) for _ in range(2))
    weight, out = rng.standard_normal(width, np.float32), before.copy()
    count = int(rng.integers(0, tokens + 1)) if chosen else tokens
    op = Op(
        kind=abi.ADD_NORMED,
        flags=abi.OF_HEAD if chosen else 0,
        width=width,
        x=rig.address(x),
        out=rig.address(out),
        weight=rig.address(weight),
        epsilon=1e-3,
    )
    rig.run(pool, [op], Step(tokens=tokens, head_count=count))
    wide = x.astype(np.float64)
    normed = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-3) * weight
    np.testing.assert_allclose(out[:count], (before + normed)[:count], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(out[count:], before[count:])


@FUZZ
@given(rows=st.integers(1, 5), width=st.integers(1, 90), seed=st.integers(0, 2**31))
def test_peaks(pool: Pool, rows: int, width: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    # Few different values: ties are common, and the first one counts.
    x = rng.integers(-3, 4, (rows, width + 3)).astype(np.float32)
    bad = rng.integers(0, 3, rows) == 0
    x[bad, rng.integers(0, width)] = rng.choice([np.nan, np.inf, -np.inf])
    x[:, width:] = np.nan  # past the width
    best, finite = np.full(rows, -7, np.int64), np.full(rows, -7, np.int32)
    op = Op(
        kind=abi.PEAKS,
        width=width,
        stride=width + 3,
        x=rig.address(x),
        best=rig.address(best),
        finite=rig.address(finite),
    )
    rig.run(pool, [op], Step(head_count=rows))
    np.testing.assert_array_equal(finite, ~bad)
    np.testing.assert_array_equal(best[~bad], x[~bad, :width].argmax(-1))
