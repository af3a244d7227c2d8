"""Prompts tokenised in the gateway: the tokens of the worker, given to the right one alone."""

from __future__ import annotations

import json
import tempfile
import threading
from array import array
from typing import Any

import pytest

from headrace.errors import ConfigError, ModelError
from headrace.gateway import tokenising
from headrace.gateway.tokenising import ModelTokens, load_models
from headrace.kv import events
from headrace.kv.prefix import block_digest, root_digest
from tests.unit.gateway_rig import (
    Asked,
    Call,
    Mock,
    Out,
    call,
    chat,
    gateway,
    get,
    metric,
    until,
    usage_of,
)
from tests.unit.kv_place import Place

TEXT = "What is a headrace? " * 20


def fake() -> dict[str, ModelTokens]:
    return load_models(["m=fake"], 2**20, print)


def test_the_tokens_are_those_of_a_server() -> None:
    made = fake()["m"]
    body = b'{"messages":[{"role":"user","content":[{"type":"text","text":"hi"}]}],"max_tokens":3}'
    ids = made.read("/v1/chat/completions", body)
    assert not isinstance(ids, str)
    assert ids.tolist() == [257, *b"user\nhi", 258, 10, 257, *b"assistant\n"]
    assert made.read("/v1/completions", b'{"prompt":"ab"}') == array("I", [97, 98])
    tools = b'{"messages":[{"role":"user","content":"hi"}],"tools":[{"function":{"name":"f"}}]%b}'
    shown = made.read("/v1/chat/completions", tools % b"")
    hidden = made.read("/v1/chat/completions", tools % b',"tool_choice":"none"')
    assert not isinstance(shown, str)
    assert hidden == ids
    assert len(shown) > len(ids)


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b'{"messages":[]}',
        b'{"messages":"hi"}',
        b'{"messages":[{"role":"user","content":"\xff"}]}',
        b'{"messages":[{"role":"wizard","content":"hi"}]}',
        b'{"messages":[{"role":"user","content":[{"type":"image_url"}]}]}',
        b'{"messages":[{"role":"user","content":"hi"}],"chat_template":"x"}',
        b'{"messages":[{"role":"user","content":"hi"}],"reasoning_effort":"low"}',
        b'{"messages":[{"role":"user","content":"hi"}],"chat_template_kwargs":{"tools":1}}',
    ],
)
def test_what_only_the_worker_can_judge(body: bytes) -> None:
    assert isinstance(fake()["m"].read("/v1/chat/completions", body), str)


def test_sources_that_are_none() -> None:
    with pytest.raises(ConfigError, match="write NAME=SOURCE"):
        load_models(["m"], 2**20, print)
    with pytest.raises(ModelError, match="no/such"):
        load_models(["m=/no/such"], 2**20, print)


async def test_ids_go_to_the_worker_that_would_make_the_same_and_to_no_other() -> None:
    models = fake()
    for identity, given in ((models["m"].identity, True), ("0" * 32, False), (None, False)):
        async with (
            Mock(card={"tokenizer": identity} if identity else {}) as worker,
            gateway(worker, models=models) as made,
        ):
            reply = await call(made.port, chat("hi", stream=True))
            assert reply.status == 200
            (asked,) = worker.asked
            assert ("prompt_ids" in asked.json()) == given
            assert asked.json()["messages"] == chat("hi")["messages"]
            if given:
                said = asked.json()["prompt_ids"]
                assert said["tokenizer"] == identity
                assert bytes(said["ids"][1:8]) == b"user\nhi"
            assert await metric(made, "tokenised_total", outcome="ids") == 1


async def test_other_bodies_pass_as_they_are() -> None:
    models = fake()
    async with (
        Mock(card={"tokenizer": models["m"].identity}) as worker,
        gateway(worker, models=models) as made,
    ):
        own = chat("hi", prompt_ids={"tokenizer": "x", "ids": [1]})
        await call(made.port, own)
        await call(made.port, {"model": "m", "messages": [{"role": "wizard"}]})
        await call(made.port, {"model": "m", "prompt": [1, 2]}, "/v1/completions")
        goes_on = {"model": "m", "input": "hi", "previous_response_id": "r"}
        await call(made.port, goes_on, "/v1/responses", {"x-request-id": "r4"})
        assert worker.asked[0].json() == own
        assert all("prompt_ids" not in asked.json() for asked in worker.asked[1:])
        assert await metric(made, "tokenised_total", outcome="worker") == 2
        assert await metric(made, "tokenised_total", outcome="ids") == 0
        told = (await get(made.port, "/gateway/decisions/r4")).json()
        assert told["untokenised"].startswith("previous_response_id: ")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/responses", {"input": [{"role": "user", "content": "hi"}]}),
    ],
)
async def test_every_conversation_is_tokenised(path: str, body: dict[str, Any]) -> None:
    models = fake()
    async with (
        Mock(card={"tokenizer": models["m"].identity}) as worker,
        gateway(worker, models=models) as made,
    ):
        sent = {"model": "m", **body}
        await call(made.port, sent, path, {"x-request-id": "r"})
        (asked,) = worker.asked
        said = asked.json()
        assert said.pop("prompt_ids")["ids"] == [257, *b"user\nhi", 258, 10, 257, *b"assistant\n"]
        assert said == sent
        told = (await get(made.port, "/gateway/decisions/r")).json()
        assert (told["untokenised"], told["prompt_tokens_estimated"]) == (None, 21)


