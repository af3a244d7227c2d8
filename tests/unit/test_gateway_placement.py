"""Where requests go, by their model and their load, and what is told of it."""

from __future__ import annotations

import pytest

from tests.unit.gateway_rig import (
    Asked,
    Mock,
    Out,
    call,
    chat,
    gateway,
    get,
    metric,
    usage_of,
)


async def test_models_are_merged_and_requests_go_where_theirs_is() -> None:
    async with Mock(model="a") as one, Mock(model="b") as two, gateway(one, two) as made:
        listed = (await get(made.port, "/v1/models")).json()
        assert [card["id"] for card in listed["data"]] == ["a", "b"]
        assert listed["data"][0]["owned_by"] == "mock"
        for model, mock in (("a", one), ("b", two)):
            await call(made.port, chat(model=model) | {"model": model})
            assert mock.asked[-1].json()["model"] == model
        assert (len(one.asked), len(two.asked)) == (1, 1)


async def test_a_decision_tells_what_it_was_made_from() -> None:
    async def answer(asked: Asked, out: Out) -> None:
        await out.json({"usage": usage_of(4000, 2, cached)})

    cached = 0
    async with Mock(answer) as worker, Mock(answer) as other, gateway(worker, other) as made:
        text = "word " * 3000
        await call(made.port, chat(text))
        first = worker if worker.asked else other
        cached = 3900
        await call(made.port, chat(text), headers={"x-request-id": "again"})
        assert len(first.asked) == 2  # the one that holds the prefix
        told = (await get(made.port, "/gateway/decisions/again")).json()
        (attempt,) = told["attempts"]
        assert (attempt["worker"], attempt["reason"]) == (first.url, "prefix")
        assert told["worker_said"]["cached_tokens"] == 3900
        rows = {row["name"]: row for row in attempt["candidates"]}
        assert rows[first.url]["predicted_cached_tokens"] > 3000
        assert sorted(row["score"] for row in rows.values())[0] == rows[first.url]["score"]
        assert told["status"] == 200
        cached = 0
        await call(made.port, chat(text))
        assert await metric(made, "silent_misses_total") == 1


@pytest.mark.parametrize("slow_start_s", [0, 10])
async def test_cold_prompts_spread_evenly_at_light_load(slow_start_s: float) -> None:
    """From the start on: a gateway that has just begun takes no worker for a new one."""
    async with (
        Mock() as a,
        Mock() as b,
        Mock() as c,
        Mock() as d,
        gateway(a, b, c, d, slow_start_s=slow_start_s) as made,
    ):
        for i in range(40):
            await call(made.port, chat(f"{i} " * 400))
        assert [len(mock.asked) for mock in (a, b, c, d)] == [10] * 4
