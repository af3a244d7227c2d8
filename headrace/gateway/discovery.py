"""Workers that DNS names: asked for again and again, so that they come and go with their records.

`dns+http://HOST:PORT` is a worker at each address of HOST, as a headless service of Kubernetes has
them; `dnssrv+http://NAME` is one at each address of each target of NAME's SRV records. A name that
no longer resolves keeps the workers that it had, for a while: an outage of DNS is none of theirs.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from headrace.gateway.registry import Apply, Registry
from headrace.gateway.settings import PORTS, GatewaySettings, WorkerSpec, dns_server

if TYPE_CHECKING:
    from dns.asyncresolver import Resolver as Client
    from dns.resolver import Answer

log = logging.getLogger("headrace.gateway")

MIN_WAIT_S = 1.0  # between two questions for one name, whatever its records' time to live
LIFETIME_S = 5.0  # of one question, all servers and tries
MOST_AT_ONCE = 32  # targets of one name
PAYLOAD_BYTES = 1232  # of an answer by UDP that no network cuts in two; longer ones come by TCP


class Target(msgspec.Struct, frozen=True, order=True):
    """Where one worker listens, and by which name it was found."""

    address: str
    port: int
    name: str

    def spec(self, named: WorkerSpec) -> WorkerSpec:
        """The worker, otherwise as the entry of the name says."""
        scheme = named.url.partition("+")[2].partition("://")[0]
        host = f"[{self.address}]" if ":" in self.address else self.address
        shown = self.name if self.port == PORTS[scheme] else f"{self.name}:{self.port}"
        return msgspec.structs.replace(
            named, url=f"{scheme}://{host}:{self.port}", host=named.host or shown
        )


class Nothing(Exception):
    """DNS answered, and the name has no such records."""


class Resolver:
    """Asks DNS. Event loop only."""

    def __init__(self, server: str) -> None:
        """server: HOST:PORT, an address; "" = those of /etc/resolv.conf, with its search list."""
        self._server = server
        self._client: Client | None = None
        self._failed: dict[str, set[tuple[str, int]]] = {}  # SRV name -> targets, not told lately

    async def find(
        self, url: str, before: Sequence[Target] = ()
    ) -> tuple[tuple[Target, ...], float]:
        """Where a name's workers are, in order, and for how many seconds that holds.

        before: where they were; those of an SRV target that DNS cannot tell now, while it tells
        others, are still there.

        Raises Nothing; OSError where DNS cannot tell.
        """
        from dns.exception import DNSException
        from dns.resolver import NXDOMAIN, LifetimeTimeout, NoAnswer

        kind, _, rest = url.partition("+")
        parts = urlsplit(rest)
        host, port = parts.hostname or "", parts.port or PORTS[parts.scheme]
        try:
            if kind == "dns":
                found, ttl_s = await self._addresses(host, port)
            else:
                found, ttl_s = await self._services(host, before)
        except NXDOMAIN:
            raise Nothing("NXDOMAIN") from None
        except NoAnswer:
            raise Nothing("no such records") from None
        except LifetimeTimeout:
            self._client = None  # what /etc/resolv.conf says may have changed
            raise OSError(f"no answer within {LIFETIME_S:g} s") from None
        except DNSException as error:
            self._client = None
            raise OSError(str(error)) from None
        return tuple(sorted(set(found))), ttl_s

    async def _addresses(self, host: str, port: int) -> tuple[list[Target], float]:
        """Of one family: a worker that has one of each would be counted twice."""
        from dns.resolver import NoAnswer

        try:
            answer = await self._ask(host, "A")
        except NoAnswer:
            answer = await self._ask(host, "AAAA")
        return [Target(row.address, port, host) for row in answer], _ttl_s(answer)

    async def _services(self, name: str, before: Sequence[Target]) -> tuple[list[Target], float]:
        """Those of the lowest priority number, as RFC 2782 asks; weights are the policy's job."""
        answer = await self._ask(name, "SRV")
        rows = [row for row in answer if row.target.labels != (b"",)]  # "." says: no service
        if not rows:
            raise Nothing("its SRV record says that there is no service")
        rows = [row for row in rows if row.port]
        if not rows:
            raise Nothing("its SRV records name port 0")
        first = min(row.priority for row in rows)
        ends = [
            (row.target.to_text(omit_final_dot=False), row.port)
            for row in rows
            if row.priority == first
        ]
        few = asyncio.Semaphore(MOST_AT_ONCE)
        asked = await asyncio.gather(
            *(self._target(few, *end) for end in ends), return_exceptions=True
        )
        failed = {
            end: one for one, end in zip(asked, ends, strict=True) if not isinstance(one, tuple)
        }
        if len(failed) == len(set(ends)):
            raise failed[ends[0]]
        for end in failed.keys() - self._failed.get(name, set()):
            log.warning("%s: %s: %s; its workers stay", name, end[0], failed[end])
        self._failed[name] = set(failed)
        found = [_as_before(one, *end, before) for one, end in zip(asked, ends, strict=True)]
        targets = [target for some, _ in found for target in some]
        if not targets:
            raise Nothing("none of its targets has an address")
        return targets, min(_ttl_s(answer), *(ttl_s for _, ttl_s in found))

    async def _target(
        self, few: asyncio.Semaphore, name: str, port: int
    ) -> tuple[list[Target], float]:
        """Addresses of one target; one that is being made, or has just gone, may have none."""
        from dns.resolver import NXDOMAIN, NoAnswer

        try:
            async with few:
                found, ttl_s = await self._addresses(name, port)
        except (NXDOMAIN, NoAnswer):
            return [], math.inf
        shown = name.rstrip(".")
        return [msgspec.structs.replace(target, name=shown) for target in found], ttl_s

    async def _ask(self, name: str, kind: str) -> Answer:
        if self._client is None:
            self._client = _client(self._server)
        return await self._client.resolve(name, kind, lifetime=LIFETIME_S, search=True)


