"""A level's load from several processes: `python -m headrace.bench.workers` is one of them.

A worker reads its job (a line of JSON), says that it is ready, reads the start on the machine's
monotonic clock, which all processes share, and answers lines: progress, and at last its outcome.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable

import msgspec

from headrace.bench.job import Job, Outcome, Progress, run_job
from headrace.bench.load import run_loop
from headrace.errors import EngineError

LONGEST_LINE_BYTES = 1 << 30  # an outcome is one line
AHEAD_S = 0.05  # from the last worker's readiness to the start


class Word(msgspec.Struct):
    """One line of a worker: one of the two."""

    progress: Progress | None = None
    outcome: Outcome | None = None


async def run_workers(job: Job, workers: int, on_progress: Callable[[Progress], None]) -> Outcome:
    """All shares at once, their outcomes joined. `cores` is that of the busiest.

    Raises EngineError when a worker ends without an outcome.
    """
    latest = [Progress(0, 0, 0, 0)] * workers
    processes: list[asyncio.subprocess.Process] = []
    try:
        for index in range(workers):
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                __name__,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=LONGEST_LINE_BYTES,
            )
            processes.append(process)
            share = msgspec.structs.replace(job, index=index, of=workers)
            await _tell(process, msgspec.json.encode(share))
        for process in processes:
            await _line(process)
        start = str(time.monotonic() + AHEAD_S).encode()
        for process in processes:
            await _tell(process, start)

        async def follow(index: int, process: asyncio.subprocess.Process) -> Outcome:
            while True:
                word = msgspec.json.decode(await _line(process), type=Word)
                if word.outcome is not None:
                    return word.outcome
                if word.progress is not None:
                    latest[index] = word.progress
                    total = Progress(0, 0, 0, 0)
                    for each in latest:
                        total = total.plus(each)
                    on_progress(total)

        outcomes = await asyncio.gather(*(follow(i, p) for i, p in enumerate(processes)))
    finally:
        for process in processes:
            if process.returncode is None and process.stdin is not None:
                process.stdin.close()  # it ends by itself at the end of its input
            await process.wait()
    return Outcome(
        records=[record for outcome in outcomes for record in outcome.records],
        unsent=sum(outcome.unsent for outcome in outcomes),
        cores=max(outcome.cores for outcome in outcomes),
        loop_delays_s=[delay for outcome in outcomes for delay in outcome.loop_delays_s],
    )


async def _tell(process: asyncio.subprocess.Process, line: bytes) -> None:
    assert process.stdin is not None, "made with a pipe"
    process.stdin.write(line + b"\n")
    await process.stdin.drain()


async def _line(process: asyncio.subprocess.Process) -> bytes:
    assert process.stdout is not None, "made with a pipe"
    line = await process.stdout.readline()
    if not line:
        raise EngineError("a worker of the load generator ended early; its error is above")
    return line


def _say(word: Word) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(word) + b"\n")
    sys.stdout.buffer.flush()


async def work() -> None:
    """One worker, from its job to its outcome. Ends early when its input ends."""
    reader = asyncio.StreamReader(limit=LONGEST_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    job = msgspec.json.decode(await reader.readline(), type=Job)
    sys.stdout.buffer.write(b"ready\n")
    sys.stdout.buffer.flush()
    start_s = float(await reader.readline())

    async def load() -> None:
        outcome = await run_job(job, start_s, lambda progress: _say(Word(progress=progress)))
        _say(Word(outcome=outcome))

    loading = asyncio.create_task(load())
    gone = asyncio.create_task(reader.read())
    await asyncio.wait({loading, gone}, return_when=asyncio.FIRST_COMPLETED)
    if loading.done():
        await loading


if __name__ == "__main__":
    run_loop(work())
