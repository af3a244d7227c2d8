"""Metering: one record for every request that reached the engine, however it ended.

A `Bill` gathers what the engine says of each of a request's prompts (`messages.Done`) and what the
edge knows: who asked, for what, and what was sent. It is closed before the client can see the end
of the answer: the record is in the usage log by then. Of a request that was cut short it is written
when the engine has said its last word, since an abort is no reason to forget what was computed.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from headrace.api.errors import CLIENT_GONE, as_ours
from headrace.errors import HeadraceError, RequestFailed, SetupError, UsageLogFailed
from headrace.messages import Done, Grammar, Sampling
from headrace.observe.usage_log import UsageLog
from headrace.observe.usage_metrics import UsageMetrics
from headrace.prices import Prices

log = logging.getLogger("headrace.usage")

MOST_UNWRITTEN = 10_000  # records kept in memory while the log cannot be written
COST_DIGITS = 12
_ALWAYS = ("temperature", "top_p", "top_k")  # parameters named even where they are the default
_encode = msgspec.json.Encoder().encode
# Of `Sampling`: field, default.
_DRAWN = tuple(msgspec.structs.asdict(Sampling()).items())


class UsageRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the usage log; docs/metering.md says what each field means."""

    time: str
    request_id: str
    endpoint: str
    model: str
    key: str
    user: str
    status: int
    error: str
    finish: list[str | None]
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    reasoning_tokens: int
    queue_s: float
    prefill_s: float
    decode_s: float
    ttft_s: float | None
    tpot_s: float | None
    total_s: float
    compute_s: float
    recompute_s: float
    preemptions: int
    complete: bool
    parameters: dict[str, Any]
    cost: float | None
    currency: str | None
    trace_id: str = ""


