"""The two ways to load a server, over any function that sends one request. No sockets here.

Closed loop: so many sessions are open at any time until all are used up. A slow server is asked
more slowly, so this measures the latency/throughput curve, not queueing under overload.
Open loop: sessions come at their own times, whatever the server does. This shows queueing.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import msgspec

from headrace.bench.stats import Record
from headrace.bench.workload import Ask, Said, Session, Workload


class Send(Protocol):
    """Sends one request and fills `record`; returns the answer's text. Never raises for what the
    server does: see `Record.error`."""

    async def __call__(self, record: Record, body: bytes, ask: Ask, keep_text: bool) -> str: ...


class Driver:
    """One level under way.

    `records` grow in the order of their starts; one whose `end_s` is 0 is still open. `unsent`
    counts requests of sessions that broke at an earlier request.
    """

    def __init__(
        self,
        send: Send,
        workload: Workload,
        model: str,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._send, self._workload, self._model = send, workload, model
        self._clock = clock
        self.records: list[Record] = []
        self.unsent = 0
        self.stopped = asyncio.Event()  # set it to send nothing more; what is open goes on

    async def closed(
        self, sessions: Iterator[Session], concurrency: int, until_s: float | None = None
    ) -> None:
        """All sessions, or those begun before `until_s`, `concurrency` at a time."""

        async def client() -> None:
            for session in sessions:  # one iterator, shared: each goes to the first that is free
                if self.stopped.is_set() or (until_s is not None and self._clock() >= until_s):
                    return
                await self._run(session, None)

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(client())

    async def open(
        self, arrivals: Iterable[tuple[float, Session]], start_s: float, most_open: int = 0
    ) -> None:
        """Each session at its time after `start_s`; above `most_open` (0: no limit) it waits."""
        seats = asyncio.Semaphore(most_open) if most_open else None

        async def arrive(session: Session, planned_s: float) -> None:
            if seats is None:
                await self._run(session, planned_s)
                return
            async with seats:
                await self._run(session, planned_s)

        async with asyncio.TaskGroup() as group:
            for after_s, session in arrivals:
                planned_s = start_s + after_s
                # A timer may fire a little early: look again.
                while not self.stopped.is_set() and (wait_s := planned_s - self._clock()) > 0:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(wait_s):
                            await self.stopped.wait()
                if self.stopped.is_set():
                    return
                group.create_task(arrive(session, planned_s))

    async def _run(self, session: Session, planned_s: float | None) -> None:
        said: list[Said] = []
        left = sum(len(turn.asks) for turn in session.turns)
        for number, turn in enumerate(session.turns):
            if turn.think_s:
                await asyncio.sleep(turn.think_s)
            left -= len(turn.asks)
            records = [
                Record(planned_s=None if number else planned_s, session=session.index, turn=number)
                for _ in turn.asks
            ]
            answers = await asyncio.gather(
                *(
                    self._ask(record, ask, said, keep_text=left > 0)
                    for record, ask in zip(records, turn.asks, strict=True)
                )
            )
            if any(record.error for record in records):
                self.unsent += left
                return
            said += [Said(ask.prompt, text) for ask, text in zip(turn.asks, answers, strict=True)]

    async def _ask(self, record: Record, ask: Ask, said: list[Said], keep_text: bool) -> str:
        body = msgspec.json.encode(self._workload.body(self._model, ask, said))
        record.sent_s = self._clock()
        self.records.append(record)
        text = await self._send(record, body, ask, keep_text)
        record.end_s = self._clock()
        return text
