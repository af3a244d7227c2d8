"""Prefix lint in the gateway: its route, its metrics, and one answer of several processes."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headrace.gateway.app import Gateway
from headrace.gateway.board import Board
from headrace.gateway.console import joined
from headrace.gateway.lint import (
    Lint,
)
from headrace.gateway.siblings import Siblings
from tests.unit.gateway_rig import Asked, Mock, Out, call, gateway, get, metric, until, usage_of
from tests.unit.lint_prompts import HERE, STAYS, an_id, chat


async def forgets(asked: Asked, out: Out) -> None:
    await out.json({"choices": [], "usage": usage_of(1000, 2, 0)})


def looks_at_all(made: Gateway) -> Lint:
    """Its lint, whose looks cost nothing: a slow machine would sample."""
    assert made.lint is not None
    made.lint._clock = lambda: 0.0
    return made.lint


def looked(lint: Lint, count: int) -> bool:
    return bool(lint.tell()["tenants"][0]["looked"] == count)


async def said_by(port: int, path: str = "/gateway/lint") -> dict[str, Any]:
    reply = await get(port, path, HERE)
    assert reply.status == 200, reply.body
    return dict(reply.json())


@pytest.mark.parametrize("excerpts", [False, True])
async def test_the_route_and_the_metrics(excerpts: bool) -> None:
    async with Mock(forgets) as one, gateway(one, lint_excerpts=excerpts) as made:
        lint = looks_at_all(made)
        for i in range(4):
            body = chat(f"The secret is {an_id(i)}. {STAYS}", stream=False)
            await call(made.port, body, headers={"x-request-id": f"r{i}"})
        await until(lambda: lint.tell()["tenants"][0]["looked"] == 4, "all are looked at")
        said = await said_by(made.port)
        (row,) = said["tenants"]
        assert (row["name"], row["requests"], row["prompt_tokens"]) == ("", 4, 4000)
        (found,) = row["findings"]
        assert (found["kind"], found["seen"], found["request"]) == ("id", 3, "r3")
        assert said["excerpts"] is excerpts
        assert (an_id(3) in found["excerpt"]) is excerpts
        assert ("secret" in json.dumps(said)) is excerpts
        assert await metric(made, "lint_prompts_total", tenant="") == 4
        assert await metric(made, "lint_prompt_tokens_total", tenant="") == 4000
        lost = await metric(made, "lint_lost_tokens_total", tenant="", kind="id")
        assert lost == row["lost_tokens"] > 2000


async def test_streams_are_looked_at_too_and_it_can_be_off() -> None:
    async def streams(asked: Asked, out: Out) -> None:
        await out.head()
        await out.event({"choices": [{"delta": {"content": "x"}}]})
        await out.event({"choices": [], "usage": usage_of(1000, 1, 0)})
        await out.event("[DONE]")
        await out.end()

    async with Mock(streams) as one, gateway(one) as made:
        lint = looks_at_all(made)
        for i in range(2):
            await call(made.port, chat(f"Now {i:02}:00. {STAYS}", stream=True))
        await until(lambda: lint.tell()["tenants"][0]["looked"] == 2, "both are looked at")
        (row,) = (await said_by(made.port))["tenants"]
        assert [one["kind"] for one in row["findings"]] == ["time"]
    async with Mock() as one, gateway(one, lint=False) as made:
        await call(made.port, chat(STAYS))
        assert (await get(made.port, "/gateway/lint", HERE)).status == 404


async def test_one_answer_of_several_processes(tmp_path: Path) -> None:
    Board.create(tmp_path / "board", 2)
    boards = [Board(tmp_path / "board", 2, own) for own in range(2)]
    first, second = (Siblings(tmp_path, 2, own) for own in range(2))
    async with (
        Mock(forgets) as one,
        gateway(one, siblings=first, board=boards[0]) as a,
        gateway(one, siblings=second, board=boards[1]) as b,
    ):
        lints = [looks_at_all(made) for made in (a, b)]
        for i in range(6):
            body = chat(f"Now {i:02}:00. {STAYS}")
            await call((a, b)[i % 2].port, body, headers={"x-request-id": f"r{i}"})
        for lint in lints:
            await until(partial(looked, lint, 3), "all are looked at")
        alone = [lint.tell()["tenants"][0] for lint in lints]
        for made in (a, b):
            (row,) = (await said_by(made.port))["tenants"]
            assert (row["requests"], row["looked"], row["prompt_tokens"]) == (6, 6, 6000)
            (found,) = row["findings"]
            assert (found["seen"], found["request"]) == (4, "r5")
            assert row["lost_tokens"] == found["lost_tokens"]
            assert row["lost_tokens"] == sum(one["lost_tokens"] for one in alone)
    for board in boards:
        board.close()


def test_findings_of_several_processes_lie_apart_by_place() -> None:
    def said(place: str, lost: int, last_s: float) -> dict[str, Any]:
        finding = {
            "model": "m",
            "place": place,
            "kind": "id",
            "seen": 1,
            "lost_tokens": lost,
            "first_s": last_s,
            "last_s": last_s,
            "request": f"at {last_s}",
        }
        counts = {"requests": 1, "looked": 1, "prompt_tokens": 9, "lost_tokens": lost}
        tenant = {"name": "anna", **counts, "findings": [finding]}
        return {"excerpts": False, "used_bytes": 5, "tenants": [tenant]}

    whole = joined(b"/gateway/lint", [said("p", 5, 2.0), said("q", 7, 1.0), said("p", 4, 1.5)])
    (row,) = whole["tenants"]
    assert (row["requests"], row["lost_tokens"], whole["used_bytes"]) == (3, 16, 15)
    shown = [(one["place"], one["lost_tokens"], one["request"]) for one in row["findings"]]
    assert shown == [("p", 9, "at 2.0"), ("q", 7, "at 1.0")]
    assert row["findings"][0]["first_s"] == 1.5
