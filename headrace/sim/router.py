"""The gateway's part of a simulated fleet: the same policies, view and index, with leases counted
as the gateway counts them. It knows what it routed and what came back, never a worker's cache.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from headrace.gateway.load import Lease, Load
from headrace.gateway.policy import POLICIES
from headrace.gateway.prefix_index import ENTRY_BYTES, PrefixIndex
from headrace.gateway.view import Ask, FleetView, Knobs, WorkerView
from headrace.sim.workload import Request

IN_ORDER = "@order"
INDEX_BYTES = 2**40 // ENTRY_BYTES * ENTRY_BYTES  # the workers' caches bound it, not this


class Router:
    """One gateway process over `workers` workers with caches of `cache_blocks` blocks each.

    policy: a name in `POLICIES`, with `@order` behind it if the first of equal workers is to get a
    request, as in routers that take the least of a list, and not the one chosen longest ago.
    """

    def __init__(
        self,
        policy: str,
        *,
        workers: int,
        cache_blocks: int,
        block_tokens: int,
        knobs: Knobs,
        seed: int,
    ) -> None:
        self._policy, self._knobs = POLICIES[policy.removesuffix(IN_ORDER)], knobs
        self._in_order = policy.endswith(IN_ORDER)
        self._block_tokens = block_tokens
        self._names = tuple(f"worker-{i}" for i in range(workers))
        self._loads = [Load() for _ in range(workers)]
        self._index = PrefixIndex(INDEX_BYTES)
        for name in self._names:
            self._index.add_worker(name, cache_blocks)
        self._random = random.Random(seed)
        self._placed = 0

    def place(self, request: Request, kv_usages: Sequence[float]) -> tuple[int, Lease]:
        """Choose a worker and take a lease on it. kv_usages: of each worker, as it said last."""
        held = self._index.match(request.chain, self._names)
        cached = tuple(min(n * self._block_tokens, request.prompt_tokens) for n in held)
        ask = Ask(
            prompt_tokens=request.prompt_tokens,
            cached_tokens=cached,
            draw=self._random.random(),
            prefix_key=b"%d" % request.chain[0] if request.chain else b"",
            session=request.session,
        )
        choice = self._policy(self._view(request.arrival_s, kv_usages), ask, self._knobs)
        load = self._loads[choice.index]
        self._placed += 1
        if choice.cold:
            load.last_cold = self._placed
        uncached = request.prompt_tokens - cached[choice.index]
        lease = Lease(load, request.prompt_tokens, uncached, self._placed, request.arrival_s)
        self._index.insert(request.chain, self._names[choice.index])
        return choice.index, lease

    def _view(self, now_s: float, kv_usages: Sequence[float]) -> FleetView:
        return FleetView(
            tuple(
                WorkerView(
                    name=name,
                    requests=len(load.leases),
                    waiting=load.waiting,
                    pending_tokens=load.left_tokens(now_s),
                    decode_tokens=load.decode_tokens,
                    kv_usage=usage,
                    last_placed=i if self._in_order else load.last_placed,
                    last_cold=i if self._in_order else load.last_cold,
                    prefill_tokens_per_s=load.prefill_tokens_per_s,
                )
                for i, (name, load, usage) in enumerate(
                    zip(self._names, self._loads, kv_usages, strict=True)
                )
            )
        )
