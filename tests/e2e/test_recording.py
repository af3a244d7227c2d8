"""Requests recorded on a running server: what the live page shows is what happened."""

from __future__ import annotations

import base64
import http.client
import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from headrace.api.page_data import MOST_WATCHERS
from tests.e2e.serve_process import ServeProcess
from tests.e2e.serving import Server

FULL = {"x-headrace-record": "full"}
CHAT = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": " What is a mill? "},
]


def ask(url: str, body: dict[str, Any], **headers: str) -> tuple[str, dict[str, Any]]:
    """The id and the answer of a chat."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps({"messages": CHAT, **body}).encode(),
        {"content-type": "application/json", **names},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.headers["x-request-id"], json.load(answer)


def shown(url: str, path: str) -> Any:
    with urllib.request.urlopen(f"{url}/ui/api/{path}", timeout=30) as answer:
        assert answer.headers["cache-control"] == "no-store"
        return json.load(answer)


def ended(url: str, name: str) -> Any:
    """The record of a request whose answer has come: it was complete before the last byte left."""
    record = shown(url, f"requests/{name}")
    assert record["state"] == "done"
    return record


def test_a_full_record_whichever_process_is_asked(shared_server: Server) -> None:
    body = {"max_tokens": 8, "n": 2, "seed": 3, "stop": ["never"], "stream": False}
    name, answer = ask(shared_server.url, body, **FULL)
    record = ended(shared_server.url, name)
    others = [shown(shared_server.url, f"requests/{name}") for _ in range(5)]
    assert all(other == record for other in others)  # two processes; one holds it
    assert (record["state"], record["full"], record["status"]) == ("done", True, 200)
    times = [at for at in record["times_ms"].values() if at is not None]
    assert times == sorted(times)
    assert len(times) == len(record["times_ms"])
    assert record["usage"]["completion_tokens"] == answer["usage"]["completion_tokens"]
    assert record["params"]["max_tokens"] == 8
    text, spans = record["prompt"]["text"], record["prompt"]["spans"]
    said = [text[s["start"] : s["end"]] for s in spans if s["kind"] == "content"]
    assert said == ["You are brief.", "What is a mill?"]
    prompt = b"".join(bytes.fromhex(t["bytes"]) for t in record["tokens"]["prompt"])
    assert prompt.decode() == text
    for choice in answer["choices"]:
        own = [t for t in record["tokens"]["output"] if t["choice"] == choice["index"]]
        raw = b"".join(bytes.fromhex(token["bytes"]) for token in own)
        assert raw.decode().startswith(choice["message"]["content"])
        emitted = [t for t in record["text"] if t["choice"] == choice["index"]]
        assert "".join(t["emitted"] for t in emitted) == choice["message"]["content"]
        assert [t["token_index"] for t in emitted] == list(range(len(own)))
        drawn = [d["token"] for d in record["draws"] if d["choice"] == choice["index"]]
        assert drawn == [token["id"] for token in own]
    assert all(any(row["mine"] for row in step["rows"]) for step in record["steps"])
    assert record["steps"][0]["prefill_tokens"] >= 1
    kinds = [event["kind"] for event in record["blocks"]["events"]]
    assert kinds[-1] == "freed"
    assert {"shared", "allocated"} & set(kinds)
    assert "no logits" in record["draws_note"]


def test_the_list_has_light_records(shared_server: Server) -> None:
    name, answer = ask(shared_server.url, {"max_tokens": 3})
    listed = shown(shared_server.url, "requests?limit=1000")
    (light,) = [record for record in listed if record["id"] == name]
    assert not light["full"]
    assert light["output_tokens"] == answer["usage"]["completion_tokens"]
    assert listed == sorted(listed, key=lambda record: -record["created_s"])
    whole = shown(shared_server.url, f"requests/{name}")
    assert "tokens" not in whole
    assert "prompt" not in whole


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": ["a cat", "a dog"]}),
        ("/v1/completions", {"prompt": "a cat", "max_tokens": 0, "echo": True, "logprobs": 0}),
    ],
)
def test_times_where_nothing_is_drawn(
    path: str, body: dict[str, Any], shared_server: Server
) -> None:
    """What is wanted instead counts as the first token, and the last one."""
    head = {"content-type": "application/json", "x-request-id": f"undrawn{len(path)}"}
    status, _, _ = shared_server.request("POST", path, json.dumps(body).encode(), head)
    assert status == 200
    record = ended(shared_server.url, head["x-request-id"])
    times = record["times_ms"]
    assert times["submitted"] <= times["first_token"] <= times["last_token"] <= times["done"]
    assert record["ttft_ms"] == times["first_token"]
    assert record["timing"]["decode_ms"] >= 0


def test_requests_of_one_id(shared_server: Server) -> None:
    """Each has a record, whichever process served it and whichever is asked."""
    counts = [1, 2, 3, 4]
    for count in counts:
        assert ask(shared_server.url, {"max_tokens": count}, x_request_id="mine")[0] == "mine"
    listed = [one for one in shown(shared_server.url, "requests?limit=9") if one["id"] == "mine"]
    assert [one["output_tokens"] for one in listed] == counts[::-1]
    for _ in range(4):
        for asked, meant in [("mine", listed[0]), *((one["key"], one) for one in listed)]:
            told = shown(shared_server.url, f"requests/{asked}")
            assert (told["id"], told["key"]) == ("mine", meant["key"])
            assert told["usage"]["completion_tokens"] == meant["output_tokens"]
            assert told["same_id"] == [
                {"key": one["key"], "at_s": one["created_s"]} for one in listed if one != meant
            ]


def test_what_is_not_there_is_said(shared_server: Server) -> None:
    assert shared_server.get("/ui/api/requests/none")[1]["error"]["code"] == "request_not_found"
    assert shared_server.get("/ui/api/requests?limit=0")[0] == 400
    status, body = shared_server.request(
        "POST", "/v1/chat/completions", {"messages": CHAT}, {"x-headrace-record": "some"}
    )[::2]
    assert status == 400
    assert json.loads(body)["error"]["param"] == "X-Headrace-Record"


def test_stages_with_their_metrics(shared_server: Server) -> None:
    ask(shared_server.url, {"max_tokens": 3})
    timed = ("Prepare", "Tokenize", "Embed", "Schedule", "Prefill", "Attend", "Decode", "Sample")

    def values() -> dict[str, Any]:
        stages = shown(shared_server.url, "stages")
        assert [stage["number"] for stage in stages] == list(range(1, 12))
        return {stage["name"]: stage["value"] for stage in stages}

    shared_server.wait(lambda: all(values()[name]["count"] for name in timed), "their times")
    now = values()
    assert now["Route"] is None, "there is no gateway"
    assert now["KV cache"] >= 0
    assert 0 < now["Tokenize"]["p50"] <= now["Tokenize"]["p99"]


def test_the_fleet_while_it_works(shared_server: Server) -> None:
    """The live stream shows steps of a request that runs meanwhile, and the map of its blocks."""
    connection = http.client.HTTPConnection("127.0.0.1", shared_server.port, timeout=30)
    with ThreadPoolExecutor() as pool:
        connection.request("GET", "/ui/api/live")
        response = connection.getresponse()
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [json.loads(response.readline().removeprefix(b"data: "))]
        running = pool.submit(ask, shared_server.url, {"max_tokens": 1900, "ignore_eos": True})
        while len(events) < 2 or not any(event["last_steps"] for event in events):
            response.readline()
            events.append(json.loads(response.readline().removeprefix(b"data: ")))
        kv = shown(shared_server.url, "kv")
        running.result()
    connection.close()
    newest = events[-1]
    assert newest["kv"]["blocks"] == kv["blocks"] == len(base64.b64decode(kv["state"]))
    assert newest["tokens_per_s"] is not None
    assert all(step["start_ms"] <= 0 for step in newest["last_steps"])
    assert newest["device"]["rss_bytes"] > 10**6


def test_no_more_watch_than_may_though_they_come_at_once(shared_server: Server) -> None:
    """Nor does one that left keep its place, or one that came in vain take any."""
    places = MOST_WATCHERS * len(shared_server.apis)
    many = [
        http.client.HTTPConnection("127.0.0.1", shared_server.port, timeout=30)
        for _ in range(places + 16)
    ]
    for connection in many:
        connection.connect()
    for connection in many:
        connection.request("GET", "/ui/api/live")
    answers = [connection.getresponse() for connection in many]
    taken = [answer.status for answer in answers]
    for connection, answer in zip(many, answers, strict=True):
        answer.close()
        connection.close()
    assert set(taken) == {200, 503}
    assert taken.count(200) <= places

    def again() -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", shared_server.port, timeout=30)
        connection.request("GET", "/ui/api/live")
        with connection.getresponse() as answer:
            status = answer.status
        connection.close()
        return status == 200

    shared_server.wait(again, "a place")


@pytest.mark.model
def test_draws_of_a_real_model_and_its_neighbours(default_server: ServeProcess) -> None:
    """Recording changes no token, of the request or of others in the same steps."""
    url = default_server.url
    bodies = [
        {"max_tokens": 12, "seed": i, "temperature": i / 4, "top_p": 0.9, "top_k": 30}
        for i in range(4)
    ]

    def answers(**headers: str) -> list[tuple[str, dict[str, Any]]]:
        with ThreadPoolExecutor(4) as pool:
            jobs = [pool.submit(ask, url, body, **headers) for body in bodies[:2]]
            jobs += [pool.submit(ask, url, body) for body in bodies[2:]]
            return [job.result() for job in jobs]

    plain, recorded = answers(), answers(**FULL)
    texts = [[a["choices"][0]["message"]["content"] for _, a in some] for some in (plain, recorded)]
    assert texts[0] == texts[1]
    greedy, drawn = (ended(url, name) for name, _ in recorded[:2])
    assert [stage["name"] for stage in greedy["draws"][0]["stages"]] == ["logits"]
    for draw in greedy["draws"]:
        assert draw["greedy"]
        assert draw["stages"][0]["top"][0]["id"] == draw["token"]
    for draw in drawn["draws"]:
        stages = {stage["name"]: stage for stage in draw["stages"]}
        assert list(stages) == ["logits", "temperature", "top_k", "top_p", "softmax"]
        kept = [stage["kept"] for stage in draw["stages"]]
        assert kept == sorted(kept, reverse=True)
        assert stages["top_k"]["kept"] == 30
        assert 0 <= draw["uniform"] < 1
        odds = stages["softmax"]
        if odds["kept"] <= len(odds["top"]):
            assert draw["token"] in [one["id"] for one in odds["top"]]
            assert sum(one["value"] for one in odds["top"]) == pytest.approx(1.0)
    assert drawn["positions"]["rotary_dim"] == 64
    assert drawn["blocks"]["table"]
