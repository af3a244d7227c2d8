"""A modelled worker: continuous batching over the engine's own KV cache, in virtual time.

It holds what an engine holds, block by block (`headrace.kv`), asks the engine's own budget how many
prompt tokens a step takes, and lets `StepCost` say how long the step is. Steps in which nothing but
decoding happens are taken together: their time is a sum in closed form. So a run costs what its
prompts and its arrivals cost, not its tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque

from headrace.engine.budget import budget_for
from headrace.kv.cache import KVCache, Table
from headrace.sim.device import Device
from headrace.sim.workload import Request

HEADROOM_BLOCKS_SHARE = 4  # at most one part in this many stays free for those that run


class Job:
    """A request at a worker. `computed` counts tokens whose KV it holds."""

    __slots__ = (
        "cached_tokens",
        "computed",
        "done_s",
        "first_s",
        "generated",
        "index",
        "preempted",
        "request",
        "table",
    )

    def __init__(self, index: int, request: Request) -> None:
        """index: of the request in its workload."""
        self.index, self.request = index, request
        self.table = Table(b"")
        self.table.digests = [block.to_bytes(8, "little") for block in request.chain]
        self.computed = self.generated = self.preempted = 0
        self.cached_tokens = 0  # at its first admission
        self.first_s = self.done_s = -1.0

    @property
    def target(self) -> int:
        """Tokens that are to be computed before it can draw its next one."""
        return self.request.prompt_tokens + self.generated

    @property
    def decodes(self) -> bool:
        """One token away from its next draw, and past its first one."""
        return self.generated > 0 and self.computed == self.target - 1


class Worker:
    """Call `add` when a request arrives and `advance` when `ends_s` has come."""

    def __init__(self, device: Device, blocks: int, block_tokens: int) -> None:
        self.device = device
        self.kv = KVCache(blocks, block_tokens)
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []  # in order of admission
        self.ends_s: float | None = None  # of the steps under way; None = idle
        self.computed_tokens = 0  # of prompts, also those computed again
        self.preemptions = 0
        self.busy_s = 0.0
        self._budget = budget_for(device.cost, device.max_step_tokens, device.target_s)
        self._began_s = 0.0
        self._steps = 0  # under way
        self._rows: list[Job] = []  # that decode in them
        self._chunks: list[tuple[Job, int]] = []  # prompt tokens in them; then it is one step

    def add(self, job: Job, now_s: float) -> None:
        """A request arrives. Steps under way are cut short behind the one that runs now."""
        self.waiting.append(job)
        if self.ends_s is None:
            self._plan(now_s)
        elif self._steps > 1:
            elapsed = now_s - self._began_s
            self._steps = 1 + bisect_left(range(1, self._steps), elapsed, key=self._decoding_s)
            self.ends_s = self._began_s + self._decoding_s(self._steps)

    def advance(self) -> tuple[list[Job], list[Job]]:
        """The steps under way end. Returns (jobs with a first token, jobs that are done)."""
        now_s = self.ends_s
        assert now_s is not None, "nothing is under way"
        self.busy_s += now_s - self._began_s
        firsts: list[Job] = []
        for job, count in self._chunks:
            job.computed += count
            self.computed_tokens += count
            prompt = min(job.computed, job.request.prompt_tokens)
            self.kv.commit(job.table, range(prompt), prompt)
            if job.computed == job.target:
                if job.first_s < 0:
                    job.first_s = now_s
                    firsts.append(job)
                job.generated += 1
        for job in self._rows:
            job.computed += self._steps
            job.generated += self._steps
        done = [job for job in self.running if job.generated == job.request.output_tokens]
        if done:
            self.running = [j for j in self.running if j.generated < j.request.output_tokens]
        for job in done:
            job.done_s = now_s
            self.kv.release(job.table, self.kv.finished_step)
        self._plan(now_s)
        return firsts, done

    # ------------------------------------------------------------ the next steps

    def _plan(self, now_s: float) -> None:
        self._began_s = now_s
        self._rows = self._grow()
        self._chunks = self._prompts()
        if not self._rows and not self._chunks:
            assert not self.running, "jobs, and nothing to do"
            assert not self.waiting, "all memory is free, and the next request is not let in"
            self.ends_s = None
            return
        if self._chunks:
            self._steps = 1
            tokens = len(self._rows) + sum(count for _, count in self._chunks)
            pairs = sum(c * (job.computed + c / 2) for job, c in self._chunks)
            step_s = self.device.cost.seconds(tokens, pairs, self._reads())
        else:
            self._steps = self._room_for()
            step_s = self._decoding_s(self._steps)
        self.ends_s = now_s + step_s

    def _reads(self) -> int:
        return sum(job.computed + 1 for job in self._rows)

    def _decoding_s(self, steps: int) -> float:
        """Time of that many steps of `_rows` alone. Step i reads reads + i * rows tokens."""
        rows, cost = len(self._rows), self.device.cost
        reads = steps * self._reads() + rows * steps * (steps - 1) // 2
        return steps * cost.seconds(rows, 0.0, 0) + cost.read_s * reads

    def _grow(self) -> list[Job]:
        """Room for one more token of each that decodes; the newest give way where there is none."""
        rows: list[Job] = []
        for job in list(self.running):
            if not job.decodes:
                continue
            while job in self.running:
                if self.kv.reserve(job.table, job.computed + 1, job.computed) is not None:
                    rows.append(job)
                    break
                self._preempt(self.running[-1])
        return [job for job in rows if job in self.running]

    def _preempt(self, job: Job) -> None:
        self.preemptions += 1
        job.preempted += 1
        job.computed = 0
        self.kv.release(job.table, self.kv.finished_step)
        self.running.remove(job)
        self.waiting.appendleft(job)

    def _room_for(self) -> int:
        """Steps until the first of `_rows` is done, or as many as memory allows; at least one."""
        most = min(job.request.output_tokens - job.generated for job in self._rows)

        def lacks(steps: int) -> bool:
            need = sum(
                max(0, self.kv.blocks_for(job.computed + steps) - len(job.table.blocks))
                for job in self._rows
            )
            return need > self.kv.free_blocks

        steps = 1 + bisect_left(range(2, most + 1), True, key=lacks)
        for job in self._rows:
            granted = self.kv.reserve(job.table, job.computed + steps, job.computed)
            assert granted is not None, "counted before"
        return steps

    def _prompts(self) -> list[tuple[Job, int]]:
        """Chunks of the next step: those under way first, then those that wait, in turn."""
        budget = self._budget
        inside = [job for job in self.running if not job.decodes]
        prompts = [*inside, *self.waiting]
        if not prompts:
            return []
        positions = [job.computed for job in self._rows]
        left = sum(job.target - job.computed for job in prompts)
        budget.begin(positions, stalled=False, prompts=len(prompts), tokens=left)
        chunks: list[tuple[Job, int]] = []
        for job in inside:
            if not budget.open:
                return chunks
            count = budget.grant(job.computed, job.target - job.computed)
            if count:
                chunks.append((job, count))
        while self.waiting and budget.open and len(self.running) < self.device.max_seqs:
            job = self.waiting[0]
            if not self._admit(job):
                break
            self.waiting.popleft()
            self.running.append(job)
            count = budget.grant(job.computed, job.target - job.computed)
            if count:
                chunks.append((job, count))
        return chunks

    def _admit(self, job: Job) -> bool:
        """Take memory for all its prompt, beside headroom for those that run; or nothing."""
        usable = range(min(job.target - 1, job.request.prompt_tokens))
        usable = range(len(usable) // self.kv.block_size * self.kv.block_size)
        need = self.kv.probe(job.table, usable, job.target)
        headroom = min(len(self.running), self.kv.size // HEADROOM_BLOCKS_SHARE)
        if need + headroom > self.kv.free_blocks:
            return False
        job.computed = self.kv.match(job.table, usable)
        if not job.preempted:
            job.cached_tokens = job.computed
        granted = self.kv.reserve(job.table, job.target, job.computed)
        assert granted is not None, "probed before"
        return True
