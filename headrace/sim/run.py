"""One run: a workload through a router to workers, from event to event."""

from __future__ import annotations

import heapq
import time

import msgspec

from headrace.bench.stats import Summary, summarise
from headrace.errors import ConfigError
from headrace.gateway.load import Lease
from headrace.gateway.view import Knobs
from headrace.sim.device import Device
from headrace.sim.router import Router
from headrace.sim.worker import Job, Worker
from headrace.sim.workload import Workload


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """Workers of one kind, and routers over them."""

    device: Device
    workers: int = 8
    kv_blocks: int = 0  # of one worker, in the workload's blocks; 0 = as the device has
    routers: int = 1  # each sees what it routed itself; requests go to them in turn

    def blocks(self, workload: Workload) -> int:
        """KV blocks of one worker."""
        return self.kv_blocks or self.device.kv_tokens // workload.block_tokens

    def under_pressure(self, workload: Workload, pressure: float) -> Fleet:
        """The same fleet with a cache so large that the working set is `pressure` times it, but
        at least what the largest request needs.
        """
        blocks = round(workload.working_set_blocks() / pressure / self.workers)
        return msgspec.structs.replace(self, kv_blocks=max(blocks, workload.largest_blocks() + 1))


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What one run came to. Seconds are of the virtual clock, but for cpu_s."""

    policy: str
    ttft_s: Summary
    e2e_s: Summary
    tpot_s: Summary | None  # None: no answer had two tokens
    hit_share: float  # of all prompt tokens: found in the worker's cache
    predicted_share: float  # of all prompt tokens: the router thought so
    ideal_share: float  # of all prompt tokens: one endless cache
    imbalance: float  # computed prompt tokens: most of a worker over the mean
    preemptions: int
    makespan_s: float
    cpu_s: float

    @property
    def of_ideal(self) -> float:
        """Hits as a share of what one endless cache would have hit."""
        return self.hit_share / self.ideal_share if self.ideal_share else 1.0


def simulate(
    workload: Workload, fleet: Fleet, policy: str, *, knobs: Knobs | None = None, seed: int = 0
) -> Outcome:
    """Run `workload` to its end. The same arguments give the same outcome, but for cpu_s.

    Raises ConfigError when a worker's cache cannot hold the largest request.
    """
    began_s = time.process_time()
    blocks, size = fleet.blocks(workload), workload.block_tokens
    if blocks < workload.largest_blocks():
        raise ConfigError(
            f"a worker's cache has {blocks} blocks of {size} tokens, the largest request needs "
            f"{workload.largest_blocks()}",
            param="kv_blocks",
        )
    workers = [Worker(fleet.device, blocks, size) for _ in range(fleet.workers)]
    routers = [
        Router(
            policy,
            workers=fleet.workers,
            cache_blocks=blocks,
            block_tokens=size,
            knobs=knobs or Knobs(),
            seed=seed + i,
        )
        for i in range(fleet.routers)
    ]
    jobs, leases = _play(workload, workers, routers)
    prompt_tokens = workload.prompt_tokens
    computed = [worker.computed_tokens for worker in workers]
    return Outcome(
        policy=policy,
        ttft_s=_summary([job.first_s - job.request.arrival_s for job in jobs]),
        e2e_s=_summary([job.done_s - job.request.arrival_s for job in jobs]),
        tpot_s=summarise(
            (job.done_s - job.first_s) / (job.request.output_tokens - 1)
            for job in jobs
            if job.request.output_tokens > 1
        ),
        hit_share=sum(job.cached_tokens for job in jobs) / prompt_tokens,
        predicted_share=1 - sum(lease.uncached_tokens for lease in leases) / prompt_tokens,
        ideal_share=workload.ideal_tokens() / prompt_tokens,
        imbalance=max(computed) * len(computed) / sum(computed),
        preemptions=sum(worker.preemptions for worker in workers),
        makespan_s=max(job.done_s for job in jobs),
        cpu_s=time.process_time() - began_s,
    )


def _summary(values: list[float]) -> Summary:
    summary = summarise(values)
    assert summary is not None, "a workload has a request"
    return summary


def _play(
    workload: Workload, workers: list[Worker], routers: list[Router]
) -> tuple[list[Job], list[Lease]]:
    """Arrivals in order; between them the worker whose steps end first."""
    jobs = [Job(i, request) for i, request in enumerate(workload.requests)]
    leases: list[Lease] = []
    ends: list[tuple[float, int]] = []  # a heap; an entry that its worker no longer means is stale
    at = 0
    while at < len(jobs) or ends:
        if at < len(jobs) and (not ends or jobs[at].request.arrival_s <= ends[0][0]):
            job = jobs[at]
            router = routers[at % len(routers)]
            usages = [worker.kv.used_blocks / worker.kv.size for worker in workers]
            chosen, lease = router.place(job.request, usages)
            leases.append(lease)
            at += 1
            worker = workers[chosen]
            before_s = worker.ends_s
            worker.add(job, job.request.arrival_s)
            if worker.ends_s != before_s and worker.ends_s is not None:
                heapq.heappush(ends, (worker.ends_s, chosen))
            continue
        now_s, index = heapq.heappop(ends)
        worker = workers[index]
        if worker.ends_s != now_s:
            continue
        firsts, done = worker.advance()
        for job in firsts:
            leases[job.index].begin(now_s)
        for job in done:
            leases[job.index].end()
        if worker.ends_s is not None:
            heapq.heappush(ends, (worker.ends_s, index))
    return jobs, leases
