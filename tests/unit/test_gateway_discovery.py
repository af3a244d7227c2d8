"""Workers that DNS names, against a real server: they come, they go, and outages cost none."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import dns.rcode
import pytest
import uvloop

from headrace.errors import ConfigError
from headrace.gateway import discovery
from headrace.gateway.app import Gateway
from headrace.gateway.discovery import DnsRegistry, Name, Nothing, Resolver, Target
from headrace.gateway.registry import FileRegistry, StaticRegistry
from headrace.gateway.settings import (
    GatewaySettings,
    WorkerSpec,
    check_workers,
    dns_server,
    merge,
)
from tests.unit.gateway_rig import (
    Asked,
    Call,
    Mock,
    Out,
    call,
    chat,
    gateway,
    get,
    metric,
    until,
)
from tests.unit.name_server import NameServer

DATA = Path(__file__).parent / "data"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are asked again at once."""
    monkeypatch.setattr(discovery, "MIN_WAIT_S", 0.02)


@asynccontextmanager
async def named(
    server: NameServer, *workers: WorkerSpec, keep_s: float = 600.0, **more: Any
) -> AsyncIterator[Gateway]:
    """A gateway whose workers have names."""
    settings = GatewaySettings(dns_server=server.address, dns_interval_s=0.02, dns_keep_s=keep_s)
    registry = DnsRegistry(StaticRegistry(workers), settings)
    async with gateway(registry=registry, up=False, **more) as made:
        yield made


def up(made: Gateway, *workers: Mock) -> bool:
    """These are all, and each has answered a check."""
    there = made.fleet.workers
    return set(there) == {w.url for w in workers} and all(w.up for w in there.values())


async def test_workers_come_and_go_with_the_addresses_of_a_name() -> None:
    """One that goes takes nothing new, and what it was answering ends in peace."""
    go_on = asyncio.Event()

    async def slow(asked: Asked, out: Out) -> None:
        await out.head()
        await out.event({"choices": []})
        await go_on.wait()
        await out.event("[DONE]")
        await out.end()

    async with (
        NameServer() as server,
        Mock(slow) as a,
        Mock(host="127.0.0.2", port=a.port) as b,
    ):
        server.set("workers.test", "A", "127.0.0.1")
        spec = WorkerSpec(url=f"dns+http://workers.test:{a.port}", api_key="worker's")
        async with named(server, spec) as made, Call(made.port) as one:
            await until(lambda: up(made, a), "the first has come")
            await one.send(chat(stream=True))
            await one.see(b"choices")
            server.set("workers.test", "A", "127.0.0.1", "127.0.0.2")
            await until(lambda: up(made, a, b), "another has come")
            server.set("workers.test", "A", "127.0.0.2")
            await until(lambda: up(made, b), "the first has gone")
            for _ in range(3):
                assert (await call(made.port, chat())).status == 200
            assert (len(a.asked), len(b.asked)) == (1, 3)
            go_on.set()
            assert b"[DONE]" in (await one.whole()).body
            for asked in (*a.asked, *b.asked):
                assert asked.headers["host"] == f"workers.test:{a.port}"
                assert asked.headers["authorization"] == "Bearer worker's"


async def test_services_bring_their_ports_and_the_best_priority_counts() -> None:
    async with NameServer() as server, Mock() as a, Mock() as b, Mock() as spare:
        srv = "_http._tcp.llm.test"
        server.set(srv, "SRV", f"1 0 {a.port} pod-a.test.", f"1 9 {b.port} pod-b.test.",
                   f"2 0 {spare.port} pod-c.test.")  # fmt: skip
        for pod in ("pod-a.test", "pod-b.test", "pod-c.test"):
            server.set(pod, "A", "127.0.0.1")
        async with named(server, WorkerSpec(url=f"dnssrv+http://{srv}")) as made:
            await until(lambda: up(made, a, b), "both have come")
            hosts = {worker.host.decode() for worker in made.fleet.workers.values()}
            assert hosts == {f"pod-a.test:{a.port}", f"pod-b.test:{b.port}"}
            server.set(srv, "SRV", f"1 0 {a.port} pod-a.test.", f"1 0 {b.port} new.test.")
            await until(lambda: up(made, a), "the one without an address is left out")
            server.set(srv, "SRV", f"2 0 {spare.port} pod-c.test.")
            await until(lambda: up(made, spare), "only the spare one is left")


