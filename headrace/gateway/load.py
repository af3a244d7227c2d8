"""What stands at one worker, counted by leases: the gateway's workers and the simulator's alike."""

from __future__ import annotations

from collections.abc import Callable

RATE_SHARE = 0.1  # of a new measurement in the prefill rate, the older ones keep the rest
MIN_RATE_TOKENS = 256  # shorter work measures latency, not rate


class Load:
    """Counts change through leases alone, so no path can count twice or forget."""

    def __init__(self) -> None:
        self.leases: set[Lease] = set()
        self.waiting = 0  # leases without a first token yet
        self.pending_tokens = 0  # their prompts' tokens that no cache is known to hold
        self.decode_tokens = 0  # prompt tokens of the others
        self.last_placed = self.last_cold = 0
        self.prefill_tokens_per_s = 0.0  # measured; 0 = not known
        self._queue: dict[Lease, None] = {}  # those that wait, oldest first
        self._moved_s = 0.0  # the last first token came
        self._done_tokens = 0  # before first tokens that came at one moment or soon after another
        self._rate_tokens = self._rate_s = 0.0  # sums, older ones weigh less

    def left_tokens(self, now_s: float) -> int:
        """`pending_tokens`, less what the oldest prompt must have got done by now.

        A prompt of 100 000 tokens is at work for seconds: all of it would count until its first
        token, and a worker that is nearly free would look like the busiest one.
        """
        if not self._queue or not self.prefill_tokens_per_s:
            return self.pending_tokens
        head = next(iter(self._queue))
        since_s = max(self._moved_s, head.since_s)
        done = int((now_s - since_s) * self.prefill_tokens_per_s)
        return self.pending_tokens - min(max(0, done), head.uncached_tokens)

    def added(self, lease: Lease, number: int) -> None:
        """A lease was taken; number: of this placement among all."""
        self.leases.add(lease)
        self._queue[lease] = None
        self.waiting += 1
        self.pending_tokens += lease.uncached_tokens
        self.last_placed = number

    def moved(self, lease: Lease, now_s: float, *, seen: bool = True) -> None:
        """Its first token came, or must have come if it was not `seen`: its prompt is computed, its
        context decodes.
        """
        self._leaves_queue(lease)
        self.decode_tokens += lease.prompt_tokens
        if not lease.prompt_tokens:
            return  # it computes nothing, so it says nothing of the rate
        if not seen:
            self._moved_s, self._done_tokens = now_s, 0
            return
        self._done_tokens += lease.uncached_tokens
        since_s = max(self._moved_s, lease.since_s)
        self._moved_s = now_s
        if self._done_tokens >= MIN_RATE_TOKENS and now_s > since_s:
            keep = 1.0 - RATE_SHARE
            self._rate_tokens = keep * self._rate_tokens + self._done_tokens
            self._rate_s = keep * self._rate_s + now_s - since_s
            self.prefill_tokens_per_s = self._rate_tokens / self._rate_s
        if now_s > since_s:
            self._done_tokens = 0

    def removed(self, lease: Lease) -> None:
        """A lease ended."""
        self.leases.remove(lease)
        if lease in self._queue:
            self._leaves_queue(lease)
        else:
            self.decode_tokens -= lease.prompt_tokens

    def _leaves_queue(self, lease: Lease) -> None:
        del self._queue[lease]
        self.waiting -= 1
        self.pending_tokens -= lease.uncached_tokens


class Lease:
    """A request's share of a worker's load, from its placement to its end. Ends once."""

    __slots__ = (
        "_before_tokens",
        "_begun",
        "computed",
        "prompt_tokens",
        "silent",
        "since_s",
        "uncached_tokens",
        "worker",
    )

    def __init__(
        self,
        worker: Load,
        prompt_tokens: int,
        uncached_tokens: int,
        number: int,
        now_s: float,
        silent: bool = False,
    ) -> None:
        """number: of this placement among all. silent: its first token will not show."""
        self.silent = silent
        self.worker, self.since_s = worker, now_s
        self.prompt_tokens, self.uncached_tokens = prompt_tokens, uncached_tokens
        self._begun = False
        self.computed: Callable[[], None] | None = None  # called once: at its first token, or end
        worker.added(self, number)
        self._before_tokens = worker.left_tokens(now_s) if silent else 0

    def begin(self, now_s: float) -> None:
        """The first token came. A second call, or one behind the end, does nothing."""
        self._tell_computed()
        if self._begun or self not in self.worker.leases:
            return
        self._begun = True
        self.worker.moved(self, now_s)

    def assume(self, now_s: float) -> None:
        """A silent one is thought to decode once its prompt can have been computed."""
        rate = self.worker.prefill_tokens_per_s
        passed_s = now_s - self.since_s
        if not (self.silent and rate) or self._begun or self not in self.worker.leases:
            return
        if passed_s * rate >= self._before_tokens:
            self._begun = True
            self.worker.moved(self, now_s, seen=False)

    def end(self) -> None:
        """It left, one way or another. A second call does nothing."""
        self._tell_computed()
        if self in self.worker.leases:
            self.worker.removed(self)

    def _tell_computed(self) -> None:
        if self.computed is not None:
            tell, self.computed = self.computed, None
            tell()
