"""`StepAttention` against the written-out reference, on random batches over poisoned caches."""

from __future__ import annotations

import random

import pytest
import torch

from headrace.backends.cpu import attention
from headrace.backends.cpu.attention import Pattern, Scratch, StepAttention, attend_reference
from headrace.backends.cpu.kv_memory import KvMemory
from headrace.backends.cpu.kv_store import KvStore

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class Case:
    """Rows (start, count) with random tables; cached KV is set, every other slot holds NaN."""

    def __init__(
        self,
        rows: list[tuple[int, int]],
        *,
        heads: int,
        kv_heads: int,
        head_dim: int = 16,
        block_size: int = 4,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        rng = random.Random(seed)
        draw = torch.Generator().manual_seed(seed)
        self.starts, self.counts = [s for s, _ in rows], [c for _, c in rows]
        needed = [-(-(s + c) // block_size) for s, c in rows]
        pool = list(range(sum(needed) + 3))
        rng.shuffle(pool)
        memory = KvMemory(
            layers=2,
            blocks=len(pool),
            kv_heads=kv_heads,
            block_size=block_size,
            head_dim=head_dim,
            dtype=str(dtype).removeprefix("torch."),
        )
        self.memory, self.store = memory, KvStore(memory)
        for tensor in (*self.store.k, *self.store.v):
            tensor[: self.store.blocks] = torch.nan
        self.tables = torch.full((len(rows), max(needed) + 2), pool[-1])
        for i, n in enumerate(needed):
            self.tables[i, :n] = torch.tensor([pool.pop(0) for _ in range(n)])
            for p in range(self.starts[i]):
                spot = (int(self.tables[i, p // block_size]), slice(None), p % block_size)
                for tensor in (*self.store.k, *self.store.v):
                    tensor[spot] = torch.randn(kv_heads, head_dim, generator=draw).to(dtype)
        tokens = sum(self.counts)
        self.q = torch.randn(tokens, heads, head_dim, generator=draw).to(dtype)
        self.k, self.v = (
            torch.randn(tokens, kv_heads, head_dim, generator=draw).to(dtype) for _ in range(2)
        )

    def step(self, unwritten: list[int] | None = None) -> StepAttention:
        scratch = Scratch(self.store.head_dim, self.store.k[0].dtype)
        return StepAttention(
            self.store, scratch, self.tables[None], self.starts, self.counts, unwritten or []
        )

    def check(self, pattern: Pattern = Pattern()) -> None:  # noqa: B008 - a tuple
        step = self.step()
        for layer in (1, 0):
            got = step.attend(layer, self.q, self.k, self.v, pattern)
            wanted = attend_reference(
                self.store, layer, self.tables, self.starts, self.counts, self.q, pattern
            )
            bound = TOLERANCE[self.q.dtype]
            torch.testing.assert_close(got.double(), wanted, rtol=bound, atol=bound)


HEADS = [(6, 2), (4, 4), (5, 1)]  # GQA, MHA, MQA
BATCHES = [
    [(0, 1)],
    [(7, 1), (8, 1), (3, 1)],
    [(0, 9)],
    [(4, 5)],
    [(40, 1), (1, 1), (17, 1), (0, 6), (9, 4), (8, 8), (0, 1)],
    [(5, 3), (20, 1), (0, 2), (0, 1)],  # not only decodes first
]


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("rows", BATCHES, ids=str)
def test_equals_the_reference(rows: list[tuple[int, int]], heads: int, kv_heads: int) -> None:
    Case(rows, heads=heads, kv_heads=kv_heads).check()


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_every_dtype_it_claims(dtype: torch.dtype) -> None:
    Case(BATCHES[4], heads=6, kv_heads=3, dtype=dtype).check()


@pytest.mark.parametrize("seed", range(12))
def test_random_batches(seed: int) -> None:
    rng = random.Random(seed)
    rows = [
        (rng.choice([0, rng.randrange(60)]), rng.choice([1, 1, 1, rng.randrange(1, 20)]))
        for _ in range(rng.randrange(1, 12))
    ]
    Case(rows, heads=6, kv_heads=3, block_size=rng.choice([1, 3, 16]), seed=seed).check()


SINKS = torch.tensor([0.5, -2.0, 3.0, 0.0, 1.0, -0.5])
PATTERNS = {
    "window": Pattern(window=5),
    "window of one": Pattern(window=1),
    "scale": Pattern(scale=0.7),
    "soft-cap": Pattern(softcap=2.0),
    "slopes": Pattern(slopes=(0.5, 0.25, 0.125, 0.1, 0.05, 0.01)),
    "sinks": Pattern(sinks=SINKS),
    "all": Pattern(7, 0.4, 3.0, (0.5, 0.2, 0.1, 0.0, 0.3, 0.9), SINKS),
}


@pytest.mark.parametrize("name", list(PATTERNS))
@pytest.mark.parametrize("kv_heads", [2, 6])
def test_patterns(name: str, kv_heads: int) -> None:
    for rows in (BATCHES[4], [(4, 3), (2, 6), (5, 1), (4, 1), (0, 5), (0, 16)]):
        Case(rows, heads=6, kv_heads=kv_heads).check(PATTERNS[name])


def test_layers_of_several_patterns_share_a_step() -> None:
    case = Case(BATCHES[4], heads=6, kv_heads=2)
    step = case.step()
    for pattern in (*PATTERNS.values(), *PATTERNS.values()):
        got = step.attend(0, case.q, case.k, case.v, pattern)
        alone = case.step().attend(0, case.q, case.k, case.v, pattern)
        assert torch.equal(got, alone)


@pytest.mark.parametrize("pattern", [Pattern(), Pattern(window=5)], ids=["all", "window"])
def test_what_is_written_is_read_without_k_and_v(pattern: Pattern) -> None:
    case = Case(BATCHES[4], heads=6, kv_heads=2)
    step = case.step()
    wanted = step.attend(0, case.q, case.k, case.v, pattern)
    got = step.attend(0, case.q, None, None, pattern)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


def test_groups_hold_rows_of_similar_length(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = [3, 99, 98, 50, 0, 24, 97]
    groups = attention._groups(list(range(7)), starts, 2)
    assert sorted(row for group in groups for row in group) == list(range(7))
    for group in groups:
        lengths = [starts[row] + 1 for row in group]
        assert max(lengths) <= 2 * min(lengths)
    monkeypatch.setattr(attention, "_GROUP_LINES", 2 * 200)
    capped = attention._groups(list(range(7)), starts, 2)
    assert max(len(group) * (starts[group[0]] + 1) * 2 for group in capped) <= 400
    Case([(s, 1) for s in starts], heads=4, kv_heads=2).check()


def test_a_row_is_alone_what_it_is_among_others() -> None:
    case = Case(BATCHES[4], heads=6, kv_heads=2)
    among = case.step().attend(0, case.q, case.k, case.v)
    first = 0
    for i, count in enumerate(case.counts):
        own = slice(first, first + count)
        step = StepAttention(
            case.store,
            Scratch(case.store.head_dim, torch.float32),
            case.tables[None, i : i + 1],
            case.starts[i : i + 1],
            [count],
            [],
        )
        alone = step.attend(0, case.q[own], case.k[own], case.v[own])
        torch.testing.assert_close(alone, among[own], rtol=1e-5, atol=1e-6)
        first += count


def test_unwritten_rows_read_what_is_cached() -> None:
    case = Case([(8, 1), (11, 1), (4, 3)], heads=4, kv_heads=2)
    case.step().attend(0, case.q, case.k, case.v)
    before = [t.clone() for t in (case.store.k[0], case.store.v[0])]
    junk = torch.full_like(case.k, 1e6)
    wanted = attend_reference(case.store, 0, case.tables, case.starts, case.counts, case.q)
    got = case.step([0, 1, 2]).attend(0, case.q, junk, junk)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)
    for old, new in zip(before, (case.store.k[0], case.store.v[0]), strict=True):
        assert torch.equal(old.nan_to_num(7.0), new.nan_to_num(7.0))


def test_one_nan_row_stays_alone() -> None:
    case = Case([(9, 1), (10, 1), (0, 5), (3, 4)], heads=4, kv_heads=2)
    case.q[1] = torch.nan
    case.k[1] = torch.nan
    got = case.step().attend(0, case.q, case.k, case.v)
    assert got[1].isnan().all()
    assert got[[0, *range(2, 11)]].isfinite().all()


def test_block_copies_happen_at_once() -> None:
    case = Case([(12, 1)], heads=2, kv_heads=2)
    store = case.store
    for i, tensor in enumerate((*store.k, *store.v)):
        tensor[:4] = torch.arange(4.0).view(4, 1, 1, 1) + 10 * i
    case.memory.copy([(0, 1), (1, 2)])
    for i, tensor in enumerate((*store.k, *store.v)):
        assert [int(tensor[b, 0, 0, 0]) - 10 * i for b in range(4)] == [0, 0, 1, 3]
    case.memory.copy([])


def test_a_cache_takes_memory_only_when_written() -> None:
    memory = KvMemory(
        layers=1, blocks=1 << 20, kv_heads=4, block_size=16, head_dim=64, dtype="bfloat16"
    )
    store = KvStore(memory)
    assert store.k[0].nbytes > 1 << 33, "8 GiB a tensor: it would not fit if it were written"
    assert store.k[0][12345].count_nonzero() == 0