@pytest.mark.parametrize(
    ("failure", "outcome", "why"),
    [("NXDOMAIN", "nothing", "NXDOMAIN"), ("SERVFAIL", "failed", "SERVFAIL")],
)
async def test_an_outage_of_dns_keeps_the_workers_and_shows(
    failure: str, outcome: str, why: str
) -> None:
    async with NameServer() as server, Mock() as worker:
        server.set("workers.test", "A", "127.0.0.1")
        name = f"dns+http://workers.test:{worker.port}"
        async with named(server, WorkerSpec(url=name)) as made:
            await until(lambda: up(made, worker), "it has come")
            await call(made.port, chat(), headers={"x-request-id": "before"})
            (known,) = made.registry.names
            server.rcode = dns.rcode.from_text(failure)
            await until(lambda: known.counts[outcome] >= 2, "it was asked for again")
            reply = await call(made.port, chat(), headers={"x-request-id": "after"})
            assert reply.status == 200
            assert await metric(made, "dns_workers", source=name) == 1
            assert await metric(made, "dns_lookups_total", source=name, outcome=outcome) >= 2
            assert await metric(made, "dns_age_seconds", source=name) > 0
            for request, failed in (("before", False), ("after", True)):
                told = (await get(made.port, f"/gateway/decisions/{request}")).json()
                old = told["attempts"][0]["old_names"]
                assert [(row["name"], why in row["why"]) for row in old] == [(name, True)] * failed
            (row,) = (await get(made.port, "/gateway/workers")).json()["names"]
            assert (row["name"], row["workers"], why in row["why"]) == (name, 1, True)
            server.rcode = dns.rcode.NOERROR
            await until(lambda: not known.why, "it resolves again")
            assert up(made, worker)
    assert made.fleet.workers == {}


async def test_the_patience_has_an_end() -> None:
    async with NameServer() as server, Mock() as worker, Mock() as fixed:
        server.set("workers.test", "A", "127.0.0.1")
        spec = WorkerSpec(url=f"dns+http://workers.test:{worker.port}")
        async with named(server, spec, WorkerSpec(url=fixed.url), keep_s=0.0) as made:
            await until(lambda: up(made, worker, fixed), "both are there")
            server.rcode = dns.rcode.NXDOMAIN
            await until(lambda: up(made, fixed), "the named one is given up")
            server.rcode = dns.rcode.NOERROR
            await until(lambda: up(made, worker, fixed), "it is back")


async def test_a_name_that_never_resolves_holds_up_nobody() -> None:
    async with NameServer() as server, Mock() as fixed:
        specs = (WorkerSpec(url="dns+http://none.test:1"), WorkerSpec(url=fixed.url))
        async with named(server, *specs) as made:
            await until(lambda: up(made, fixed), "the other one serves")
            assert (await call(made.port, chat())).status == 200
        async with named(server, specs[0]) as made:
            (known,) = made.registry.names
            await until(lambda: known.counts["nothing"] > 0, "it was asked for")
            assert (await call(made.port, chat())).status == 503


async def test_workers_of_the_first_answer_were_there_before_the_gateway() -> None:
    """They have no slow start, unlike one that comes later."""
    async with NameServer() as server, Mock() as a, Mock(host="127.0.0.2", port=a.port) as b:
        server.set("workers.test", "A", "127.0.0.1")
        spec = WorkerSpec(url=f"dns+http://workers.test:{a.port}")
        async with named(server, spec, slow_start_s=1e6) as made:
            await until(lambda: up(made, a), "the first is there")
            server.set("workers.test", "A", "127.0.0.1", "127.0.0.2")
            await until(lambda: up(made, a, b), "the second has come")
            rows = (await get(made.port, "/gateway/workers")).json()["workers"]
            warm = {row["name"]: row["warm"] for row in rows}
            assert warm[a.url] == 1.0
            assert warm[b.url] < 1.0


