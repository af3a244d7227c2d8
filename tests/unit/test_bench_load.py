"""The load generator against a server that answers from a script."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import time
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from headrace.bench.compare import rows
from headrace.bench.cpu import CpuMeter
from headrace.bench.exchange import Exchange
from headrace.bench.job import Job, run_job
from headrace.bench.load import Target, first_model
from headrace.bench.measure import measure
from headrace.bench.report import HEADINGS, cells, markdown, notes, read, table
from headrace.bench.sse import EventReader
from headrace.bench.stats import FORMULAS, Level, Record, Shape
from headrace.bench.workers import run_workers
from headrace.bench.workload import Workload
from headrace.cli.bench import base_of, command
from headrace.errors import ConfigError, EngineError
from tests.unit.scripted_server import (
    DONE,
    ROLE,
    SSE_HEAD,
    Script,
    delta,
    event,
    scripted,
    usage,
    whole,
)

PAUSE = 0.05


def steady(body: dict[str, Any]) -> list[bytes | float]:
    """Role chunk at once, then three tokens, each after a pause."""
    parts: list[bytes | float] = [SSE_HEAD, ROLE]
    for text in ("a", "b", "c"):
        parts += [PAUSE, delta(text)]
    return [*parts, delta("", "length"), usage(9, 3, 4), DONE]


async def run(script: Script, workload: Workload, levels: list[int], **more: Any) -> list[Level]:
    async with scripted(script) as server:
        return await measure(Target(url=server.url, model="m"), workload, levels, **more)


async def seen(target: Target, workload: Workload, at_once: int = 1) -> list[Record]:
    job = Job(target=target, workload=workload, shape=Shape(concurrency=at_once), part="x")
    return (await run_job(job, time.monotonic(), lambda progress: None)).records


async def records(script: Script, workload: Workload, at_once: int) -> list[Record]:
    async with scripted(script) as server:
        return await seen(Target(url=server.url, model="m", timeout_s=5), workload, at_once)


async def test_stamps_of_a_stream() -> None:
    """The role chunk is no token; each token is stamped when it comes. Lower bounds only."""
    (one,) = await records(steady, Workload(requests=1), 1)
    assert one.error == ""
    assert len(one.chunks_s) == 3
    stamps = [one.sent_s, *one.chunks_s]
    assert all(b - a >= PAUSE * 0.9 for a, b in itertools.pairwise(stamps))
    assert one.end_s >= one.chunks_s[-1]
    assert (one.prompt_tokens, one.output_tokens, one.cached_tokens) == (9, 3, 4)
    assert (one.finish_reason, one.counted_by) == ("length", "usage")


async def test_closed_loop_keeps_exactly_so_many_open() -> None:
    async with scripted(steady) as server:
        target = Target(url=server.url, model="m", api_key="k")
        (found,) = await measure(target, Workload(requests=12), [4], warmup=0)
        assert server.most_open == 4
        assert len(server.requests) == 12
        prompts = {body["messages"][0]["content"] for body in server.requests}
        assert len(prompts) == 12
        assert all("Authorization: Bearer k" in head for head in server.heads)
    assert found.requests == 12
    assert found.errors == {}
    assert found.output_tokens == 36
    assert found.duration_s >= 3 * 3 * PAUSE * 0.9
    assert found.itl_s is not None
    assert found.itl_s.count == 24


async def test_server_without_usage_is_counted_by_chunks() -> None:
    def script(body: dict[str, Any]) -> list[bytes | float]:
        return [SSE_HEAD, ROLE, delta("x"), 0.01, delta("y", "stop"), DONE]

    (found,) = await run(script, Workload(requests=2), [1], warmup=0)
    assert found.output_tokens == 4
    assert found.counted_by_chunks == 2
    assert "without usage" in notes(found)[0]


@pytest.mark.parametrize(
    ("steps", "error"),
    [
        ([whole("503 Busy", {"error": {"code": "queue_full"}})], "HTTP 503 queue_full"),
        ([b"HTTP/1.1 500 Oops\r\nContent-Length: 2\r\n\r\nno"], "HTTP 500"),
        ([SSE_HEAD, ROLE, delta("x")], "stream ended without [DONE]"),
        ([SSE_HEAD, delta("x"), event({"error": {"code": "engine_dead"}})], "error event: engine_"),
        ([SSE_HEAD, b"data: {nonsense\n\n"], "DecodeError"),
        ([SSE_HEAD, delta("x"), 30.0], "TimeoutError"),
        ([], "ServerDisconnectedError"),
    ],
)
async def test_failures_are_records_not_exceptions(steps: list[bytes | float], error: str) -> None:
    async with scripted(lambda body: steps) as server:
        timeout_s = 0.5 if error == "TimeoutError" else 30.0
        target = Target(url=server.url, model="m", timeout_s=timeout_s)
        (one,) = await seen(target, Workload(requests=1, endpoint="completions"))
    assert one.error.startswith(error)
    assert one.end_s > one.sent_s


@pytest.mark.parametrize(("keep", "word"), [(True, b""), (False, b"connection: close")])
async def test_a_connection_for_each_request(keep: bool, word: bytes) -> None:
    heads: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append((await reader.readuntil(b"\r\n\r\n")).lower())
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        target = Target(url=f"http://127.0.0.1:{port}", model="m", keep_alive=keep)
        (record,) = await seen(target, Workload(requests=1))
    assert record.error
    assert word in heads[0]
    assert keep or len(heads) == 1


async def test_no_server_at_all() -> None:
    target = Target(url="http://127.0.0.1:9", model="m")
    with pytest.raises(EngineError, match="warm-up"):
        await measure(target, Workload(requests=1), [1])
    with pytest.raises(EngineError, match="v1/models"):
        await first_model(target)
    (found,) = await measure(target, Workload(requests=2), [1], warmup=0)
    assert sum(found.errors.values()) == 2


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (whole("401 Unauthorized", {"error": {"message": "send a key"}}), "HTTP 401 send a key"),
        (whole("404 Not Found", {}), "HTTP 404"),
        (whole("200 OK", {"object": "page"}), "no list of models"),
        (whole("200 OK", {"data": []}), "serves no model"),
    ],
)
async def test_a_server_that_names_no_model_is_told_with_its_words(
    answer: bytes, said: str
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(EngineError, match=said):
            await first_model(Target(url=f"http://127.0.0.1:{port}", model=""))


async def test_not_streamed() -> None:
    payload = {
        "choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2},
    }
    load = Workload(requests=1, stream=False)
    (one,) = await records(lambda body: [whole("200 OK", payload)], load, 1)
    assert one.error == ""
    assert one.chunks_s == []
    assert (one.prompt_tokens, one.output_tokens, one.finish_reason) == (3, 2, "stop")


async def test_cpu_of_a_process_tree_is_seen() -> None:
    process = await asyncio.create_subprocess_exec(
        "sh", "-c", "sh -c 'while :; do :; done' & wait", start_new_session=True
    )
    try:
        meter = CpuMeter(process.pid)
        deadline = time.monotonic() + 30
        while meter.total_s() < 0.1:  # the shell itself only waits: its child burns the time
            assert time.monotonic() < deadline, "the child's time never showed"
            await asyncio.sleep(0.02)
    finally:
        os.killpg(process.pid, 9)
        await process.wait()
    assert meter.total_s() >= 0.1  # ended, and still counted
    with pytest.raises(ConfigError, match="no process"):
        CpuMeter(process.pid)


async def test_cores_are_measured() -> None:
    (found,) = await run(steady, Workload(requests=2), [2], pid=os.getpid())
    assert found.server_cores is not None
    assert found.client_cores is not None
    assert found.server_cores >= 0


def test_events_cut_anywhere() -> None:
    stream = b": keep-alive\n\ndata: one\n\nevent: x\r\ndata:two\r\n\r\ndata: [DONE]\n\n"
    for cut in range(len(stream)):
        reader = EventReader()
        assert reader.feed(stream[:cut]) + reader.feed(stream[cut:]) == [b"one", b"two", b"[DONE]"]


def test_reasoning_counts_as_the_first_token() -> None:
    exchange = Exchange(Record(sent_s=0.0))
    thought = {"choices": [{"delta": {"reasoning_content": "hm"}}]}
    exchange.feed(ROLE + event(thought) + delta("x"), 1.0)
    assert exchange.record.chunks_s == [1.0, 1.0]


async def test_command_writes_a_report(tmp_path: Any) -> None:
    out = tmp_path / "report.json"
    async with scripted(steady) as server:
        arguments = f"--url {server.url} --concurrency 1,3 --requests 6 --out {out}".split()
        result = await asyncio.to_thread(CliRunner().invoke, command, arguments)
        assert len(server.requests) == 13
    assert result.exit_code == 0, result.output
    (report,) = read(out)
    assert [x.concurrency for x in report.levels] == [1, 3]
    assert report.model == "scripted"
    assert report.workload.requests == 6
    assert report.conditions["cores"]
    assert "TTFT" in result.output


async def test_command_fails_when_every_request_does(tmp_path: Any) -> None:
    def script(body: dict[str, Any]) -> list[bytes | float]:
        return [whole("400 No", {"error": {"code": "nope"}})]

    async with scripted(script) as server:
        arguments = f"--url {server.url} --requests 2 --concurrency 1 --warmup 0".split()
        result = await asyncio.to_thread(CliRunner().invoke, command, arguments)
    assert result.exit_code == 1
    assert "2 x HTTP 400 nope" in result.output


async def test_a_refused_warm_up_says_what_the_server_said() -> None:
    def script(body: dict[str, Any]) -> list[bytes | float]:
        return [whole("400 No", {"error": {"code": "nope", "message": "no template"}})]

    with pytest.raises(EngineError, match="failed: HTTP 400 nope: no template"):
        await run(script, Workload(requests=2), [1])


async def invoke(*arguments: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, command, arguments)


async def test_open_loop_over_sockets_with_metrics_and_a_line_a_request(tmp_path: Any) -> None:
    out, lines = tmp_path / "r.json", tmp_path / "r.jsonl"
    async with scripted(steady) as server:
        server.pages["/metrics"] = (
            "# TYPE headrace_running gauge\nheadrace_running 3\n"
            "# TYPE headrace_steps_total counter\nheadrace_steps_total 7\n"
            "# TYPE python_info gauge\npython_info 1\n"
        )
        result = await invoke(
            *f"--url {server.url} --rate 40 --requests 20 --slo ttft:10000".split(),
            *("--out", str(out), "--requests-out", str(lines), "--nonce", "n"),
        )
    assert result.exit_code == 0, result.output
    (report,) = read(out)
    (found,) = report.levels
    assert found.label == "40/s"
    assert found.offered_per_s == 40
    assert found.good_share == 1
    assert found.server["headrace_running"].mean == 3
    assert set(found.server) == {"headrace_running"}
    assert report.slo_ms == {"ttft": 10000}
    assert report.workload.nonce == "n"
    written = [json.loads(line) for line in lines.read_text().splitlines()]
    assert len(written) == 20
    assert all(row["level"] == "40/s" and row["sent_s"] >= row["planned_s"] for row in written)
    for row in written:
        assert row["ttft_s"] == pytest.approx(row["chunks_s"][0] - row["sent_s"])


async def test_several_processes_send_every_request_once(tmp_path: Any) -> None:
    out, lines = tmp_path / "r.json", tmp_path / "r.jsonl"
    async with scripted(steady) as server:
        result = await invoke(
            *f"--url {server.url} --concurrency 5 --requests 13 --workers 2 --warmup 0".split(),
            *("--out", str(out), "--requests-out", str(lines)),
        )
        prompts = [body["messages"][0]["content"] for body in server.requests]
        assert server.most_open <= 5
    assert result.exit_code == 0, result.output
    assert len(prompts) == len(set(prompts)) == 13
    sessions = [json.loads(line)["session"] for line in lines.read_text().splitlines()]
    assert sorted(sessions) == list(range(13))
    assert read(out)[0].levels[0].requests == 13


async def test_a_worker_that_fails_ends_the_run() -> None:
    load = Workload(trace="/nowhere/none.jsonl", requests=0)
    job = Job(
        target=Target(url="http://none", model="m"),
        workload=load,
        part="x",
        shape=Shape(trace=True),
    )
    with pytest.raises(EngineError, match="worker"):
        await run_workers(job, 2, lambda progress: None)


async def test_a_trace_is_replayed(tmp_path: Any) -> None:
    file, out = tmp_path / "t.jsonl", tmp_path / "r.json"
    line = {"timestamp": 0, "input_length": 600, "output_length": 64, "hash_ids": [0, 1]}
    file.write_text(json.dumps(line) + "\n" + json.dumps(line | {"timestamp": 3000}) + "\n")
    async with scripted(steady) as server:
        result = await invoke(
            *f"--url {server.url} --trace {file} --speed 30 --trace-block-tokens 16".split(),
            *("--warmup", "0", "--out", str(out)),
        )
        one, two = server.requests
    assert result.exit_code == 0, result.output
    assert one == two
    assert len(one["messages"][0]["content"].split()) == 18
    assert one["max_tokens"] == 2
    assert read(out)[0].levels[0].label == "trace"


async def test_dropped_requests_close_their_connection() -> None:
    endless: list[bytes | float] = [delta("x"), 0.01]
    async with scripted(lambda body: [SSE_HEAD, ROLE, *endless * 2000, DONE]) as server:
        (found,) = await measure(
            Target(url=server.url, model="m"),
            Workload(requests=3, cancel=1.0, max_tokens=5),
            [3],
            warmup=0,
        )
        await asyncio.wait_for(server.was_cut.wait(), 30)
    assert (found.cancelled, found.errors, found.e2e_s) == (3, {}, None)


async def test_a_shed_is_no_error() -> None:
    def script(body: dict[str, Any]) -> list[bytes | float]:
        return [whole("429 Slow down", {"error": {"code": "rate"}})]

    (found,) = await run(script, Workload(requests=2), [1], warmup=0)
    assert (found.errors, found.sheds) == ({}, {"HTTP 429 rate": 2})
    assert notes(found)[0] == "2 x shed, HTTP 429 rate"


async def test_a_sweep_over_sockets(tmp_path: Any) -> None:
    out = tmp_path / "r.json"
    async with scripted(steady) as server:
        arguments = f"--url {server.url} --sweep 3 --requests 12 --concurrency 4 --out {out}"
        result = await invoke(*arguments.split())
    assert result.exit_code == 0, result.output
    floor, ceiling, between = read(out)[0].levels
    assert (floor.concurrency, ceiling.concurrency) == (1, 4)
    assert between.rate == pytest.approx(ceiling.requests_per_s)


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ("--prompt ids", "endpoint"),
        ("--prompt ids --endpoint completions --turns 2", "prompt"),
        ("--turns 2 --fan-out 3", "turns"),
        ("--structured 0.5 --endpoint completions", "structured"),
        ("--cancel 0.5 --no-stream", "cancel"),
        ("--single-prompt x --prefixes 3", "prefixes"),
        ("--trace x --rate 3", "trace"),
        ("--trace /nowhere/none", "trace"),
        ("--sweep 4 --rate 3", "rate"),
        ("--structured 0.5 --schema /nowhere/none", "schema"),
    ],
)
def test_pairs_that_cannot_be(arguments: str, param: str) -> None:
    result = CliRunner().invoke(command, arguments.split())
    assert isinstance(result.exception, ConfigError)
    assert result.exception.param == param


@pytest.mark.parametrize("slo", ["ttft", "x:3", "itl:-1", "ttft:nan"])
def test_bad_limits_are_refused(slo: str) -> None:
    result = CliRunner().invoke(command, ["--slo", slo])
    assert result.exit_code == 2
    assert "milliseconds" in result.output


@pytest.mark.parametrize("levels", ["0", "1,x", "", "4,-1"])
def test_bad_levels_are_refused(levels: str) -> None:
    result = CliRunner().invoke(command, ["--concurrency", levels])
    assert result.exit_code == 2
    assert "whole numbers" in result.output


async def test_tables_and_plot(tmp_path: Any) -> None:
    from headrace.bench.plot import plot

    levels = await run(steady, Workload(requests=4), [1, 2], pid=os.getpid(), warmup=0)
    assert len(cells(levels[0])) == len(HEADINGS)
    assert table(levels).row_count == 2
    text = markdown({"one": levels, "two": levels})
    rows = text.strip().splitlines()
    assert len(rows) == 6
    assert len({row.count("|") for row in rows}) == 1
    plot({"one": levels, "two": levels[:1]}, tmp_path / "four", title="t", cores=2)
    svg = (tmp_path / "four.svg").read_text()
    assert svg.count('id="axes_') == 5  # four panels and the second axis of the last
    assert (tmp_path / "four.png").read_bytes().startswith(b"\x89PNG")
    plot({"one": levels, "two": levels[:1]}, tmp_path / "again", title="t", cores=2)
    assert (tmp_path / "again.svg").read_text() == svg


async def test_reports_of_an_open_loop(tmp_path: Any) -> None:
    """HTML that needs nothing else, the plot, and a comparison of two runs."""
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    page, stem = tmp_path / "r.html", tmp_path / "four"
    async with scripted(steady) as server:
        pictures = ["--html", str(page), "--plot", str(stem)]
        for file, rate, more in zip(files, ("40,80", "80,90"), ([], pictures), strict=True):
            result = await invoke(
                *f"--url {server.url} --rate {rate} --requests 8 --slo itl:9999".split(),
                *("--name", "<run> & co", "--out", str(file), "--nonce", "<b>", *more),
            )
            assert result.exit_code == 0, result.output
    text = page.read_text()
    document = ElementTree.fromstring(
        text.replace("<!doctype html>", "")
        .replace("<meta ", "<i ")
        .replace('charset="utf-8">', 'charset="utf-8"/>')
        .replace('scale=1">', 'scale=1"/>')
    )
    assert document.findtext("body/h1") == "<run> & co"
    assert len(document.findall(".//{*}svg")) == 5
    assert "src=" not in text
    assert "href=" not in text
    shown = "".join(document.itertext())
    assert all(formula in shown for formula in FORMULAS.values())
    assert (tmp_path / "four.svg").exists()
    assert (tmp_path / "four.png").exists()
    result = await invoke("compare", *map(str, files))
    assert result.exit_code == 0, result.output
    assert "80/s" in result.output
    assert "at 40/s: only in the first" in result.output
    assert "TTFT p99 ms" in result.output
    (a,), (b,) = map(read, files)
    found = {row.figure: row for row in rows(a.levels, b.levels)}
    one, two = a.levels[1], b.levels[0]
    assert found["tok/s"].change == pytest.approx(
        two.output_tokens_per_s / one.output_tokens_per_s - 1
    )
    assert found["tok/s"].better is (two.output_tokens_per_s > one.output_tokens_per_s)
    assert one.e2e_s is not None
    assert two.e2e_s is not None
    assert found["E2E mean s"].better is (two.e2e_s.mean < one.e2e_s.mean)
    assert "errors" not in found


def test_compare_refuses_what_is_no_report(tmp_path: Any) -> None:
    file = tmp_path / "x.json"
    for text in ("{}", "[]", "no"):
        file.write_text(text)
        result = CliRunner().invoke(command, ["compare", str(file), str(file)])
        assert isinstance(result.exception, ConfigError)


def test_the_address_that_other_clients_want_will_do() -> None:
    for url in ("a:1", "http://a:1", "http://a:1/", "http://a:1/v1", "http://a:1/v1/"):
        assert base_of(url) == "http://a:1"
    for url in ("ftp://a", "http://", "", "http://a:x", "http://[::1"):
        with pytest.raises(ConfigError, match="--url"):
            base_of(url)