async def test_streams_go_on_while_a_prompt_is_tokenised_and_a_client_may_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread hangs: others are served, too many are not queued, who leaves is forgotten."""
    models, held = fake(), threading.Event()
    real = ModelTokens.read

    def slow(self: ModelTokens, path: str, body: bytes) -> array[int] | str:
        if b"slow" in body:
            held.wait(20)
        return real(self, path, body)

    monkeypatch.setattr(ModelTokens, "read", slow)
    monkeypatch.setattr(tokenising, "MAX_WAITING", 2)
    async with Mock() as worker, gateway(worker, models=models) as made:
        try:
            async with Call(made.port) as one, Call(made.port) as two:
                await one.send(chat("slow"))
                await two.send(chat("slow"))
                await until(lambda: len(made.exchanges) == 2, "both wait")
                assert (await call(made.port, chat("no room"))).status == 200
                assert await metric(made, "tokenised_total", outcome="busy") == 1
                assert len(worker.asked) == 1
                two.leave()
                await until(lambda: len(made.exchanges) == 1, "one left")
                held.set()
                assert (await one.whole()).status == 200
        finally:
            held.set()
    assert len(worker.asked) == 2


async def test_a_foreign_engine_stays_on_text_chunks() -> None:
    """It says nothing of tokens and events: history alone predicts, and it gets no ids."""
    async with Mock() as foreign, gateway(foreign, models=fake()) as made:
        for name in ("r1", "r2"):
            reply = await call(made.port, chat(TEXT * 40), headers={"x-request-id": name})
            assert reply.status == 200
        assert all("prompt_ids" not in asked.json() for asked in foreign.asked)
        told = (await get(made.port, "/gateway/decisions/r2")).json()
        (row,) = told["attempts"][0]["candidates"]
        assert (row["index"], row["predicted_cached_tokens"] > 0) == ("fallback", True)
        assert told["cached_tokens"]["silent_miss"], "it says that it found nothing"
        assert await metric(made, "silent_misses_total", state="fallback") == 1
        assert await metric(made, "worker_index", state="fallback") == 1


async def test_events_and_tokens_meet() -> None:
    """Two workers with events, one without; predictions are exact where they can be, and a
    decision shows what came of them.
    """
    models = fake()
    body = chat(TEXT)
    ids = models["m"].read("/v1/chat/completions", _raw(body))
    assert not isinstance(ids, str)
    blocks = len(ids) // 2

    async def hit(asked: Asked, out: Out) -> None:
        usage = usage_of(len(ids), 1, 2 * blocks)
        await out.json({"choices": [{"message": {"content": "a"}}], "usage": usage})

    with tempfile.TemporaryDirectory(prefix="hr") as folder:
        place = Place(folder)
        publisher = place.publisher()
        digests, at = [], root_digest("", "")
        for start in range(0, 2 * blocks, 2):
            at = block_digest(at, ids[start : start + 2])
            digests.append(at)
        tokens = ids[: 2 * blocks].tolist()
        publisher.put([events.Stored(events.Scope(), None, digests, tokens)])
        card = {
            "tokenizer": models["m"].identity,
            "kv_events": {"endpoint": place.endpoint, "replay_endpoint": place.replay_endpoint},
        }
        try:
            async with (
                Mock(hit, card=card) as knows,
                Mock() as foreign,
                gateway(foreign, knows, models=models) as made,
            ):
                await until(lambda: made.fleet.beliefs.state(knows.url) == "exact", "exact")
                reply = await call(made.port, body, headers={"x-request-id": "r1"})
                assert reply.status == 200
                assert (len(knows.asked), len(foreign.asked)) == (1, 0)
                told = (await get(made.port, "/gateway/decisions/r1")).json()
                rows = {row["name"]: row for row in told["attempts"][0]["candidates"]}
                assert rows[knows.url]["index"] == "exact"
                assert rows[knows.url]["predicted_cached_tokens"] == 2 * blocks
                assert rows[foreign.url]["index"] == "fallback"
                assert rows[foreign.url]["predicted_cached_tokens"] == 0
                assert told["prompt_tokens_estimated"] == len(ids)
                assert told["cached_tokens"] == {
                    "index": "exact",
                    "predicted": 2 * blocks,
                    "confirmed": 2 * blocks,
                    "silent_miss": False,
                }
                assert await metric(made, "predictions_total", state="exact") == 1
                publisher.put([events.Cleared()])
                await until(lambda: not made.fleet.beliefs.blocks.blocks(knows.url), "cleared")
                workers = (await get(made.port, "/gateway/workers")).json()["workers"]
                row = next(row for row in workers if row["name"] == knows.url)
                said = row["kv_events"]
                assert (said["state"], said["batches"], said["next_batch"]) == ("exact", 2, 2)
                told_now = made.fleet.beliefs.tell
                await until(
                    lambda: (told_now(knows.url) or {})["expected_blocks"] == 0, "none on its way"
                )
                assert await metric(made, "worker_index", state="exact") == 1
        finally:
            publisher.stop()


def _raw(body: Any) -> bytes:
    return json.dumps(body).encode()