async def test_a_fleet_file_may_name_and_unname(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.gateway.app.TICK_S", 0.02)
    async with NameServer() as server, Mock() as worker:
        server.set("workers.test", "A", "127.0.0.1")
        file = tmp_path / "fleet.toml"
        file.write_text(f'[[workers]]\nurl = "dns+http://workers.test:{worker.port}"')
        settings = GatewaySettings(dns_server=server.address)
        registry = DnsRegistry(FileRegistry(file), settings)
        async with gateway(registry=registry, up=False) as made:
            await until(lambda: up(made, worker), "it has come")
            file.write_text("# nobody")
            await until(lambda: not made.fleet.workers, "it has gone")
            assert not made.registry.names
            count = len(server.asked)
            file.write_text(f'[[workers]]\nurl = "{worker.url}"')
            await until(lambda: up(made, worker), "it is back by its address")
            assert len(server.asked) == count, "nobody asks for a name that is no longer there"


async def test_what_the_resolver_makes_of_answers() -> None:
    async with NameServer() as server:
        find = Resolver(server.address).find
        many = [f"10.0.{i // 250}.{1 + i % 250}" for i in range(600)]
        server.set("many.test", "A", *many, ttl_s=7)
        targets, ttl_s = await find("dns+http://many.test:8000")
        assert {t.address for t in targets} == set(many)
        assert ttl_s == 7
        assert [by for by, name, _ in server.asked if name == "many.test"] == ["udp", "tcp"]
        server.set("six.test", "AAAA", "fd00::1", ttl_s=9)
        server.set("alias.test", "CNAME", "six.test", ttl_s=3)
        assert await find("dns+http://alias.test:80") == ((Target("fd00::1", 80, "alias.test"),), 3)
        server.set("both.test", "A", "10.0.0.1")
        server.set("both.test", "AAAA", "fd00::2")
        (one,), _ = await find("dns+http://both.test")
        assert one == Target("10.0.0.1", 80, "both.test"), "a worker with two families is one"
        server.set("away.test", "SRV", "0 0 0 .")
        server.set("zero.test", "SRV", "0 0 0 six.test.")
        server.set("lost.test", "SRV", "0 0 80 none.test.")
        names = (
            "dnssrv+http://away.test",
            "dnssrv+http://zero.test",
            "dnssrv+http://six.test",
            "dnssrv+http://lost.test",
        )
        for url in (*names, "dns+http://none.test"):
            with pytest.raises(Nothing):
                await find(url)
        server.rcode = dns.rcode.REFUSED
        with pytest.raises(OSError, match="REFUSED"):
            await find("dns+http://six.test")


async def test_a_target_that_dns_cannot_tell_keeps_its_workers_and_holds_up_no_other() -> None:
    async with NameServer() as server:
        find = Resolver(server.address).find
        server.set("srv.test", "SRV", "0 0 1 a.test.", "0 0 2 b.test.", ttl_s=9)
        server.set("a.test", "A", "10.0.0.1", ttl_s=9)
        server.set("b.test", "A", "10.0.0.2", ttl_s=9)
        before, ttl_s = await find("dnssrv+http://srv.test")
        assert ttl_s == 9
        server.broken.add("a.test")
        server.set("b.test", "A", "10.0.0.3", ttl_s=9)
        a, b = before
        now, ttl_s = await find("dnssrv+http://srv.test", before)
        assert now == (a, Target("10.0.0.3", b.port, b.name))
        assert ttl_s == 0
        assert (await find("dnssrv+http://srv.test"))[0] == now[1:]
        server.broken.add("b.test")
        with pytest.raises(OSError, match="SERVFAIL"):
            await find("dnssrv+http://srv.test", before)


async def test_a_server_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "LIFETIME_S", 0.05)
    async with NameServer() as server:
        server.silent = True
        with pytest.raises(OSError, match="no answer within"):
            await Resolver(server.address).find("dns+http://x.test")


def test_times_to_live_are_kept_to() -> None:
    name = Name("dns+http://x")
    waits = [name.wait_s(ttl_s, 30.0) for ttl_s in (0.0, 5.0, 30.0, 3600.0)]
    assert waits == [discovery.MIN_WAIT_S, 5.0, 30.0, 30.0]
    pauses = []
    for _ in range(20):
        name.lost("failed", "x", 1.0, 600.0)
        pauses.append(name.wait_s(0.0, 30.0))
    assert pauses[:3] == [discovery.MIN_WAIT_S * n for n in (1, 2, 4)]
    assert pauses == sorted(pauses)
    assert pauses[-1] == 30.0


