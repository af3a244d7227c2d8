"""Limits of tenants that several gateways share: what was taken is kept in Redis or Valkey.

The rules are those of `limits.Account`, run in one script in the server, so a check and what it
takes are one step. Requests that come while a call is out travel together in the next one. Every
answer tells what is owed now, and the process's own account takes that over: should the server be
lost, each gateway goes on from there with an even share of the limits, and nobody waits. What is
used meanwhile is charged when the server is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.errors import ConfigError, RateLimited
from headrace.extras import install
from headrace.gateway.limits import Account, Reservation

if TYPE_CHECKING:
    from redis.asyncio import Redis

log = logging.getLogger("headrace.gateway")

PREFIX = "headrace:{limits}:"  # the braces keep all keys on one node of a cluster
LEASE_S = 30  # a gateway that is not heard of for this long holds no requests any more
BEAT_S = 5.0
RETRY_S = 1.0
MAX_BATCH = 256
RESERVE, SETTLE, HOLD, CHARGE = 0, 1, 2, 3

# KEYS: prefix. ARGV: gateway, lease, operations in msgpack: [kind, tenant, requests a minute,
# tokens a minute, parallel, tokens, ids, requests]. Fields r and t of a tenant's hash: when all
# that was taken is paid back, in seconds since 2026 (small numbers are exact to 1e-8).
# Gives {gateways alive, {which limit (0 = none), seconds to wait, owed for requests, for tokens}}.
SCRIPT = """
local prefix, gateway, lease = KEYS[1], ARGV[1], tonumber(ARGV[2])
local clock = redis.call('TIME')
local now = tonumber(clock[1]) - 1767225600 + tonumber(clock[2]) / 1e6
local alive = prefix .. 'gateways'
redis.call('ZADD', alive, now + lease, gateway)
redis.call('ZREMRANGEBYSCORE', alive, '-inf', now)
local answers = {}
for i, op in ipairs(cmsgpack.unpack(ARGV[3])) do
  local kind, tenant, requests, tokens, parallel = op[1], op[2], op[3], op[4], op[5]
  local used, ids = op[6], op[7]
  local key = prefix .. 'owed:' .. tenant
  local running = prefix .. 'running:' .. tenant
  local owed = redis.call('HMGET', key, 'r', 't')
  local r = math.max(now, tonumber(owed[1]) or 0)
  local t = math.max(now, tonumber(owed[2]) or 0)
  local why, wait = 0, 0
  if kind == 0 then
    if parallel > 0 then
      redis.call('ZREMRANGEBYSCORE', running, '-inf', now)
      if redis.call('ZCARD', running) >= parallel then why, wait = 1, 1 end
    end
    if why == 0 and requests > 0 then
      wait = r - now + 60 / requests - 60 - 1e-7
      if wait > 0 then why = 2 end
    end
    if why == 0 and tokens > 0 then
      wait = t - now + used * 60 / tokens - 60 - 1e-7
      if wait > 0 then why = 3 end
    end
    if why == 0 then
      if requests > 0 then r = r + 60 / requests end
      if tokens > 0 then t = t + used * 60 / tokens end
      if parallel > 0 then redis.call('ZADD', running, now + lease, ids[1]) end
    end
  else
    if tokens > 0 then t = math.max(now, t + used * 60 / tokens) end
    if kind == 1 then
      if parallel > 0 then redis.call('ZREM', running, ids[1]) end
    elseif kind == 2 then
      for _, id in ipairs(ids) do redis.call('ZADD', running, now + lease, id) end
    elseif requests > 0 then
      r = r + op[8] * 60 / requests
    end
  end
  if requests > 0 or tokens > 0 then
    redis.call('HSET', key, 'r', string.format('%.9f', r), 't', string.format('%.9f', t))
    redis.call('EXPIRE', key, math.ceil(math.max(r, t) - now) + 60)
  end
  if parallel > 0 then redis.call('EXPIRE', running, lease + 1) end
  answers[i] = {why, wait, r - now, t - now}
end
return cmsgpack.pack({redis.call('ZCARD', alive), answers})
"""


class _Tenant:
    """What this process knows of one tenant's share in the ledger."""

    __slots__ = ("account", "debt_requests", "debt_tokens", "name", "running")

    def __init__(self, name: str, account: Account) -> None:
        self.name, self.account = name, account
        self.running: set[str] = set()  # ids that count against `parallel`
        self.debt_requests = self.debt_tokens = 0  # taken while nobody could be told

    def op(self, kind: int, tokens: int, ids: list[str], requests: int = 0) -> list[Any]:
        """One operation of the script."""
        limits = self.account.limits
        sizes = (limits.requests_per_min, limits.tokens_per_min, limits.parallel)
        return [kind, self.name, *sizes, tokens, ids, requests]


