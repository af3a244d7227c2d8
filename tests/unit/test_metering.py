"""Bills: what a record says, when it is written, and what happens where it cannot be."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Counter

from headrace.api.answer import Answer, Reply
from headrace.api.beams import StepAccount
from headrace.api.completions import CompletionChunks
from headrace.api.errors import ClientGone
from headrace.api.exchange import Exchange
from headrace.api.metering import NO_OUTPUT, Bill, Counts, Meter, parameters_of
from headrace.api.prepare import Prepared
from headrace.api.stream import EventStream
from headrace.draws import Draws
from headrace.engine.client import EngineClient, Job
from headrace.engine.token_stream import TokenStream
from headrace.errors import EngineDead, RequestFailed, SetupError, UsageLogFailed
from headrace.messages import Done, End, Grammar, Repetition, Rules, Sampling
from headrace.observe.metrics import ApiMetrics
from headrace.observe.usage_metrics import UsageMetrics
from headrace.prices import Prices
from tests.unit.test_answer_stream import SERVICE

PRICES = Prices(input=1.0, cached=0.25, output=4.0, device_hour=36.0, currency="EUR")
ANSWER = Counts(11, 3, ["stop"])
DONE = Done(1, prompt_tokens=100, cached_tokens=40, output_tokens=11, preempted_s=[3.0],
            queue_s=0.5, prefill_s=0.25, decode_s=1.0, compute_s=2.0, recompute_s=0.5)  # fmt: skip


class Asker(NamedTuple):
    """Who asked."""

    request_id: str = "req-1"
    path: str = "/v1/completions"
    key: str = "sha256:0123"
    arrived_s: float = 100.0
    trace_id: str = "0af7651916cd43dd8448eb211c80319c"


class Office:
    """A meter whose log and totals can be read."""

    def __init__(self, folder: Path, prices: Prices = PRICES, fsync_s: float = 1.0) -> None:
        self.path = folder / "usage.jsonl"
        self.registry = CollectorRegistry()
        metrics = UsageMetrics("m", self.registry)
        self.meter = Meter("m", prices, metrics, str(self.path), fsync_s)

    def bill(self, job: Job | None = None) -> Bill:
        return self.meter.open(Asker(), "ann", [job or Job([5] * 100, 20)], 100)

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def total(self, name: str, **labels: str) -> float:
        value = self.registry.get_sample_value(name, {"model_name": "m", **labels})
        return value or 0.0


@pytest.fixture
def office(tmp_path: Path) -> Any:
    made = Office(tmp_path)
    yield made
    made.meter.close()


def test_a_record_says_everything(office: Office) -> None:
    bill = office.bill()
    bill.submitted(1)
    bill.told(DONE, 100.75, 101.75)
    assert office.lines() == [], "written when the answer has ended"
    asyncio.run(bill.close(ANSWER))
    (record,) = office.lines()
    cost = (60 * 1.0 + 40 * 0.25 + 11 * 4.0) / 1e6 + 2.0 * 36 / 3600
    assert record.pop("cost") == pytest.approx(cost)
    assert record.pop("time").endswith("Z")
    assert record.pop("total_s") > 0
    assert record == {
        "trace_id": "0af7651916cd43dd8448eb211c80319c",
        "request_id": "req-1", "endpoint": "/v1/completions", "model": "m", "key": "sha256:0123",
        "user": "ann", "status": 200, "error": "", "finish": ["stop"], "input_tokens": 100,
        "cached_tokens": 40, "output_tokens": 11, "reasoning_tokens": 3, "queue_s": 0.5,
        "prefill_s": 0.25, "decode_s": 1.0, "ttft_s": 0.75, "tpot_s": 0.1, "compute_s": 2.0,
        "recompute_s": 0.5, "preemptions": 1, "complete": True, "currency": "EUR",
        "parameters": {"max_tokens": 20, "n": 1, "priority": 0, "temperature": 1.0, "top_k": 0,
                       "top_p": 1.0},
    }  # fmt: skip
    tokens = {kind: office.total("headrace_usage_tokens_total", kind=kind) for kind in
              ("input", "cached", "output", "reasoning")}  # fmt: skip
    assert tokens == {"input": 100, "cached": 40, "output": 11, "reasoning": 3}
    assert office.total("headrace_usage_compute_seconds_total") == 2.0
    assert office.total("headrace_usage_cost_total", currency="EUR") == pytest.approx(cost)
    assert office.total("headrace_usage_requests_total", outcome="ok") == 1


async def test_the_record_is_written_before_the_end_of_a_stream_leaves(office: Office) -> None:
    lines_then: list[int] = []

    async def send(message: Any) -> None:
        if b"[DONE]" in message.get("body", b""):
            lines_then.append(len(office.lines()))

    async def receive() -> Any:
        await asyncio.Event().wait()

    jobs = [Job([5] * 100, 20)]
    bill, metrics = office.bill(jobs[0]), ApiMetrics("m", CollectorRegistry())
    stream = TokenStream(cast(EngineClient, SimpleNamespace(send_abort=lambda _: None)), 1, 100.0)
    stream.account = bill
    stream.opened(1)
    bill.submitted(1)
    answer = Answer(SERVICE, Prepared(jobs, 1, [], True, False, []), stream)
    chunks = CompletionChunks(Reply("cmpl-1", 1, "m", "fp", False, False), 1)
    response = EventStream(answer, chunks, Exchange("req-1", send), metrics, {}, bill)
    for token in b"hello":
        stream.push(0, token)
    stream.push_end(0, End(1, 0, "length"))
    stream.push_done(DONE)
    await response({}, receive, send)
    assert lines_then == [1]
    assert office.lines()[0]["output_tokens"] == 5


def test_a_request_is_counted_when_all_that_it_used_is(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may read between any two writes, in the order in which series were made."""
    seen: list[tuple[float, float]] = []
    write = Counter.inc

    def look(counter: Counter, by: float = 1.0) -> None:
        requests = office.total("headrace_usage_requests_total", outcome="ok")
        seen.append((requests, office.total("headrace_usage_cost_total", currency="EUR")))
        write(counter, by)

    monkeypatch.setattr(Counter, "inc", look)
    bill = office.bill()
    bill.submitted(1)
    bill.told(DONE, 100.75, 101.75)
    asyncio.run(bill.close(ANSWER))
    cost = office.lines()[0]["cost"]
    assert len(seen) == 7  # four kinds of tokens, time, cost, the request
    assert set(seen) == {(0.0, 0.0), (0.0, cost)}
    assert next(iter(office.meter.metrics._series.values()))._value.get() == 1.0, "made first"


