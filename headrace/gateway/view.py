"""What a policy sees: the fleet at one moment and the request that wants a place. All frozen.

The gateway fills these from its leases, the simulator from its model of a fleet; a policy cannot
tell which. Workers that may not take the request (down, draining, full, another model) are not in
the view at all.
"""

from __future__ import annotations

import msgspec


class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """One worker that may take the request. Counts are of requests placed and not ended."""

    name: str
    requests: int = 0
    waiting: int = 0  # of these, without a first token yet
    pending_tokens: int = 0  # prompt tokens of the waiting ones that no cache is known to hold
    decode_tokens: int = 0  # prompt tokens of those past their first token
    kv_usage: float | None = None  # share of its KV memory that is taken; None = unknown
    warm: float = 1.0  # (0, 1]: how much of its share of traffic it gets (slow start)
    last_placed: int = 0  # number of the newest placement here; 0 = never
    last_cold: int = 0  # number of the newest placement here of a prompt that nobody held
    prefill_tokens_per_s: float = 0.0  # measured; 0 = not known

    @property
    def free_kv(self) -> float:
        """Share of its KV memory: all of it where nothing is known."""
        return 1.0 - (self.kv_usage or 0.0)


class FleetView(msgspec.Struct, frozen=True):
    """The workers to choose from; at least one."""

    workers: tuple[WorkerView, ...]


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """A request that wants a place."""

    prompt_tokens: int
    cached_tokens: tuple[int, ...]  # by worker of the view: how many of them it is thought to hold
    draw: float = 0.0  # uniform in [0, 1): the only randomness a policy gets
    prefix_key: bytes = b""  # stands for the beginning of the prompt
    session: str = ""  # requests with the same one belong together; "" = none


class Choice(msgspec.Struct, frozen=True):
    """Where the request goes, and why."""

    index: int  # of FleetView.workers
    reason: str  # which rule decided
    scores: tuple[float, ...]  # by worker, the lowest is best; what they count is the policy's
    cold: bool = False  # no worker holds a share of the prompt that is worth going for
    replicates: bool = False  # the best holder was too busy: the prefix is computed once more


class Knobs(msgspec.Struct, frozen=True, kw_only=True):
    """What tunes the policies. Defaults of the foreign rules are those of their projects."""

    affinity: float = 0.75  # token_cost: 0 = load alone, 0.5 = token for token, 1 = cache alone
    decode_weight: float = 0.03  # prefill tokens that one token of a decoding context counts as
    cold_share: float = 0.1  # a prompt held up to this share is placed as a cold one
    cache_threshold: float = 0.3  # prefix_affinity: go to the holder above this share
    balance_abs: int = 64  # prefix_affinity: most requests between the busiest and the idlest
    balance_rel: float = 1.5  # prefix_affinity: and the factor between them
    queue_weight: float = 2.0  # weighted
    kv_weight: float = 2.0  # weighted
    prefix_weight: float = 3.0  # weighted
    load_factor: float = 1.25  # chwbl: most requests of a worker, in means of the fleet
