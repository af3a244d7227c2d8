"""What running servers write down of their requests: whoever asks, however they end, who dies."""

from __future__ import annotations

import hashlib
import http.client
import itertools
import json
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import pytest

from tests.e2e.serving import PATIENCE_S, Server, events

KEY = "k-123"
HEADERS = {"authorization": f"Bearer {KEY}"}
NAME = "sha256:" + hashlib.sha256(KEY.encode()).hexdigest()[:16]
CHAT, TEXT, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
RESPONSES = "/v1/responses"
HI = [{"role": "user", "content": "hi"}]


class Metered(Server):
    """A server with a usage log."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.usage_path = folder / "usage.jsonl"
        super().__init__(
            usage_log=str(self.usage_path),
            prices="input=1,cached=0.5,output=2,device_hour=3600",
            **settings,
        )

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    def records(self) -> dict[str, dict[str, Any]]:
        """By request id."""
        lines = self.usage_path.read_text().splitlines()
        found = [json.loads(line) for line in lines]
        by_id = {record["request_id"]: record for record in found}
        assert len(by_id) == len(found), "a request was written twice"
        return by_id

    def ask(self, path: str, body: Any, name: str) -> tuple[int, Any]:
        """One request called `name`: status, decoded body or events."""
        headers = HEADERS | {"x-request-id": name}
        status, got, raw = self.request("POST", path, body, headers)
        streamed = got["content-type"].startswith("text/event-stream")
        return status, events(raw) if streamed else json.loads(raw)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Metered]:
    folder = tmp_path_factory.mktemp("usage")
    with Metered(
        folder, workers=2, fake_step_ms=4.0, api_key=(KEY,), usage_fsync_s=0, usage_details=True
    ) as made:
        yield made


def test_a_record_is_there_before_the_end_is_seen(server: Metered) -> None:
    """Streamed, whole, several prompts, n > 1, beams, Anthropic's: with usage's numbers."""
    draw = {"max_tokens": 6, "ignore_eos": True, "user": "ann"}
    bodies: dict[str, tuple[str, dict[str, Any]]] = {
        "whole": (CHAT, {**draw, "messages": HI}),
        "stream": (CHAT, {**draw, "messages": HI, "stream": True,
                          "stream_options": {"include_usage": True}}),
        "several": (TEXT, {**draw, "prompt": ["one", "other"], "n": 2}),
        "stopped": (TEXT, {"prompt": "a", "max_tokens": 200, "temperature": 0, "stop": ["e", "a"]}),
        "beams": (TEXT, {**draw, "prompt": "beam " * 20, "use_beam_search": True, "beam_width": 3,
                         "max_tokens": 40}),
        "anthropic": (MESSAGES, {"max_tokens": 6, "messages": HI, "metadata": {"user_id": "ann"}}),
        "response": (RESPONSES, {"max_output_tokens": 6, "input": "hi", "user": "ann"}),
    }  # fmt: skip
    for name, (path, body) in bodies.items():
        status, answer = server.ask(path, body, name)
        record = server.records()[name]
        assert (status, record["status"], record["endpoint"]) == (200, 200, path)
        assert (record["key"], record["model"], record["complete"]) == (NAME, "fake", True)
        assert record["user"] == ("" if name == "stopped" else "ann")
        usage = answer[-2]["usage"] if isinstance(answer, list) else answer["usage"]
        if path in (CHAT, TEXT):
            assert record["input_tokens"] == usage["prompt_tokens"]
            assert record["output_tokens"] == usage["completion_tokens"]
            details = usage["prompt_tokens_details"]
            assert record["cached_tokens"] == details["cached_tokens"] or name == "beams"
            told = usage["headrace"]
            assert told["compute_s"] == record["compute_s"] > 0
            assert (told["cost"], told["currency"]) == (record["cost"], "USD")
        else:
            assert record["output_tokens"] == usage["output_tokens"]
        assert record["parameters"]["max_tokens"] in (body.get("max_tokens"), 6)
        assert 0 < record["ttft_s"] <= record["total_s"]


def leave(server: Metered, name: str, body: dict[str, Any]) -> None:
    """A stream that its client leaves after the first event."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    headers = HEADERS | {"x-request-id": name, "content-type": "application/json"}
    long = body | {"max_tokens": 3700, "ignore_eos": True, "stream": True}
    connection.request("POST", TEXT, json.dumps(long), headers)
    response = connection.getresponse()
    assert response.readline().startswith(b"data: ")
    response.close()
    connection.close()


def test_b086_what_clients_gave_up_is_counted_everywhere(server: Metered) -> None:
    """In the log, by reason, in tokens, and in every histogram of a request."""
    names = {f"left-{number}" for number in range(5)}
    counts = [
        ("headrace_requests_finished_total", {"reason": "abort"}),
        ("headrace_usage_requests_total", {"outcome": "aborted"}),
        *((f"headrace_{what}_seconds_count", {}) for what in ("queue", "prefill", "ttft", "e2e")),
    ]
    metric = server_metric(server)
    before = [metric(name, **labels) for name, labels in counts]
    output = metric("headrace_usage_tokens_total", kind="output")
    for name in names:
        leave(server, name, {"prompt": name})
    server.wait(lambda: names <= set(server.records()), "the records of aborts")

    def counted() -> bool:  # just after the line is in the log
        metric = server_metric(server)
        return [metric(name, **labels) for name, labels in counts] >= [x + 5 for x in before]

    server.wait(counted, "the counts of aborts")
    metric = server_metric(server)
    assert [metric(name, **labels) for name, labels in counts] == [count + 5 for count in before]
    records = [server.records()[name] for name in names]
    for record in records:
        assert (record["status"], record["finish"]) == (499, [None])
        assert record["output_tokens"] > 0
        assert record["cost"] > 0
        assert record["compute_s"] > 0
    told = sum(record["output_tokens"] for record in records)
    assert metric("headrace_usage_tokens_total", kind="output") == output + told


