"""Several gateway processes of one machine: what they share, seen from each of them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import ConfigError
from headrace.gateway.board import MAX_WORKERS, Board, Counts, key_of
from headrace.gateway.load import Lease
from headrace.gateway.processes import listen
from headrace.gateway.settings import GatewaySettings, WorkerSpec
from headrace.gateway.siblings import Siblings
from headrace.gateway.worker import Worker
from tests.unit.gateway_rig import Asked, Call, Mock, Out, call, chat, gateway, get, until

Steps = list[tuple[str, int, int, int]]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["enter", "leave", "write", "clear"]),
            st.integers(0, 2),  # process
            st.integers(0, 4),  # worker
            st.integers(0, 2**40),
        ),
        max_size=30,
    )
)
def test_the_board_is_the_plain_sum(tmp_path_factory: pytest.TempPathFactory, steps: Steps) -> None:
    path = tmp_path_factory.mktemp("board") / "board"
    Board.create(path, 3)
    boards = [Board(path, 3, own) for own in range(3)]
    keys = [key_of("a"), 7, 7 + MAX_WORKERS, 7 + 2 * MAX_WORKERS, key_of("b")]  # three collide
    rows: list[dict[int, int]] = [{}, {}, {}]
    plain: list[dict[int, Counts]] = [{}, {}, {}]
    for step, process, worker, n in steps:
        key, board, row = keys[worker], boards[process], rows[process].get(keys[worker])
        if step == "enter" and row is None:
            rows[process][key] = board.enter(key)
            plain[process][key] = (0, 0, 0, 0)
        elif step == "leave" and row is not None:
            board.leave(row)
            del rows[process][key], plain[process][key]
        elif step == "write" and row is not None:
            plain[process][key] = (n, n + 1, n + 2, n + 3)
            board.write(row, plain[process][key])
        elif step == "clear":  # it died; another begins in its place
            boards[(process + 1) % 3].clear(process)
            rows[process], plain[process] = {}, {}
        for own, board in enumerate(boards):
            for key in keys:
                some = [plain[p].get(key, (0, 0, 0, 0)) for p in range(3) if p != own]
                assert board.others(key) == tuple(map(sum, zip(*some, strict=True)))
    for board in boards:
        board.close()


def test_a_worker_has_the_load_that_other_processes_see(tmp_path: Path) -> None:
    path = tmp_path / "board"
    Board.create(path, 2)
    boards = [Board(path, 2, own) for own in range(2)]
    spec = WorkerSpec(url="http://x", max_requests=2)
    one, two = (Worker(spec, GatewaySettings(), board=board) for board in boards)
    lease = Lease(one, 100, 60, 1, 0.0)
    view = two.view(0.0)
    assert (view.requests, view.waiting, view.pending_tokens, view.decode_tokens) == (1, 1, 60, 0)
    lease.begin(1.0)
    view = two.view(1.0)
    assert (view.requests, view.waiting, view.pending_tokens, view.decode_tokens) == (1, 0, 0, 100)
    room = [worker.has_room for worker in (one, two)]
    other = Lease(two, 10, 10, 1, 1.0)
    room += [worker.has_room for worker in (one, two)]
    assert room == [True, True, False, False]
    one.leaves()  # with a request: it counts until that has ended
    assert two.view(1.0).requests == 2
    lease.end()
    other.end()
    assert one.view(1.0).requests == two.view(1.0).requests == 0
    for board in boards:
        board.close()


async def test_two_processes_route_by_the_load_of_both_and_answer_as_one(tmp_path: Path) -> None:
    """Each has its own index and round; what they place together is even, and asked of either."""
    go_on = asyncio.Event()

    async def slow(asked: Asked, out: Out) -> None:
        await out.head()
        await out.event({"choices": []})
        await go_on.wait()
        await out.event("[DONE]")
        await out.end()

    Board.create(tmp_path / "board", 2)
    boards = [Board(tmp_path / "board", 2, own) for own in range(2)]
    siblings = [Siblings(tmp_path, 2, own) for own in range(2)]
    async with (
        Mock(slow) as a,
        Mock(slow) as b,
        gateway(a, b, policy="least_requests", siblings=siblings[0], board=boards[0]) as one,
        gateway(a, b, policy="least_requests", siblings=siblings[1], board=boards[1]) as two,
    ):
        calls = [Call(made.port) for made in (one, two) for _ in range(4)]
        for i, each in enumerate(calls):  # four by one process, then four by the other
            await each.__aenter__()
            await each.send(chat(str(i), stream=True), headers={"x-request-id": f"id-{i}"})
            await each.see(b"choices")
        assert (len(a.asked), len(b.asked)) == (4, 4)
        for made in (one, two):
            rows = (await get(made.port, "/gateway/workers")).json()["workers"]
            assert [row["requests"] for row in rows] == [4, 4]
            for i in range(8):  # each process tells of the other's decisions
                told = await get(made.port, f"/gateway/decisions/id-{i}")
                assert (told.status, told.json()["id"]) == (200, f"id-{i}")
            assert (await get(made.port, "/gateway/decisions/none")).status == 404
            text = (await get(made.port, "/metrics")).body.decode()
            lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
            name = f'{{worker="{a.url}"}}'
            assert float(lines["headrace_gateway_worker_requests" + name]) == 4
            assert float(lines["headrace_gateway_worker_up" + name]) == 1
            assert float(lines["headrace_gateway_decide_seconds_count"]) == 8
        reply = await call(one.port, {"worker": a.url}, "/gateway/drain")
        assert reply.json() == {"worker": a.url, "draining": True, "requests": 4}
        assert two.fleet.workers[a.url].draining
        assert (await call(two.port, {"worker": "http://no"}, "/gateway/drain")).status == 404
        go_on.set()
        for each in calls:
            assert b"[DONE]" in (await each.whole()).body
            await each.__aexit__()
        await until(lambda: not boards[1].others(key_of(a.url))[0], "all is over there")
    for board in boards:
        board.close()


async def test_a_worker_is_up_where_it_is_up_for_every_process(tmp_path: Path) -> None:
    """Else who waits for it meets one that has no worker."""
    one_of, other_of = (Siblings(tmp_path, 2, own) for own in range(2))
    async with (
        Mock() as a,
        gateway(a, siblings=one_of) as one,
        gateway(a, siblings=other_of, check_interval_s=600.0) as other,
    ):
        for state in ("up", "down"):
            for made in (one, other):
                (row,) = (await get(made.port, "/gateway/workers")).json()["workers"]
                why = "" if state == "up" else "no answer"
                assert (row["state"], row["why"]) == (state, why)
            other.fleet.went_down(other.fleet.workers[a.url], "no answer")


async def test_a_process_that_does_not_answer_is_left_out(tmp_path: Path) -> None:
    siblings = Siblings(tmp_path, 3, 0)
    async with Mock() as worker, gateway(worker, siblings=siblings) as made:
        Siblings(tmp_path, 3, 1).path.write_bytes(b"")  # no socket, as after a crash
        assert (await get(made.port, "/metrics")).status == 200
        assert (await get(made.port, "/gateway/decisions/x")).status == 404
        async with Call(made.port) as gone:
            await gone.send(method="GET", path="/metrics")
            gone.leave()
        assert (await get(made.port, "/health")).status == 200


def test_a_port_is_shared_by_those_who_say_so() -> None:
    with listen("127.0.0.1", 0, shared=True) as first:
        port = first.getsockname()[1]
        with listen("127.0.0.1", port, shared=True) as second:
            assert second.getsockname()[1] == port
        first.listen()
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
            listen("127.0.0.1", port, shared=False)
