"""What is tried again elsewhere, what never is, and which connections are used again."""

from __future__ import annotations

import pytest

from headrace.gateway.upstream import Pool, fetch
from tests.unit.gateway_rig import (
    Asked,
    Mock,
    Out,
    answer_well,
    call,
    chat,
    gateway,
    metric,
)


async def test_a_worker_that_refuses_connections_is_passed_over() -> None:
    async with Mock() as worker, Mock() as other, gateway(worker, other) as made:
        for mock in (worker, other):  # both known as up when one dies
            assert made.fleet.workers[mock.url].up
        made._checks._tasks[made.fleet.workers[worker.url]].cancel()
        await worker.die()
        replies = [await call(made.port, chat(stream=bool(i % 2))) for i in range(8)]
        assert [reply.status for reply in replies] == [200] * 8
        assert await metric(made, "retries_total") >= 1


@pytest.mark.parametrize("status", [502, 503, 504, 508])
async def test_a_failed_answer_is_tried_elsewhere_and_told_if_it_fails_everywhere(
    status: int,
) -> None:
    async def answer(asked: Asked, out: Out) -> None:
        await out.json({"error": {"message": "mine"}}, status, "x-own: 1\r\n")

    async with Mock(answer) as worker, Mock() as other, gateway(worker, other) as made:
        for _ in range(4):
            assert (await call(made.port, chat())).status == 200
        other.handler = answer
        reply = await call(made.port, chat())
        assert (reply.status, reply.json()["error"]["message"]) == (status, "mine")
        assert reply.headers["x-own"] == "1"


@pytest.mark.parametrize("status", [400, 404, 422, 429, 500])
async def test_other_answers_are_passed_on_and_never_tried_again(status: int) -> None:
    async def answer(asked: Asked, out: Out) -> None:
        await out.json({"error": {"message": "mine"}}, status)

    async with Mock(answer) as worker, Mock(answer) as other, gateway(worker, other) as made:
        assert (await call(made.port, chat())).status == status
        assert len(worker.asked) + len(other.asked) == 1


async def test_a_request_that_kills_workers_does_not_walk_over_the_fleet() -> None:
    async def die(asked: Asked, out: Out) -> None:
        out.kill()

    async with (
        Mock(die) as one,
        Mock(die) as two,
        Mock(die) as three,
        gateway(one, two, three, retries=5) as made,
    ):
        reply = await call(made.port, chat())
        assert (reply.status, reply.json()["error"]["code"]) == (502, "worker_lost")
        assert len(one.asked) + len(two.asked) + len(three.asked) == 2


async def test_a_kept_connection_that_the_worker_closed_is_no_failure() -> None:
    async with Mock() as worker, gateway(worker, check_interval_s=60) as made:
        await call(made.port, chat())

        async def closes(asked: Asked, out: Out) -> None:
            worker.handler = answer_well
            out.kill()

        worker.handler = closes
        assert (await call(made.port, chat())).status == 200
        assert await metric(made, "worker_failures_total") == 0


async def test_the_connection_of_a_check_serves_nothing_else() -> None:
    """Even if the worker leaves it open: whoever took it would be cut with the check's end."""
    async with Mock() as worker:
        worker.stays = True
        pool = Pool("127.0.0.1", worker.port, 5.0)
        status, _ = await fetch(pool, b"GET /health HTTP/1.1\r\nconnection: close\r\n\r\n", 5.0)
        assert status == 200
        assert pool.take() is None