def distrusted(made: Gateway) -> bool:
    """A check failed over the certificate."""
    return any("certificate" in worker.why.lower() for worker in made.fleet.workers.values())


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_certificate_has_to_show_the_name_and_not_the_address(
    loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """Of a worker that DNS names, and of one whose `host` says what it is called."""
    served = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    served.load_cert_chain(DATA / "workers_test.pem")

    async def case() -> None:
        async with NameServer() as server, Mock(tls=served) as worker:
            ca, port = str(DATA / "test_ca.pem"), worker.port
            for name in ("workers.test", "others.test"):
                server.set(name, "A", "127.0.0.1")
            good = (
                WorkerSpec(url=f"dns+https://workers.test:{port}", ca_file=ca),
                WorkerSpec(url=worker.url, ca_file=ca, host="workers.test"),
            )
            bad = (
                WorkerSpec(url=f"dns+https://others.test:{port}", ca_file=ca),
                WorkerSpec(url=worker.url, ca_file=ca),
                WorkerSpec(url=f"dns+https://workers.test:{port}"),
            )
            for spec in good:
                async with named(server, spec) as made:
                    await until(partial(up, made, worker), "it is trusted")
                    for stream in (False, True):
                        assert (await call(made.port, chat(stream=stream))).status == 200
                    assert worker.asked[-1].headers["host"].startswith("workers.test")
            for spec in bad:
                async with named(server, spec) as made:
                    await until(partial(distrusted, made), "it is not trusted")
                    assert (await call(made.port, chat())).status == 503

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(case())


async def test_a_file_that_is_gone_stops_no_worker(tmp_path: Path) -> None:
    """What it held when the fleet was read counts."""
    served = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    served.load_cert_chain(DATA / "workers_test.pem")
    file = tmp_path / "ca.pem"
    file.write_bytes((DATA / "test_ca.pem").read_bytes())
    async with Mock(tls=served) as worker:
        spec = WorkerSpec(url=worker.url, host="workers.test", ca_file=str(file))
        check_workers((spec,))
        file.unlink()
        async with gateway(registry=StaticRegistry([spec])) as made:
            assert (await call(made.port, chat())).status == 200


def test_what_is_trusted_is_a_file() -> None:
    for file in ("/no/such", __file__):
        with pytest.raises(ConfigError, match="ca_file"):
            check_workers((WorkerSpec(url="https://x", ca_file=file),))
    with pytest.raises(ConfigError, match="ca_file needs https"):
        check_workers((WorkerSpec(url="http://x", ca_file=__file__),))
    assert WorkerSpec(url="https://x").address == ("x", 443)


def test_addresses_as_urls() -> None:
    named = WorkerSpec(url="dns+http://x.test:8000", models=("m",))
    made = Target("fd00::1", 8000, "x.test").spec(named)
    assert (made.url, made.host, made.models) == ("http://[fd00::1]:8000", "x.test:8000", ("m",))
    assert made.address == ("fd00::1", 8000)
    own = WorkerSpec(url="dns+http://x.test", host="other")
    assert Target("10.0.0.1", 80, "x.test").spec(own).host == "other"
    assert Target("10.0.0.1", 80, "x.test").spec(named).host == "x.test"
    secure = Target("10.0.0.1", 443, "x.test").spec(WorkerSpec(url="dns+https://x.test"))
    assert (secure.url, secure.host, secure.secure) == ("https://10.0.0.1:443", "x.test", True)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("ftp://x:21", "without a path"),
        ("dns+ftp://x", "without a path"),
        ("dns+http://", "without a path"),
        ("mdns+http://x", "without a path"),
        ("dnssrv+http://x:80", "SRV records bring the port"),
    ],
)
def test_bad_names(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        check_workers((WorkerSpec(url=text),))


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("10.0.0.1", ("10.0.0.1", 53)),
        ("127.0.0.1:8600", ("127.0.0.1", 8600)),
        ("[::1]:54", ("::1", 54)),
    ],
)
def test_servers_that_are_asked(text: str, made: tuple[str, int]) -> None:
    assert dns_server(text) == made
    assert merge({"dns_server": text}, {}).dns_server == text


@pytest.mark.parametrize("text", ["ns.test", "10.0.0.1:x", "10.0.0.1:70000", ":53"])
def test_what_is_no_server(text: str) -> None:
    with pytest.raises(ConfigError, match="dns_server"):
        merge({}, {"dns_server": text})


def test_without_dnspython(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"names need dnspython: .*pip install"):
        check_workers((WorkerSpec(url="dns+http://x"),))
    check_workers((WorkerSpec(url="http://x"),))