class Caller(Protocol):
    """Who asked, and when: what `api.exchange.Exchange` knows."""

    @property
    def request_id(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def key(self) -> str: ...
    @property
    def arrived_s(self) -> float: ...
    @property
    def trace_id(self) -> str: ...


class Job(Protocol):
    """What was asked of the engine: `engine.client.Job`."""

    @property
    def max_tokens(self) -> int: ...
    @property
    def n(self) -> int: ...
    @property
    def sampling(self) -> Sampling: ...
    @property
    def priority(self) -> int: ...
    @property
    def grammar(self) -> Grammar | None: ...
    @property
    def pooling(self) -> str | None: ...


class Counted(Protocol):
    """The counts of an answer so far: `api.answer.Answer`, or who embeds."""

    @property
    def output_tokens(self) -> int: ...
    @property
    def reasoning_tokens(self) -> int: ...
    @property
    def finishes(self) -> list[str | None]: ...


class Counts(NamedTuple):
    """Of an answer that is no text."""

    output_tokens: int
    reasoning_tokens: int
    finishes: list[str | None]


NO_OUTPUT = Counts(0, 0, [])


class Meter:
    """What one HTTP process meters with: prices, the log, the totals. Raises SetupError."""

    def __init__(
        self, model: str, prices: Prices, metrics: UsageMetrics, path: str, fsync_s: float
    ) -> None:
        self.model, self.prices, self.metrics = model, prices, metrics
        self._waits = fsync_s == 0
        self._unwritten: deque[bytes] = deque()
        try:
            self._log = UsageLog(Path(path), fsync_s) if path else None
        except OSError as error:
            raise SetupError(f"usage_log = {path}: {error.strerror}") from None

    def open(self, caller: Caller, user: str, jobs: list[Any], input_tokens: int) -> Bill:
        """A request is about to be submitted. Raises UsageLogFailed while records cannot be
        written: nothing is served that could not be accounted for."""
        if not self.admits():
            raise UsageLogFailed("the usage log cannot be written")
        return Bill(self, caller, user, jobs, input_tokens)

    def admits(self) -> bool:
        """Whether records can be written; what waits for that is tried again."""
        if self._log is not None and self._waits and self._log.broken:
            return False
        return not self._unwritten or bool(self.flush())

    def write(
        self,
        record: UsageRecord,
        otherwise: Callable[[UsageLogFailed], UsageRecord] | None = None,
    ) -> int:
        """Count a record and append it; returns its number in the log, 0 if none is kept.

        Raises UsageLogFailed; what is kept, and written later, is then the record that `otherwise`
        makes of it.
        """
        number = 0
        if self._log is not None:
            self._unwritten.append(_encode(record))
            number = self.flush()
        failed = None
        if self._log is not None and not number:
            failed = UsageLogFailed("the usage log cannot be written")
            if otherwise is not None:
                record = otherwise(failed)
                self._unwritten[-1] = _encode(record)
        self._count(record)
        if failed is not None:
            raise failed
        return number

    async def synced(self, number: int) -> None:
        """Wait for the disk, where that is asked for. Raises UsageLogFailed."""
        if self._log is None or not self._waits or not number:
            return
        try:
            await self._log.synced(number)
        except OSError as error:
            self.metrics.count_error()
            raise UsageLogFailed(f"the usage log cannot be written: {error}") from None

    def flush(self) -> int:
        """Write what could not be written before; the number of the last, 0 if some are left."""
        assert self._log is not None, "records without a log"
        number = 0
        while self._unwritten:
            try:
                number = self._log.append(self._unwritten[0])
            except OSError as error:
                self.metrics.count_error()
                log.error("a usage record cannot be written: %s", error)
                if len(self._unwritten) > MOST_UNWRITTEN:
                    log.critical("usage record lost: %s", self._unwritten.popleft().decode())
                return 0
            self._unwritten.popleft()
        return number

    def close(self) -> None:
        """The last fsync."""
        if self._log is not None:
            self.flush()
            self._log.close()

    def _count(self, record: UsageRecord) -> None:
        outcome = "failed" if record.error else "ok"
        tokens = {
            "input": record.input_tokens,
            "cached": record.cached_tokens,
            "output": record.output_tokens,
            "reasoning": record.reasoning_tokens,
        }
        self.metrics.count(
            "aborted" if record.status == CLIENT_GONE else outcome,
            tokens,
            record.compute_s,
            record.cost or 0.0,
            self.prices.currency,
        )


class Bill:
    """The account of one HTTP request, over all prompts that it sends to the engine."""

    def __init__(
        self, meter: Meter, caller: Caller, user: str, jobs: list[Job], input_tokens: int
    ) -> None:
        self._meter, self._caller, self._user, self._jobs = meter, caller, user, jobs
        self._input_tokens = input_tokens
        self._pending = 0  # prompts that the engine has not answered for
        self._submitted = False
        self._answer: Counted | None = None
        self._error: HeadraceError | None = None
        self._ended_s = 0.0  # 0: it runs
        self._number = 0
        self.cached_tokens = 0
        self.compute_s = self.recompute_s = 0.0
        self.preempted_s: list[float] = []  # time.monotonic()
        self._parameters: dict[str, Any] | None = None
        self.queue_s = self.prefill_s = 0.0
        self._first_s = self._last_s = 0.0  # time.monotonic() of tokens
        self._drawn = 0  # tokens that came between these; a client that left may not have got all
        self._complete = True

    # ------------------------------------------------------------ from the engine's client

    def submitted(self, prompts: int) -> None:
        """So many prompts were sent."""
        self._submitted = True
        self._pending += prompts

    def told(self, done: Done, first_s: float, last_s: float) -> None:
        """The engine's last word on one of them; when its stream's tokens came, 0 = none did."""
        self._pending -= 1
        self._complete &= done.prompt_tokens > 0 or bool(done.error)
        self.cached_tokens += done.cached_tokens
        self.preempted_s += done.preempted_s
        self._drawn += done.output_tokens
        self.compute_s += done.compute_s
        self.recompute_s += done.recompute_s
        self.queue_s = max(self.queue_s, done.queue_s)
        self.prefill_s = max(self.prefill_s, done.prefill_s)
        self._first_s = min(filter(None, (self._first_s, first_s)), default=0.0)
        self._last_s = max(self._last_s, last_s)
        if self._ended_s and not self._pending:
            self._write_late()

    def lost(self) -> None:
        """The engine, or the way to it, is gone: nothing more will be told."""
        self._complete = False
        self._pending = 0
        if self._ended_s:
            self._write_late()

    # ------------------------------------------------------------ from who answers

    @contextmanager
    def covering(self, answer: Counted) -> Iterator[None]:
        """What fails inside ends the bill."""
        try:
            yield
        except BaseException as error:
            cut = RequestFailed("the answer was cut short")  # the process ends
            self.end(answer, as_ours(error) if isinstance(error, Exception) else cut)
            raise

    async def close(self, answer: Counted) -> None:
        """The answer is whole: write it down before its end is sent. Raises UsageLogFailed."""
        self.end(answer, None)
        await self._meter.synced(self._number)

    def end(self, answer: Counted, error: HeadraceError | None) -> None:
        """The answer has ended, by `error` if any; the first call counts. Raises UsageLogFailed
        where it is written at once and cannot be."""
        if self._ended_s or not self._submitted:
            return
        self._ended_s = time.monotonic()
        self._answer, self._error = answer, error
        if self._pending:
            return  # `told` writes it
        if error is None:
            self._number = self._meter.write(self._record(), self._failed)
        else:
            self._write_late()

    def shown(self, answer: Counted) -> dict[str, Any]:
        """For clients that may see it; see the setting `usage_details`."""
        cost = self._cost(answer)
        shown: dict[str, Any] = {"compute_s": self.compute_s}
        if cost is not None:
            shown |= {"cost": cost, "currency": self._meter.prices.currency}
        return shown

    @property
    def parameters(self) -> dict[str, Any]:
        """See `parameters_of`; made once."""
        if self._parameters is None:
            self._parameters = parameters_of(self._jobs[0])
        return self._parameters

    def charged(self) -> tuple[float, str] | None:
        """Cost and currency, once it has ended; None without a price sheet."""
        cost = None if self._answer is None else self._cost(self._answer)
        return None if cost is None else (cost, self._meter.prices.currency)

    # ------------------------------------------------------------ the record

    def _write_late(self) -> None:
        """Nobody waits for it; what cannot be written is tried again with the next record."""
        try:
            self._meter.write(self._record())
        except UsageLogFailed as error:
            log.error("%s: %s", self._caller.request_id, error.message)

    def _failed(self, error: UsageLogFailed) -> UsageRecord:
        """The record of an answer that ends with `error`, for its record could not be written."""
        self._error = error
        return self._record()

    def _cost(self, answer: Counted) -> float | None:
        """Failures cost nothing; what a client gave up costs what was done until then."""
        failed = self._error is not None and self._error.status != CLIENT_GONE
        output_tokens = answer.output_tokens
        ran = self.compute_s > 0 or output_tokens > 0
        if failed or not ran:
            return self._meter.prices.cost(0, 0, 0, 0.0)
        cost = self._meter.prices.cost(
            self._input_tokens, self.cached_tokens, output_tokens, self.compute_s
        )
        return cost if cost is None else round(cost, COST_DIGITS)

    def _record(self) -> UsageRecord:
        answer, error, caller = self._answer, self._error, self._caller
        assert answer is not None, "a record of what has not ended"
        arrived_s, first_s, last_s = caller.arrived_s, self._first_s, self._last_s
        output_tokens, decode_s = answer.output_tokens, max(0.0, last_s - first_s)
        choices = len(self._jobs) * self._jobs[0].n
        gaps = (self._drawn or output_tokens) / choices - 1  # of one choice; they run side by side
        cost = self._cost(answer)
        return UsageRecord(
            time=datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            request_id=caller.request_id,
            endpoint=caller.path,
            model=self._meter.model,
            key=caller.key,
            user=self._user,
            status=error.status if error is not None else 200,
            error=error.code if error is not None else "",
            finish=answer.finishes,
            input_tokens=self._input_tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=output_tokens,
            reasoning_tokens=answer.reasoning_tokens,
            queue_s=self.queue_s,
            prefill_s=self.prefill_s,
            decode_s=decode_s,
            ttft_s=first_s - arrived_s if first_s else None,
            tpot_s=decode_s / gaps if gaps > 0 else None,
            total_s=self._ended_s - arrived_s,
            compute_s=self.compute_s,
            recompute_s=self.recompute_s,
            preemptions=len(self.preempted_s),
            complete=self._complete,
            parameters=self.parameters,
            cost=cost,
            currency=None if cost is None else self._meter.prices.currency,
            trace_id=caller.trace_id,
        )


def parameters_of(job: Job) -> dict[str, Any]:
    """How it was drawn: no text, no ids. The seed is one that a request may bring."""
    if job.pooling is not None:
        return {"pooling": job.pooling, "priority": job.priority}
    out: dict[str, Any] = {"max_tokens": job.max_tokens, "n": job.n, "priority": job.priority}
    for (name, default), value in zip(_DRAWN, msgspec.structs.astuple(job.sampling), strict=True):
        if value == default and name not in _ALWAYS:
            continue
        if name == "rules":
            out["rules"] = value.size
        elif name == "seed":
            out["seed"] = value - 2**64 if value >= 2**63 else value
        elif isinstance(value, msgspec.Struct):
            out[name] = {
                key: len(part) if isinstance(part, list) else part
                for key, part in msgspec.structs.asdict(value).items()
            }
        else:
            out[name] = value
    if job.grammar is not None:
        out["grammar"] = job.grammar.kind
    return out
