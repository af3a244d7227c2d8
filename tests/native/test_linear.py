"""Products over packed weights against numpy over dequantised ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.errors import ModelError
from headrace.native import library as abi
from headrace.native.library import Library, Op, Step
from headrace.native.pool import Pool
from headrace.native.rate import product_rate
from headrace.native.weights import Arena, PackedMatrix
from tests.native import rig

FUZZ = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
ROWS = (1, 2, 3, 5, 8, 13, 16, 17, 31, 300)


def test_the_rate_of_products_is_one(library: Library) -> None:
    """Of an op that ran: no processor makes fewer than 0.1 G or more than 100 T a second."""
    assert 1e8 < product_rate(library, 1, rounds=1) < 1e14


def columns_of(name: str) -> int:
    return 512 if name.endswith("_K") else 96


def close(out: rig.Floats, expected: np.ndarray, scale: np.ndarray) -> None:
    """Within float32 rounding of sums whose terms are of size `scale`."""
    assert np.isfinite(out).all(), "a value was not written"
    assert (np.abs(out - expected) <= 2e-6 * scale + 1e-6).all(), np.abs(out - expected).max()


def expected(x: rig.Floats, w: rig.Floats) -> tuple[np.ndarray, np.ndarray]:
    wide, weights = x.astype(np.float64), w.astype(np.float64).T
    return wide @ weights, np.abs(wide) @ np.abs(weights)


@pytest.mark.parametrize("name", [*rig.QUANTISED, *rig.PLAIN])
def test_rows_come_back_as_they_were(pool: Pool, library: Library, name: str) -> None:
    rng = np.random.default_rng(1)
    columns = columns_of(name)
    raw = rig.random_raw(rng, name, 37, columns)
    matrix = rig.pack(library, raw, name, columns)
    ids = np.array([36, 0, 16, 15, 3], np.int32)
    out = np.full((5, columns), np.nan, np.float32)
    parts = abi.pointers([matrix.c])
    op = Op(
        kind=abi.EMBED,
        scale=1.5,
        part_count=1,
        parts=parts,
        out=rig.address(out),
    )
    rig.run(pool, [op], Step(tokens=5, ids=rig.address(ids), heads=1, kv_heads=1, head_dim=16))
    # d * u + m is rounded once by a fused multiply-add, twice by numpy.
    wanted = rig.floats(raw, name)[ids] * np.float32(1.5)
    np.testing.assert_allclose(out, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", [*rig.QUANTISED, *rig.PLAIN])
def test_exact(pool: Pool, library: Library, name: str, rows: int) -> None:
    rng = np.random.default_rng(rows)
    columns = columns_of(name)
    raw = rig.random_raw(rng, name, 53, columns)
    x = rng.standard_normal((rows, columns), np.float32)
    out = rig.linear(pool, library, x, [rig.pack(library, raw, name, columns)], exact=True)
    close(out, *expected(x, rig.floats(raw, name)))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", rig.QUANTISED)
def test_fast(pool: Pool, library: Library, name: str, rows: int) -> None:
    """int8 activations: the products are those of the rounded activations, exactly."""
    rng = np.random.default_rng(rows)
    columns = columns_of(name)
    raw = rig.random_raw(rng, name, 53, columns)
    x = rng.standard_normal((rows, columns), np.float32)
    out = rig.linear(pool, library, x, [rig.pack(library, raw, name, columns)], exact=False)
    close(out, *expected(rig.quantised(x), rig.floats(raw, name)))


@FUZZ
@given(
    rows=st.integers(1, 40),
    parts=st.lists(
        st.tuples(st.sampled_from(["Q4_1", "Q8_0", "Q5_0"]), st.integers(1, 70)),
        min_size=1,
        max_size=3,
    ),
    blocks=st.integers(1, 5),
    exact=st.booleans(),
    biased=st.booleans(),
    adds=st.booleans(),
    softcap=st.sampled_from([0.0, 3.0]),
    seed=st.integers(0, 2**31),
)
def test_parts_bias_and_residual(
    pool: Pool,
    library: Library,
    rows: int,
    parts: list[tuple[str, int]],
    blocks: int,
    exact: bool,
    biased: bool,
    adds: bool,
    softcap: float,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    columns = 32 * blocks
    raws = [(rig.random_raw(rng, name, n, columns), name) for name, n in parts]
    weights = np.concatenate([rig.floats(raw, name) for raw, name in raws])
    x = rng.standard_normal((rows, columns), np.float32)
    width = weights.shape[0]
    bias = rng.standard_normal((width,), np.float32) if biased else None
    residual = rng.standard_normal((rows, width), np.float32) if adds else None
    packed = [rig.pack(library, raw, name, columns) for raw, name in raws]
    out = rig.linear(
        pool, library, x, packed, exact=exact, bias=bias, add_to=residual, softcap=softcap
    )
    values, scale = expected(x if exact else rig.quantised(x), weights)
    values = values + (0 if bias is None else bias) + (0 if residual is None else residual)
    if softcap:  # its slope is at most 1
        values = softcap * np.tanh(values / softcap)
    close(out, values, scale + 10)


@FUZZ
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 100),
    width=st.integers(1, 70),
    name=st.sampled_from(rig.PLAIN),
    seed=st.integers(0, 2**31),
)
def test_plain_floats_of_any_width(
    pool: Pool, library: Library, rows: int, columns: int, width: int, name: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    raw = rig.random_raw(rng, name, width, columns)
    x = rng.standard_normal((rows, columns), np.float32)
    out = rig.linear(pool, library, x, [rig.pack(library, raw, name, columns)], exact=True)
    close(out, *expected(x, rig.floats(raw, name)))


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("gelu", [True, False])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("rows", [1, 5, 33])
@pytest.mark.parametrize("kinds", [("Q4_1", "Q4_1"), ("Q4_K", "Q6_K")])
def test_gated(
    pool: Pool,
    library: Library,
    rows: int,
    kinds: tuple[str, str],
    exact: bool,
    gelu: bool,
    biased: bool,
) -> None:
    rng = np.random.default_rng(rows)
    columns, ffn = 512, 43
    raws = [rig.random_raw(rng, name, ffn, columns) for name in kinds]
    x = rng.standard_normal((rows, columns), np.float32) / np.float32(20)
    packed = [rig.pack(library, raw, name, columns) for raw, name in zip(raws, kinds, strict=True)]
    bias = rng.standard_normal(2 * ffn, np.float32) * biased
    out = rig.linear(
        pool,
        library,
        x,
        packed,
        exact=exact,
        gated=True,
        gelu=gelu,
        bias=bias if biased else None,
    )
    seen = x if exact else rig.quantised(x)
    (gate, gate_scale), (up, up_scale) = (
        expected(seen, rig.floats(raw, name)) for raw, name in zip(raws, kinds, strict=True)
    )
    gate, up = gate + bias[:ffn], up + bias[ffn:]
    cubic = (2 / np.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    act = 0.5 * gate * (1 + np.tanh(cubic)) if gelu else gate / (1 + np.exp(-gate))
    scale = (gate_scale + np.abs(bias[:ffn])) * np.abs(up) + np.abs(act) * up_scale
    close(out, act * up, 1.2 * scale)  # slopes of both are below 1.2


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_broken_row_stays_broken_and_alone(
    pool: Pool, library: Library, bad: float, exact: bool
) -> None:
    rng = np.random.default_rng(0)
    raw = rig.random_raw(rng, "Q4_1", 32, 64)
    x = rng.standard_normal((5, 64), np.float32)
    x[2, 40] = bad
    out = rig.linear(pool, library, x, [rig.pack(library, raw, "Q4_1", 64)], exact=exact)
    assert not np.isfinite(out[2]).any()
    assert np.isfinite(np.delete(out, 2, axis=0)).all()


@pytest.mark.parametrize(("name", "columns"), [("Q4_1", 48), ("Q4_K", 128), ("Q2_K", 256)])
def test_shapes_and_types_without_a_kernel_are_refused(
    library: Library, name: str, columns: int
) -> None:
    with pytest.raises(ModelError, match="no native kernels"):
        PackedMatrix(library, Arena(), rig.ggml_type(name), 16, columns)


def test_packed_weights_take_the_room_of_the_file(library: Library) -> None:
    """No second copy hides: panels of the default model's shapes are the file's bytes."""
    for name, bits in (("Q4_0", 4.5), ("Q4_1", 5), ("Q5_1", 6), ("Q8_0", 8.5), ("Q4_K", 4.5)):
        arena = Arena()
        PackedMatrix(library, arena, rig.ggml_type(name), 1536, 1024)
        assert arena.used_bytes <= 1536 * 1024 * bits / 8 * 1.04