def _client(server: str) -> Client:
    from dns.asyncresolver import Resolver as Client

    made = Client(configure=not server)
    if server:
        address, made.port = dns_server(server)
        made.nameservers = [address]
    made.use_edns(0, 0, PAYLOAD_BYTES)
    return made


def _as_before(
    asked: tuple[list[Target], float] | BaseException,
    name: str,
    port: int,
    before: Sequence[Target],
) -> tuple[list[Target], float]:
    """What DNS says of a target; where it cannot tell, what it said, and to be asked soon."""
    from dns.exception import DNSException

    if not isinstance(asked, BaseException):
        return asked
    if not isinstance(asked, DNSException):
        raise asked
    shown = name.rstrip(".")
    return [target for target in before if (target.name, target.port) == (shown, port)], 0.0


def _ttl_s(answer: Answer) -> float:
    """The shortest on the way to it, aliases included."""
    return float(answer.chaining_result.minimum_ttl)


class Name:
    """What is known of one name."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.targets: tuple[Target, ...] = ()
        self.why = "not asked yet"  # the targets are not those of the last answer; "" = they are
        self.good_s = 0.0  # time.monotonic() of the last good answer, 0 = there was none
        self.failures = 0  # in a row
        self.counts = {"found": 0, "nothing": 0, "failed": 0}  # answers

    def age_s(self, now_s: float) -> float:
        """Since the answer that named the targets."""
        return now_s - self.good_s if self.good_s else 0.0

    def told(self, targets: tuple[Target, ...], now_s: float) -> bool:
        """A good answer came; whether that changes something."""
        if self.failures:
            log.info("%s resolves again", self.url)
        changed = targets != self.targets or not self.good_s
        self.targets, self.good_s, self.why, self.failures = targets, now_s, "", 0
        self.counts["found"] += 1
        return changed

    def lost(self, kind: str, why: str, now_s: float, keep_s: float) -> bool:
        """None came; whether that changes something: after `keep_s` its workers are given up."""
        self.failures += 1
        self.counts[kind] += 1
        if why != self.why:
            log.warning("%s: %s; its %d workers stay", self.url, why, len(self.targets))
        self.why = why
        if not self.targets or self.age_s(now_s) < keep_s:
            return False
        log.error("%s: %s for %.0f s; its workers leave", self.url, why, self.age_s(now_s))
        self.targets = ()
        return True

    def wait_s(self, ttl_s: float, most_s: float) -> float:
        """Until it is asked again: when its records have had their time, sooner if that is long;
        after a failure soon, then ever later.
        """
        if self.failures:
            return float(min(MIN_WAIT_S * 2 ** min(self.failures - 1, 16), most_s))
        return min(max(ttl_s, MIN_WAIT_S), most_s)


class DnsRegistry:
    """The workers of another registry; those that are names, at their addresses."""

    def __init__(self, inner: Registry, settings: GatewaySettings) -> None:
        self._inner, self._settings = inner, settings
        self._resolver = Resolver(settings.dns_server)
        self._specs: tuple[WorkerSpec, ...] = ()
        self._names: dict[str, Name] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._begun = False

    @property
    def names(self) -> Sequence[Name]:
        """See `Registry`."""
        return tuple(self._names.values())

    def start(self, apply: Apply) -> None:
        """See `Registry`. Where all workers are names the first list comes with the first answer:
        those in it were there before the gateway.
        """
        self._apply = apply
        self._inner.start(self._listed)

    def tick(self) -> None:
        """See `Registry`."""
        self._inner.tick()

    def close(self) -> None:
        """See `Registry`."""
        self._inner.close()
        for url in list(self._tasks):
            self._forget(url)

    def _listed(self, specs: Sequence[WorkerSpec]) -> None:
        self._specs = tuple(specs)
        wanted = [spec.url for spec in specs if spec.lookup]
        for url in set(self._names).difference(wanted):
            self._forget(url)
            del self._names[url]
        for url in wanted:
            if url not in self._names:
                name = self._names[url] = Name(url)
                self._tasks[url] = asyncio.get_running_loop().create_task(self._follow(name))
        self._tell()

    def _forget(self, url: str) -> None:
        self._tasks.pop(url).cancel()

    def _tell(self) -> None:
        """The whole list; of two entries that come to the same address the first counts."""
        named = len(self._names) == len(self._specs) > 0
        if not self._begun and named and not any(name.good_s for name in self._names.values()):
            return
        self._begun = True
        found: dict[tuple[str, int], WorkerSpec] = {}
        for spec in self._specs:
            name = self._names.get(spec.url)
            some = [spec] if name is None else [target.spec(spec) for target in name.targets]
            for one in some:
                found.setdefault(one.address, one)
        self._apply(tuple(found.values()))

    async def _follow(self, name: Name) -> None:
        settings = self._settings
        while True:
            ttl_s = 0.0
            try:
                targets, ttl_s = await self._resolver.find(name.url, name.targets)
                changed = name.told(targets, time.monotonic())
            except Nothing as none:
                now_s = time.monotonic()
                changed = name.lost("nothing", str(none), now_s, settings.dns_keep_s)
            except OSError as error:
                now_s = time.monotonic()
                changed = name.lost("failed", str(error), now_s, settings.dns_keep_s)
            if changed:
                self._tell()
            await asyncio.sleep(name.wait_s(ttl_s, settings.dns_interval_s))