def test_prompts_of_one_request_add_up(office: Office) -> None:
    bill = office.bill()
    bill.submitted(2)
    bill.told(DONE, 0.0, 0.0)
    bill.told(DONE, 100.5, 102.0)
    asyncio.run(bill.close(ANSWER))
    (record,) = office.lines()
    assert (record["cached_tokens"], record["compute_s"], record["preemptions"]) == (80, 4.0, 2)
    assert (record["queue_s"], record["ttft_s"]) == (0.5, 0.5), "they ran side by side"


def test_an_abort_is_written_when_the_engine_has_said_its_last_word(office: Office) -> None:
    bill = office.bill()
    bill.submitted(1)
    bill.end(Counts(4, 0, [None]), ClientGone("gone"))
    assert office.lines() == []
    bill.told(DONE, 100.5, 101.0)
    (record,) = office.lines()
    assert (record["status"], record["output_tokens"], record["compute_s"]) == (499, 4, 2.0)
    assert record["cost"] > 0, "what was done until then"
    assert office.total("headrace_usage_requests_total", outcome="aborted") == 1


def test_time_per_token_is_over_the_tokens_that_took_it(office: Office) -> None:
    """The client left after 3 of 11 tokens were sent; all 11 came in the 2 s."""
    bill = office.bill()
    bill.submitted(1)
    bill.end(Counts(3, 0, [None]), ClientGone("gone"))
    bill.told(DONE, 100.5, 102.5)
    (record,) = office.lines()
    assert (record["output_tokens"], record["decode_s"], record["tpot_s"]) == (3, 2.0, 0.2)


def test_what_a_search_finds_of_its_own_is_not_cached_input(office: Office) -> None:
    bill = office.bill()
    for first in (True, False, False, False):
        step = StepAccount(bill, first=first)
        step.submitted(1)
        step.told(DONE, 100.5, 102.5)
    asyncio.run(bill.close(ANSWER))
    (record,) = office.lines()
    assert (record["cached_tokens"], record["compute_s"]) == (40, 8.0)
    assert record["tpot_s"] == 0.2  # 2 s for the 11 tokens of the answer