class _Shared(Reservation):
    """A reservation that the ledger is told the end of."""

    __slots__ = ("_id", "_ledger", "_tenant")

    def __init__(self, ledger: Ledger, tenant: _Tenant, id_: str, tokens: int) -> None:
        super().__init__(tenant.account, tokens)
        self._ledger, self._tenant, self._id = ledger, tenant, id_

    def settle(self, used_tokens: int, now_s: float) -> None:
        if self._open:
            super().settle(used_tokens, now_s)
            self._ledger._settled(self._tenant, self._id, used_tokens - self.tokens)


class _Asked(msgspec.Struct):
    """An operation on its way. `then` is called once, where somebody waits for the answer."""

    tenant: _Tenant
    op: list[Any]
    id: str = ""
    tokens: int = 0
    then: Callable[[Reservation | RateLimited], None] | None = None


class Ledger:
    """`start` in the gateway's loop; from then on `reserve` always answers, with the server or
    without.
    """

    def __init__(self, url: str, timeout_s: float, gateways: int = 1) -> None:
        """gateways: how many share the limits, until the server says. Raises ConfigError."""
        self._make = _maker(url)
        self._timeout_s = timeout_s
        self.gateways = gateways
        self.up = False
        self._name = secrets.token_hex(8)
        self._tenants: dict[str, _Tenant] = {}
        self._asked: list[_Asked] = []
        self._out: list[_Asked] = []  # in the call that is out
        self._wake, self._told = asyncio.Event(), asyncio.Event()  # told: nothing is left to tell
        self._told.set()
        self._tried = asyncio.Event()
        self._count = 0
        self._beat_s = 0.0
        self._task: asyncio.Task[None] | None = None
        self._stopping = False

    async def start(self) -> None:
        """Connect, and again whenever the server was lost. Returns when it is clear whether it is
        there.
        """
        self._task = asyncio.get_running_loop().create_task(self._run())
        await self._tried.wait()

    async def stop(self) -> None:
        """Tell what is still to be told, if that is quick."""
        if self._task is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._timeout_s if self.up else 0):
                await self._told.wait()
        self._stopping = True  # whoever swallows the cancel ends with its next look
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def reserve(
        self,
        name: str,
        account: Account,
        tokens: int,
        then: Callable[[Reservation | RateLimited], None],
    ) -> None:
        """`then` gets the reservation, or the limit that is reached: at once without a server."""
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant(name, account)
            account.split(1 if self.up else self.gateways)
        self._count += 1
        id_ = f"{self._name}-{self._count}"
        asked = _Asked(tenant, tenant.op(RESERVE, tokens, [id_]), id_, tokens, then)
        never = account.never(tokens)
        if never is not None:
            then(never)
        elif self.up:
            self._tell(asked)
        else:
            then(self._alone(asked))

    def _tell(self, asked: _Asked) -> None:
        self._asked.append(asked)
        self._told.clear()
        self._wake.set()

    def _settled(self, tenant: _Tenant, id_: str, more_tokens: int) -> None:
        """A request ended: it used that many more tokens than were reserved (or fewer)."""
        tenant.running.discard(id_)
        if self.up:
            self._tell(_Asked(tenant, tenant.op(SETTLE, more_tokens, [id_])))
        else:
            tenant.debt_tokens += more_tokens

    def _alone(self, asked: _Asked) -> Reservation | RateLimited:
        """Decide by this process's share of the limits."""
        tenant = asked.tenant
        refused = tenant.account.refuses(asked.tokens, time.monotonic())
        if refused is not None:
            return refused
        tenant.account.take(asked.tokens, time.monotonic())
        tenant.debt_requests += 1
        tenant.debt_tokens += asked.tokens
        return self._grant(asked)

    def _grant(self, asked: _Asked) -> Reservation:
        tenant = asked.tenant
        tenant.account.running += 1
        tenant.running.add(asked.id)
        return _Shared(self, tenant, asked.id, asked.tokens)

    # ------------------------------------------------------------ the server

    async def _run(self) -> None:
        while not self._stopping:
            client = self._make()
            try:
                async with asyncio.timeout(RETRY_S):
                    sha = await client.script_load(SCRIPT)
                await self._serve(client, sha)
            except Exception as error:  # of whatever kind: nobody may be left without an answer
                self._lost(error)
            finally:
                with contextlib.suppress(Exception):  # it is lost, or told all
                    async with asyncio.timeout(RETRY_S):
                        await client.aclose()
            await asyncio.sleep(RETRY_S)

    async def _serve(self, client: Redis, sha: str) -> None:
        """Until the server fails, or `stop`."""
        self._charge()
        self._beat_s = 0.0  # hold what runs, with the first call
        await self._flush(client, sha)
        for tenant in self._tenants.values():
            tenant.account.split(1)
        self.up = True
        self._tried.set()
        self._charge()  # what was taken during that call
        log.info("limits are shared with %d other gateways", self.gateways - 1)
        while not self._stopping:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BEAT_S):
                    await self._wake.wait()
            self._wake.clear()
            while True:
                await self._flush(client, sha)
                if not self._asked:
                    self._told.set()
                    break

    def _charge(self) -> None:
        """Tell what was taken while nobody could be told."""
        for tenant in self._tenants.values():
            if tenant.debt_requests or tenant.debt_tokens:
                op = tenant.op(CHARGE, tenant.debt_tokens, [], tenant.debt_requests)
                tenant.debt_requests = tenant.debt_tokens = 0
                self._tell(_Asked(tenant, op))

    async def _flush(self, client: Redis, sha: str) -> None:
        """One call with all that waits to be told."""
        now_s = time.monotonic()
        self._out, self._asked = self._asked[:MAX_BATCH], self._asked[MAX_BATCH:]
        if now_s - self._beat_s >= BEAT_S:
            self._beat_s = now_s
            held = [tenant for tenant in self._tenants.values() if tenant.account.limits.parallel]
            self._out[:0] = [_Asked(t, t.op(HOLD, 0, list(t.running))) for t in held if t.running]
        ops = msgspec.msgpack.encode([asked.op for asked in self._out])
        async with asyncio.timeout(self._timeout_s):
            said = await client.evalsha(sha, 1, PREFIX, self._name, str(LEASE_S), ops)
        gateways, answers = msgspec.msgpack.decode(said, type=tuple[int, list[tuple[float, ...]]])
        self.gateways = max(1, gateways)
        out, self._out = self._out, []
        now_s = time.monotonic()
        for asked, (why, wait_s, requests_s, tokens_s) in zip(out, answers, strict=True):
            account = asked.tenant.account
            account.owes(requests_s, tokens_s, now_s)
            if asked.then is None:
                continue
            got = account.refusal(int(why), asked.tokens, wait_s) if why else self._grant(asked)
            asyncio.get_running_loop().call_soon(asked.then, got)

    def _lost(self, error: Exception) -> None:
        """Go on alone: what was asked is decided here."""
        if self.up or not self._tried.is_set():
            log.warning(
                "the limits' server is lost (%s): this gateway takes 1/%d of them until it is back",
                str(error) or type(error).__name__,
                self.gateways,
            )
        self.up = False
        self._tried.set()
        for tenant in self._tenants.values():
            tenant.account.split(self.gateways)
        waiting, self._out, self._asked = [*self._out, *self._asked], [], []
        for asked in waiting:
            if asked.then is not None:
                asyncio.get_running_loop().call_soon(asked.then, self._alone(asked))
            elif asked.op[0] in (SETTLE, CHARGE):
                asked.tenant.debt_tokens += asked.op[5]
                asked.tenant.debt_requests += asked.op[7] if asked.op[0] == CHARGE else 0


def _maker(url: str) -> Callable[[], Redis]:
    """Makes clients of one connection. Raises ConfigError."""
    try:
        from redis.asyncio import Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
    except ImportError:
        raise ConfigError(f"redis_url needs redis: {install('redis')}") from None
    plain = "redis" + url.removeprefix("valkey") if url.startswith("valkey") else url

    def make() -> Redis:
        # Every call is bounded here. With a timeout of its own, which is the default since 8.0, it
        # sends by `asyncio.wait_for`, and that of Python 3.11 keeps a cancel that comes just as
        # the bytes are gone for itself: whoever was to end then reads on.
        return Redis.from_url(
            plain,
            retry=Retry(NoBackoff(), 0),
            single_connection_client=True,
            socket_timeout=None,
            socket_connect_timeout=None,
        )

    try:
        make()
    except ValueError as error:
        raise ConfigError(f"redis_url {url!r}: {error}", param="redis_url") from None
    return make