def test_vectors_are_metered(server: Metered) -> None:
    body = {"input": ["one", "another"], "user": "ann"}
    status, answer = server.ask("/v1/embeddings", body, "vectors")
    record = server.records()["vectors"]
    assert (status, record["status"], record["user"]) == (200, 200, "ann")
    assert record["input_tokens"] == answer["usage"]["prompt_tokens"]
    assert (record["output_tokens"], record["finish"]) == (0, [])
    assert record["compute_s"] > 0
    assert record["parameters"] == {"pooling": "mean", "priority": 0}


def test_refused_requests_leave_no_record(server: Metered) -> None:
    assert server.ask(TEXT, {"prompt": "x", "max_tokens": 10**9}, "wrong")[0] == 400
    assert server.ask(TEXT, {"prompt": "x", "user": 5}, "user")[0] == 400
    assert server.request("POST", TEXT, {"prompt": "x"}, {"x-request-id": "nobody"})[0] == 401
    assert not {"wrong", "user", "nobody"} & set(server.records())


def test_the_records_add_up_to_what_the_device_worked(server: Metered) -> None:
    """A mixed crowd, a fifth of which leaves in the middle."""

    def one(number: int) -> None:
        name = f"mixed-{number}"
        body = {"prompt": "x" * (1 + number * 37 % 300), "max_tokens": 5 + number % 40}
        if number % 5:
            assert server.ask(TEXT, body | {"stream": bool(number % 2)}, name)[0] == 200
            return
        leave(server, name, body)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(one, range(60)))
    server.wait(lambda: len({n for n in server.records() if "mixed" in n}) == 60, "all records")
    records = server.records().values()
    counted = "headrace_usage_requests_total"  # just after the line is in the log
    server.wait(lambda: server_metric(server)(counted) == len(records), "all counts")
    metric = server_metric(server)
    busy_s = metric("headrace_busy_seconds_total")
    assert sum(r["compute_s"] for r in records) == pytest.approx(busy_s, rel=0.02)
    for kind in ("input", "cached", "output"):
        total = sum(record[f"{kind}_tokens"] for record in records)
        assert metric("headrace_usage_tokens_total", kind=kind) == total
    assert metric("headrace_usage_compute_seconds_total") == pytest.approx(
        sum(record["compute_s"] for record in records)
    )
    cost = sum(record["cost"] for record in records)
    assert metric("headrace_usage_cost_total", currency="USD") == pytest.approx(cost)
    assert metric("headrace_unclaimed_seconds_total") == 0


def server_metric(server: Metered) -> Any:
    """`Server.metric`, with the key."""
    from prometheus_client.parser import text_string_to_metric_families

    text = server.request("GET", "/metrics", headers=HEADERS)[2].decode()
    samples = [s for f in text_string_to_metric_families(text) for s in f.samples]

    def metric(name: str, **labels: str) -> float:
        return sum(
            sample.value
            for sample in samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    return metric


def test_kill_9_takes_nothing_that_a_client_saw_the_end_of(tmp_path: Path) -> None:
    """First an HTTP process dies, then the engine process, while eight clients ask."""
    over = threading.Event()
    with Metered(tmp_path, workers=2, fake_step_ms=1.0, engine_timeout_s=1.5) as server:
        seen: list[str] = []

        def client(number: int) -> None:
            for count in itertools.takewhile(lambda _: not over.is_set(), itertools.count()):
                name = f"{number}-{count}"
                body = {"prompt": name, "max_tokens": 3, "stream": bool(count % 2)}
                try:
                    status, answer = server.ask(TEXT, body, name)
                except (OSError, http.client.HTTPException):
                    continue
                if status == 200 and (not isinstance(answer, list) or answer[-1] == "[DONE]"):
                    seen.append(name)

        with ThreadPoolExecutor(8) as pool:
            clients = [pool.submit(client, number) for number in range(8)]
            try:
                for victim, some in ((server.apis[0], 100), (server.engine, 200)):
                    server.wait(lambda some=some: len(seen) > some, "some answers")  # type: ignore[misc]
                    victim.send_signal(signal.SIGKILL)
                    victim.wait()
            finally:
                over.set()
            for one in clients:
                one.result()
        whole = set()
        for line in server.usage_path.read_text().splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue  # half the line of the process that died
            if record["status"] == 200:
                whole.add(record["request_id"])
        assert set(seen) <= whole


def test_a_full_disk_takes_the_server_out_of_traffic_until_there_is_room(tmp_path: Path) -> None:
    """/ready says what a request would be told, and brings the server back without one."""
    body = {"model": "fake", "prompt": "hi", "max_tokens": 2}
    path = tmp_path / "usage.jsonl"
    path.symlink_to("/dev/full")
    with Metered(tmp_path) as server:
        for name in ("first", "second"):  # the one that could not be written, one that may not run
            status, said = server.ask(TEXT, body, name)
            assert (status, said["error"]["code"]) == (503, "usage_log_failed")
            status, said = server.get("/ready")
            assert (status, said["status"]) == (503, "usage_log_failed")
        assert server.get("/health")[0] == 200
        path.unlink()  # room, as the next write finds it
        assert server.get("/ready")[0] == 200
        assert list(server.records()) == ["first"]
        assert server.ask(TEXT, body, "third")[0] == 200
        assert list(server.records()) == ["first", "third"]