def test_a_failure_costs_nothing_and_is_written_all_the_same(office: Office) -> None:
    bill = office.bill()
    bill.submitted(1)
    bill.told(Done(1, "request_failed", "NaN", 100, compute_s=1.0), 100.5, 101.0)
    with pytest.raises(RequestFailed), bill.covering(ANSWER):
        raise RequestFailed("NaN")
    (record,) = office.lines()
    assert (record["error"], record["cost"], record["compute_s"]) == ("request_failed", 0.0, 1.0)


def test_a_dead_engine_leaves_a_record_that_says_so(office: Office) -> None:
    bill = office.bill()
    bill.submitted(2)
    bill.told(DONE, 100.5, 101.0)
    bill.lost()
    bill.end(ANSWER, EngineDead("dead"))
    (record,) = office.lines()
    assert (record["complete"], record["compute_s"], record["status"]) == (False, 2.0, 503)


def test_each_bill_is_written_once(office: Office) -> None:
    bill = office.bill()
    bill.submitted(1)
    bill.told(DONE, 100.5, 101.0)
    asyncio.run(bill.close(ANSWER))
    bill.end(ANSWER, RequestFailed("later"))
    assert len(office.lines()) == 1


def test_what_never_reached_the_engine_is_no_request(office: Office) -> None:
    bill = office.bill()
    with pytest.raises(EngineDead), bill.covering(NO_OUTPUT):
        raise EngineDead("takes no requests")
    assert office.lines() == []


def test_a_log_that_cannot_be_written_ends_answers_and_admits_none(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    bill, write = office.bill(), os.write
    bill.submitted(1)
    bill.told(DONE, 100.5, 101.0)

    def full(_descriptor: int, _data: bytes) -> int:
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(UsageLogFailed):
        asyncio.run(bill.close(ANSWER))
    with pytest.raises(UsageLogFailed):
        office.bill()
    assert office.total("headrace_usage_log_errors_total") == 2
    assert not office.meter.admits()
    monkeypatch.setattr(os, "write", write)
    office.bill()  # there is room again: the record that waited goes first
    assert office.meter.admits()
    (record,) = office.lines()  # it says what the client was told
    assert (record["status"], record["error"], record["cost"]) == (503, "usage_log_failed", 0)
    assert office.total("headrace_usage_requests_total", outcome="failed") == 1
    assert office.total("headrace_usage_requests_total", outcome="ok") == 0


def test_a_failed_fsync_admits_none_where_it_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_descriptor: int) -> None:
        raise OSError(5, "input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    for fsync_s in (0.0, 0.001):
        (folder := tmp_path / str(fsync_s)).mkdir()
        office = Office(folder, fsync_s=fsync_s)
        bill = office.bill()
        bill.submitted(1)
        bill.told(DONE, 100.5, 101.0)
        if fsync_s:
            asyncio.run(bill.close(ANSWER))
            assert office.meter.admits()
        else:
            with pytest.raises(UsageLogFailed):
                asyncio.run(bill.close(ANSWER))
            with pytest.raises(UsageLogFailed):
                office.bill()
        office.meter.close()


def test_a_log_that_cannot_be_opened_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="usage_log = "):
        Office(tmp_path / "nowhere")


@pytest.mark.parametrize("asked", [-(2**63), -1, 0, 7, 2**63 - 1])
def test_a_seed_is_named_as_a_request_brings_it(asked: int) -> None:
    """Whoever reads it can send it again: engines count seeds from 0."""
    named = parameters_of(Job([1], 5, Sampling(seed=asked % 2**64))).get("seed", 0)
    assert named == asked
    assert msgspec.convert({"seed": named}, Draws).seed == asked


def test_parameters_hold_neither_text_nor_ids() -> None:
    sampling = Sampling(
        temperature=0.5,
        seed=7,
        rules=Rules(banned=[1, 2], bad_words=[[3, 4]]),
        repetition=Repetition(1.1),
    )
    job = Job([1], 5, sampling, grammar=Grammar("json", '{"secret": 1}'))
    assert parameters_of(job) == {
        "max_tokens": 5, "n": 1, "priority": 0, "temperature": 0.5, "top_k": 0, "top_p": 1.0,
        "seed": 7, "rules": 4, "grammar": "json",
        "repetition": {"repetition": 1.1, "frequency": 0.0, "presence": 0.0, "window": 0},
    }  # fmt: skip
