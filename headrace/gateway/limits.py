"""Limits of one tenant: requests a minute, tokens a minute, requests at once.

A bucket is GCRA: one number, the time at which everything taken so far has been paid back at the
rate of the limit. It holds one minute's worth, so in any t seconds at most limit * (1 + t / 60)
are taken. Tokens are reserved before a request runs and settled with what it really used.
"""

from __future__ import annotations

import math

import msgspec

from headrace.errors import RateLimited
from headrace.gateway.upstream import Headers

WINDOW_S = 60.0


class Bucket:
    """`limit` units a minute. Times are seconds of any clock that only goes forward."""

    def __init__(self, limit: int) -> None:
        assert limit > 0, "a bucket of nothing lets nothing pass"
        self.limit = limit
        self._paid_s = -math.inf  # when all that was taken is paid back
        self._each_s = WINDOW_S / limit

    def owed_s(self, now_s: float) -> float:
        """Time until the bucket is full again."""
        return max(0.0, self._paid_s - now_s)

    def left(self, now_s: float) -> int:
        """Units that may be taken now."""
        return max(0, math.floor((WINDOW_S - self.owed_s(now_s)) / self._each_s + 1e-6))

    def wait_s(self, units: int, now_s: float) -> float:
        """Time until `units` may be taken; 0 = now; infinite for more than the limit."""
        if units > self.limit:
            return math.inf
        return max(0.0, self.owed_s(now_s) + units * self._each_s - WINDOW_S - 1e-9)

    def take(self, units: int, now_s: float) -> None:
        """Take `units`, allowed or not: what was used is used."""
        self._paid_s = max(self._paid_s, now_s) + units * self._each_s

    def give(self, units: int) -> None:
        """Give back `units` that were taken and not used."""
        self._paid_s -= units * self._each_s


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """0 = no limit."""

    requests_per_min: int = 0
    tokens_per_min: int = 0
    parallel: int = 0


class Reservation:
    """What one request holds of its tenant's limits. Settled once."""

    __slots__ = ("_account", "_open", "tokens")

    def __init__(self, account: Account, tokens: int) -> None:
        self._account, self.tokens, self._open = account, tokens, True

    def settle(self, used_tokens: int, now_s: float) -> None:
        """The request ended and used that many tokens: the rest goes back, more is charged.

        A second call does nothing.
        """
        if not self._open:
            return
        self._open = False
        account = self._account
        account.running -= 1
        if account.tokens is not None:
            if used_tokens <= self.tokens:
                account.tokens.give(self.tokens - used_tokens)
            else:
                account.tokens.take(used_tokens - self.tokens, now_s)


class Account:
    """The limits of one tenant and what it has taken."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.requests = Bucket(limits.requests_per_min) if limits.requests_per_min else None
        self.tokens = Bucket(limits.tokens_per_min) if limits.tokens_per_min else None
        self.running = 0

    def reserve(self, tokens: int, now_s: float) -> Reservation:
        """All or nothing. Raises RateLimited, which names the limit."""
        limits = self.limits
        if limits.parallel and self.running >= limits.parallel:
            raise RateLimited(f"{limits.parallel} requests at once are allowed", wait_s=1.0)
        if self.requests is not None and (wait_s := self.requests.wait_s(1, now_s)):
            raise RateLimited(
                f"{limits.requests_per_min} requests a minute are allowed", wait_s=wait_s
            )
        if self.tokens is not None and (wait_s := self.tokens.wait_s(tokens, now_s)):
            text = f"{limits.tokens_per_min} tokens a minute are allowed"
            if wait_s == math.inf:
                raise RateLimited(f"{text}; this request may use {tokens}: it can never run")
            raise RateLimited(f"{text}, and this request may use {tokens}", wait_s=wait_s)
        if self.requests is not None:
            self.requests.take(1, now_s)
        if self.tokens is not None:
            self.tokens.take(tokens, now_s)
        self.running += 1
        return Reservation(self, tokens)

    def headers(self, now_s: float) -> Headers:
        """x-ratelimit-{limit,remaining,reset}-{requests,tokens}, as OpenAI's."""
        out: Headers = []
        for name, bucket in ((b"requests", self.requests), (b"tokens", self.tokens)):
            if bucket is not None:
                out.append((b"x-ratelimit-limit-" + name, b"%d" % bucket.limit))
                out.append((b"x-ratelimit-remaining-" + name, b"%d" % bucket.left(now_s)))
                reset = f"{bucket.owed_s(now_s):.3f}s".encode()
                out.append((b"x-ratelimit-reset-" + name, reset))
        return out
