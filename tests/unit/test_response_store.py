"""Kept responses: bounded by number, bytes and age, and one store for all processes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from headrace.api.response_store import Kept, ResponseStore

Make = Callable[..., ResponseStore]


def empty(folder: Path) -> bool:
    return not list(folder.iterdir())


def kept(size_bytes: int) -> Kept:
    return Kept(b"b" * (size_bytes - 3), b"i", b"co")


@pytest.fixture(params=["file", "memory"])
async def make(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Make]:
    stores: list[ResponseStore] = []

    def one(count: int = 100, max_bytes: int = 10_000, ttl_s: float = 100.0) -> ResponseStore:
        folder = tmp_path if request.param == "file" else None
        stores.append(ResponseStore(folder, count, max_bytes, ttl_s))
        return stores[-1]

    yield one
    for store in stores:
        await store.close()


async def test_put_get_delete(make: Make) -> None:
    store = make()
    await store.start()
    assert await store.put("a", kept(10))
    assert await store.get("a") == kept(10)
    assert await store.get("b") is None
    assert await store.delete("a")
    assert not await store.delete("a")
    assert await store.get("a") is None


async def test_the_oldest_make_room(make: Make) -> None:
    store = make(count=3, max_bytes=100)
    await store.start()
    for i in range(5):
        assert await store.put(f"{i}", kept(10))
    assert [await store.get(f"{i}") is not None for i in range(5)] == [
        False,
        False,
        True,
        True,
        True,
    ]
    assert await store.put("big", kept(85))  # two of 10 and this are too much
    assert [await store.get(name) is not None for name in ("3", "4", "big")] == [False, True, True]
    assert not await store.put("huge", kept(101))
    assert await store.get("big") is not None, "what cannot be kept pushes nothing out"


async def test_age(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    store, now_s = make(ttl_s=60), 1000.0
    await store.start()
    monkeypatch.setattr("headrace.api.response_store.time.time", lambda: now_s)
    await store.put("a", kept(10))
    now_s += 59
    assert await store.get("a") is not None
    now_s += 2
    assert await store.get("a") is None
    assert not await store.delete("a")


async def test_processes_share_it(tmp_path: Path) -> None:
    one, other = (ResponseStore(tmp_path, 10, 1000, 60) for _ in range(2))
    await one.start()
    await other.start()
    assert await one.put("a", kept(10))
    assert await other.get("a") == kept(10)
    assert await other.delete("a")
    assert await one.get("a") is None
    await one.close()
    await other.close()


async def test_off(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path, 0, 1000, 60)
    await store.start()
    assert not await store.put("a", kept(10))
    assert await store.get("a") is None
    assert not await store.delete("a")
    await store.close()
    assert empty(tmp_path)
