"""Limits of one tenant: requests a minute, tokens a minute, requests at once.

A bucket is GCRA: one number, the time at which everything taken so far has been paid back at the
rate of the limit. It holds one minute's worth, so in any t seconds at most limit * (1 + t / 60)
are taken. Tokens are reserved before a request runs and settled with what it really used.
"""

from __future__ import annotations

import math

import msgspec

from headrace.errors import RateLimited

WINDOW_S = 60.0
PARALLEL, REQUESTS, TOKENS = 1, 2, 3  # which limit is reached


class Bucket:
    """`limit` units a minute. Times are seconds of any clock that only goes forward."""

    def __init__(self, limit: int) -> None:
        assert limit > 0, "a bucket of nothing lets nothing pass"
        self.limit = limit
        self._paid_s = -math.inf  # when all that was taken is paid back
        self._each_s = WINDOW_S / limit

    def told(self, now_s: float) -> tuple[int, int, float]:
        """The limit, units that may be taken now, time until the bucket is full again."""
        owed_s = self._paid_s - now_s
        if owed_s <= 0.0:
            return self.limit, int(WINDOW_S / self._each_s + 1e-6), 0.0
        left = (WINDOW_S - owed_s) / self._each_s + 1e-6
        return self.limit, int(left) if left > 0.0 else 0, owed_s

    def wait_s(self, units: int, now_s: float) -> float:
        """Time until `units` may be taken; 0 = now; infinite for more than the limit."""
        if units > self.limit:
            return math.inf
        over_s = units * self._each_s - WINDOW_S - 1e-9
        if over_s > 0.0:
            return WINDOW_S  # more than this process's share, not more than the limit
        if self._paid_s > now_s:
            over_s += self._paid_s - now_s
        return over_s if over_s > 0.0 else 0.0

    def take(self, units: int, now_s: float) -> None:
        """Take `units`, allowed or not: what was used is used."""
        paid_s = self._paid_s
        self._paid_s = (paid_s if paid_s > now_s else now_s) + units * self._each_s

    def split(self, shares: int) -> None:
        """Refill at one of so many equal shares of the rate."""
        self._each_s = WINDOW_S / self.limit * shares

    def owe(self, seconds: float, now_s: float) -> None:
        """All that was taken is paid back in so many seconds, and not otherwise."""
        self._paid_s = now_s + seconds

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
        self.limited = limits != Limits()
        self.requests = Bucket(limits.requests_per_min) if limits.requests_per_min else None
        self.tokens = Bucket(limits.tokens_per_min) if limits.tokens_per_min else None
        self.running = 0
        self._shares = 1

    def reserve(self, tokens: int, now_s: float) -> Reservation | RateLimited:
        """All or nothing: the reservation, or the limit that is reached."""
        refused = self.refuses(tokens, now_s)
        if refused is not None:
            return refused
        self.take(tokens, now_s)
        self.running += 1
        return Reservation(self, tokens)

    def refuses(self, tokens: int, now_s: float) -> RateLimited | None:
        """The limit that one request more would exceed."""
        parallel = self.limits.parallel
        if parallel and self.running >= max(1, parallel // self._shares):
            return self.refusal(PARALLEL, tokens, 1.0)
        if self.requests is not None and (wait_s := self.requests.wait_s(1, now_s)):
            return self.refusal(REQUESTS, tokens, wait_s)
        if self.tokens is None:
            return None
        wait_s = self.tokens.wait_s(tokens, now_s)
        return self.never(tokens) or (self.refusal(TOKENS, tokens, wait_s) if wait_s else None)

    def never(self, tokens: int) -> RateLimited | None:
        """What is asked exceeds a whole minute's worth."""
        most = self.limits.tokens_per_min
        if not most or tokens <= most:
            return None
        return RateLimited(
            f"{most} tokens a minute are allowed; this request may use {tokens}: it can never run"
        )

    def refusal(self, which: int, tokens: int, wait_s: float) -> RateLimited:
        """That a limit is reached, in words. wait_s: until it may be tried again."""
        limits = self.limits
        if which == PARALLEL:
            text = f"{limits.parallel} requests at once are allowed"
        elif which == REQUESTS:
            text = f"{limits.requests_per_min} requests a minute are allowed"
        else:
            text = f"{limits.tokens_per_min} tokens a minute are allowed, and this request may use "
            text += str(tokens)
        return RateLimited(text, wait_s=wait_s)

    def take(self, tokens: int, now_s: float) -> None:
        """One request more, with what it may use."""
        if self.requests is not None:
            self.requests.take(1, now_s)
        if self.tokens is not None:
            self.tokens.take(tokens, now_s)

    def split(self, shares: int) -> None:
        """Only one of so many equal shares of each limit is for this process; 1 = all of it."""
        self._shares = shares
        for bucket in (self.requests, self.tokens):
            if bucket is not None:
                bucket.split(shares)

    def owes(self, requests_s: float, tokens_s: float, now_s: float) -> None:
        """Somebody who keeps this account for several processes says how much is taken."""
        if self.requests is not None:
            self.requests.owe(requests_s, now_s)
        if self.tokens is not None:
            self.tokens.owe(tokens_s, now_s)

    def headers(self, now_s: float) -> bytes:
        """x-ratelimit-{limit,remaining,reset}-{requests,tokens}, as OpenAI's, each with its end of
        line: written at once, for every answer has them.
        """
        out = b""
        if self.requests is not None:
            out = _OF_REQUESTS % self.requests.told(now_s)
        if self.tokens is not None:
            out += _OF_TOKENS % self.tokens.told(now_s)
        return out


def _lines(name: bytes) -> bytes:
    return (
        b"x-ratelimit-limit-%b: %%d\r\nx-ratelimit-remaining-%b: %%d\r\n"
        b"x-ratelimit-reset-%b: %%.3fs\r\n" % (name, name, name)
    )


_OF_REQUESTS, _OF_TOKENS = _lines(b"requests"), _lines(b"tokens")
