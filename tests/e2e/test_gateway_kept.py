"""What one worker keeps, asked for through gateways that share nothing: responses and streams."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from headrace import homes
from tests.e2e.serving import Server
from tests.e2e.test_gateway import GatewayProcess
from tests.e2e.test_resume import CHAT, RESPONSES, Reader, body, last_id

PLAIN = {"model": "fake", "prompt": "hi", "max_tokens": 2}
ASK = {"model": "fake", "input": "hi", "max_output_tokens": 4}
TRIES = 20  # requests go to two workers in turn: the second at the latest goes to the other one


@pytest.fixture(scope="module")
def keeper() -> Iterator[Server]:
    """The worker whose responses and streams are asked for."""
    with Server(fake_step_ms=5.0, stream_resume_s=60.0) as server:  # a stream lasts ten seconds
        yield server


@pytest.fixture
def gateways(keeper: Server, shared_server: Server) -> Iterator[list[GatewayProcess]]:
    """Two, which take turns among the workers."""
    flags = ("--policy", "round_robin", "--worker", keeper.url, "--worker", shared_server.url)
    with ExitStack() as stack:
        both = [stack.enter_context(GatewayProcess(*flags)) for _ in range(2)]
        for gateway in both:
            gateway.wait_up(2)
        yield both


def ask(gateway: GatewayProcess, method: str, path: str, sent: Any = None) -> tuple[int, Any]:
    status, raw = gateway.ask(method, path, sent)
    return status, json.loads(raw)


def keep(gateway: GatewayProcess, keeper: Server) -> str:
    """A response that the keeper has."""
    for _ in range(TRIES):
        status, said = ask(gateway, "POST", RESPONSES, ASK)
        assert (status, said["store"]) == (200, True)
        if homes.tag_in_response(said["id"]) == homes.tag_of(keeper.url):
            return str(said["id"])
    raise AssertionError("the keeper got none")


def stream(gateway: GatewayProcess, keeper: Server) -> Reader:
    """One that runs at the keeper."""
    for _ in range(TRIES):
        reader = Reader(gateway, CHAT, body(model="fake", max_tokens=2000))
        if homes.tag_in_stream(reader.name) == homes.tag_of(keeper.url):
            return reader
        reader.close()
    raise AssertionError("the keeper got none")


def test_kept_responses_and_streams(gateways: list[GatewayProcess], keeper: Server) -> None:
    name = keep(gateways[0], keeper)
    seen_tokens = 0
    for turn in range(20):
        gateway = gateways[turn % 2]
        assert ask(gateway, "POST", "/v1/completions", PLAIN)[0] == 200  # the turns move on
        status, said = ask(gateway, "POST", RESPONSES, {**ASK, "previous_response_id": name})
        assert status == 200, said
        assert said["usage"]["input_tokens"] > seen_tokens, "the conversation is there"
        seen_tokens, name = said["usage"]["input_tokens"], said["id"]
    for gateway in gateways:
        assert ask(gateway, "GET", f"{RESPONSES}/{name}") == (200, said)
        items = ask(gateway, "GET", f"{RESPONSES}/{name}/input_items")[1]["data"]
        assert [item["role"] for item in items] == ["user"]
    assert ask(gateways[0], "DELETE", f"{RESPONSES}/{name}")[1]["deleted"]
    status, said = ask(gateways[1], "GET", f"{RESPONSES}/{name}")
    assert (status, said["error"]["code"]) == (404, "response_not_found")

    name = keep(gateways[0], keeper)
    reader = stream(gateways[0], keeper)
    seen = reader.events(3)
    reader.close()
    with gateways[0]:  # it ends; what it knew was in the ids
        pass
    reader = Reader(gateways[1], f"/v1/streams/{reader.name}", last=last_id(seen))
    seen += reader.events(3)
    reader.close()
    (card,) = keeper.get("/v1/models")[1]["data"]
    assert card["stream_resume_s"] > 0
    elsewhere = Reader(gateways[1], RESPONSES, {"model": "fake"}, last=last_id(seen))
    error = json.loads(elsewhere.response.read())["error"]
    elsewhere.close()
    assert (elsewhere.response.status, error["param"]) == (400, "Last-Event-ID")
    assert f"at {CHAT}, and this is {RESPONSES}:" in error["message"]
    drained = {"worker": keeper.url}
    assert ask(gateways[1], "POST", "/gateway/drain", drained)[0] == 200
    reader = Reader(gateways[1], CHAT, {"model": "fake"}, last=last_id(seen))
    seen += reader.events(3)
    assert ask(gateways[1], "POST", "/gateway/drain", {**drained, "drain": False})[0] == 200
    numbers = [int(last_id([event]).rpartition(".")[2]) for event in seen]
    assert numbers == list(range(1, 10))
    assert ask(gateways[1], "DELETE", f"/v1/streams/{reader.name}")[1]["ended"]
    reader.close()

    os.kill(keeper.apis[0].pid, signal.SIGKILL)
    gateways[1].wait_up(1)
    going_on = {**ASK, "previous_response_id": name}
    for wants in (("POST", RESPONSES, going_on), ("GET", f"{RESPONSES}/{name}")):
        status, said = ask(gateways[1], *wants)
        assert (status, said["error"]["code"]) == (503, "no_worker")
        assert name in said["error"]["message"]
    assert ask(gateways[1], "POST", RESPONSES, ASK)[0] == 200  # the other serves on
