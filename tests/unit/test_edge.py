"""The HTTP app without an engine: what it answers while loading, and when its own code breaks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import msgspec
import pytest
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import Message

from headrace.api.app import create_app
from headrace.api.exchange import Exchanges
from headrace.api.response_store import Kept
from headrace.api.resume import Streams
from headrace.api.seats import Seats
from headrace.api.service import Service
from headrace.config import Settings
from headrace.engine.client import EngineClient
from headrace.observe.histogram import BatchedHistogram
from headrace.observe.metrics import ApiMetrics, expose
from headrace.sources.card import read_card
from headrace.sources.files import ModelFiles
from headrace.text.tokenizer import load_tokenizer

FILES = ModelFiles("fake", "fake", Path())
BODY = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def service() -> Service:
    metrics = ApiMetrics("fake", CollectorRegistry())
    client = EngineClient(Path())
    return Service(Settings(), "fake", read_card(FILES), load_tokenizer(FILES), client, metrics)


@pytest.fixture
async def http(service: Service) -> AsyncIterator[httpx.AsyncClient]:
    app: Any = create_app(service, Exchanges(60, 15, lambda: None))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


@pytest.mark.parametrize(
    ("settings", "left"),
    [
        (Settings(response_store_count=0), []),
        (Settings(response_store_count=2), ["b", "c"]),
        (Settings(response_store_bytes=29), ["b", "c"]),
        (Settings(response_store_ttl_s=1e-9), []),
        (Settings(), ["a", "b", "c"]),
    ],
)
async def test_responses_are_kept_as_set(settings: Settings, left: list[str]) -> None:
    metrics = ApiMetrics("fake", CollectorRegistry())
    card, tokenizer = read_card(FILES), load_tokenizer(FILES)
    store = Service(settings, "fake", card, tokenizer, EngineClient(Path()), metrics).responses
    await store.start()
    for name in "abc":
        assert await store.put(name, Kept(b"12345", b"1234", b"1")) == store.enabled
    assert [name for name in "abc" if await store.get(name) is not None] == left
    await store.close()


async def test_a_request_with_two_parents_is_of_no_trace(
    http: httpx.AsyncClient, service: Service
) -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"
    parent = ("traceparent", f"00-{trace}-b7ad6b7169203331-01")
    for parents, known in (([parent], trace), ([parent, parent], ""), ([], "")):
        await http.post("/v1/chat/completions", json=BODY, headers=parents)
        (record,) = service.recorder.newest(1, "")
        assert record.trace_id == known


async def test_while_loading(http: httpx.AsyncClient) -> None:
    health, ready = await http.get("/health"), await http.get("/ready")
    assert (health.status_code, health.json()["status"]) == (200, "loading")
    assert (ready.status_code, ready.json()["status"]) == (503, "loading")
    refused = await http.post("/v1/chat/completions", json=BODY)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
    wrong = await http.post("/v1/chat/completions", json={**BODY, "n": 0})
    assert wrong.status_code == 400, "a wrong request is wrong at any time"
    assert (await http.post("/tokenize", json={"prompt": "ab"})).json()["count"] == 2


async def test_who_may_have_what_a_filter_hides_recorded(tmp_path: Path) -> None:
    (tmp_path / "words").write_text("secret")
    filters = (f"filter=words:{tmp_path / 'words'}",)
    for hook, full in ((filters, [False, True]), ((), [True, True])):
        settings = Settings(api_key=("user",), admin_key=("root",), hook=hook)
        metrics = ApiMetrics("fake", CollectorRegistry())
        card, tokenizer = read_card(FILES), load_tokenizer(FILES)
        service = Service(settings, "fake", card, tokenizer, EngineClient(Path()), metrics)
        app: Any = create_app(service, Exchanges(60, 15, lambda: None))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            for key in ("user", "root"):
                head = {"x-api-key": key, "x-headrace-record": "full", "x-request-id": key}
                await client.post("/v1/chat/completions", json=BODY, headers=head)
        found = {record.id: record.full is not None for record in service.recorder.newest(2, "")}
        assert [found["user"], found["root"]] == full


async def test_back_to_a_stream_needs_no_seat(service: Service) -> None:
    service.settings = Settings(stream_resume_s=5)
    service.streams = Streams(0, 5.0, 4096)
    seats = Seats(1)
    seats.take()
    app: Any = create_app(service, Exchanges(60, 15, lambda: None), seats)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        full = await client.post("/v1/chat/completions", json=BODY)
        assert (full.status_code, full.json()["error"]["code"]) == (503, "too_many_streams")
        head = {"last-event-id": f"0-{'0' * 32}.1"}
        back = await client.post("/v1/chat/completions", json=BODY, headers=head)
        assert (back.status_code, back.json()["error"]["code"]) == (404, "stream_not_found")


@pytest.mark.parametrize("path", ["/v1/embeddings", "/classify", "/score"])
async def test_what_begins_no_stream_takes_a_seat_with_an_event_id_too(
    path: str, service: Service
) -> None:
    service.settings = Settings(stream_resume_s=5)
    service.streams = Streams(0, 5.0, 4096)
    seats = Seats(1)
    seats.take()
    app: Any = create_app(service, Exchanges(60, 15, lambda: None), seats)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://test"
    ) as client:
        head = {"last-event-id": f"0-{'0' * 32}.1"}
        full = await client.post(path, json={"input": "a"}, headers=head)
    assert (full.status_code, full.json()["error"]["code"]) == (503, "too_many_streams")


async def test_an_empty_event_id_takes_a_seat_and_several_begin_nothing(service: Service) -> None:
    service.settings = Settings(stream_resume_s=5)
    service.streams = Streams(0, 5.0, 4096)
    seats = Seats(1)
    seats.take()
    app: Any = create_app(service, Exchanges(60, 15, lambda: None), seats)
    transport = httpx.ASGITransport(app)
    name = f"0-{'0' * 32}.1"
    cases = [
        ([""], 503, "too_many_streams"),
        (["", name], 400, "invalid_request"),
        ([name, ""], 400, "invalid_request"),
    ]
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        for values, status, code in cases:
            head = [("last-event-id", value) for value in values]
            back = await client.post("/v1/chat/completions", json=BODY, headers=head)
            assert (back.status_code, back.json()["error"]["code"]) == (status, code), values


@pytest.mark.parametrize(
    ("resume_s", "told"), [(0.0, (503, "shutting_down")), (5.0, (404, "stream_not_found"))]
)
async def test_no_event_id_begins_a_stream_while_the_server_drains(
    resume_s: float, told: tuple[int, str], service: Service
) -> None:
    service.settings = Settings(stream_resume_s=resume_s)
    service.streams = Streams(0, resume_s, 4096)
    service.draining = True
    app: Any = create_app(service, Exchanges(60, 15, lambda: None), Seats(1))
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://test"
    ) as client:
        head = {"last-event-id": f"0-{'0' * 32}.1"}
        back = await client.post("/v1/chat/completions", json=BODY, headers=head)
    assert (back.status_code, back.json()["error"]["code"]) == told


async def test_who_sees_the_end_finds_it_counted_and_the_seat_free(service: Service) -> None:
    seats, counted = Seats(1), list[bytes]()
    app: Any = create_app(service, Exchanges(60, 15, lambda: None), seats)

    async def receive() -> Message:
        return {"type": "http.request", "body": msgspec.json.encode(BODY)}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            assert not message.get("more_body")
            seats.take()
            seats.leave()
            counted.append(expose(service.metrics.registry))

    path = "/v1/chat/completions"
    head = {"type": "http", "method": "POST", "headers": [], "query_string": b""}
    await app({**head, "path": path, "raw_path": path.encode()}, receive, send)
    (page,) = counted
    assert f'endpoint="{path}",model_name="fake",status="503"}} 1.0' in page.decode()


@pytest.mark.parametrize("path", ["/v1/%63hat/completions", "/v1/chat/completion%73"])
async def test_another_spelling_of_a_route_is_that_route(path: str, service: Service) -> None:
    """For its key, its seat, its counts and its answer; `%2F` is part of a name."""
    service.settings = Settings(api_key=("k",))
    seats, bearer = Seats(1), {"authorization": "Bearer k"}
    app: Any = create_app(service, Exchanges(60, 15, lambda: None), seats)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        assert (await client.post(path, json=BODY)).status_code == 401
        assert (await client.post(path, json=BODY, headers=bearer)).status_code == 503
        seats.take()
        full = await client.post(path, json=BODY, headers=bearer)
        assert full.json()["error"]["code"] == "too_many_streams"
        apart = await client.post("/v1%2Fchat%2Fcompletions", json=BODY, headers=bearer)
        assert apart.status_code == 404
        assert (await client.get("/%75i/%61pi/requests")).status_code == 401
        assert (await client.get("/ui%2Fapi%2Frequests", headers=bearer)).status_code == 404
    counted = expose(service.metrics.registry).decode()
    for status in (401, 503):
        assert f'endpoint="/v1/chat/completions",model_name="fake",status="{status}"' in counted


@pytest.mark.parametrize("name", ["a/b", "a b", "é", "100%", "a%2Fb"])
async def test_a_name_in_a_path_is_decoded_once(name: str, service: Service) -> None:
    service.name = name
    await service.responses.start()
    app: Any = create_app(service, Exchanges(60, 15, lambda: None))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        found = await client.get("/v1/models/" + quote(name, safe=""))
        assert (found.status_code, found.json()["id"]) == (200, name)
        gone = await client.get("/v1/responses/" + quote(name, safe=""))
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "response_not_found")
        assert repr(name) in gone.json()["error"]["message"]
    await service.responses.close()


async def test_our_own_faults_say_nothing_of_the_inside(
    service: Service, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    def broken(model: str | None) -> None:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(service, "check_model", broken)
    answer = await http.post("/v1/chat/completions", json=BODY)
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert "secret" not in answer.text
    assert "secret detail" in caplog.text
    assert answer.headers["x-request-id"]


async def test_the_log_has_no_prompt_text(
    http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("DEBUG"):
        await http.post("/v1/completions", json={"prompt": "my secret", "stop": [""]})
        await http.post("/v1/completions", content=b'{"prompt": "my secret"')
        await http.get("/v1/models/my%20secret")
    assert "POST /v1/completions 400" in caplog.text
    assert "secret" not in "".join(r.message for r in caplog.records if "headrace" in r.name)


async def test_draining_refuses(service: Service, http: httpx.AsyncClient) -> None:
    service.draining = True
    answer = await http.post("/v1/chat/completions", json=BODY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
    assert answer.headers["retry-after"] == "1"
    assert (await http.get("/ready")).json()["status"] == "draining"


def test_a_batched_histogram_counts_like_a_plain_one() -> None:
    registry = CollectorRegistry()
    bounds = (0.1, 0.5, 1.0)
    plain = Histogram("plain", "x", ["m"], registry=registry, buckets=bounds).labels("a")
    batched = BatchedHistogram("batched", "x", ["m"], registry=registry, buckets=bounds).labels("a")
    for value in (0.0, 0.1, 0.11, 0.5, 0.7, 1.0, 7.0):
        plain.observe(value)
        plain.observe(value)
        batched.note(value)
        batched.write(value)
    batched.flush()
    batched.flush()
    found: dict[str, dict[tuple[str, str], float]] = {"plain": {}, "batched": {}}
    for family in text_string_to_metric_families(expose(registry).decode()):
        for sample in family.samples:
            kind, _, series = sample.name.partition("_")
            if series != "created":
                found[kind][series, sample.labels.get("le", "")] = sample.value
    assert found["plain"] == found["batched"]
    assert len(found["plain"]) == 6
