"""The official client, sync and async, streaming and not; a crowd of which a third leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from tests.e2e.serving import Server

CROWD = 64
STARTED = "headrace_requests_started_total{"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(workers=2, fake_step_ms=5.0, max_num_seqs=32, api_key=("sesame",)) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.url + "/v1", api_key="sesame", max_retries=0) as made:
        yield made


def test_sync(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]
    answer = client.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "hi"}], max_tokens=12, seed=1
    )
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    text = client.completions.create(model="fake", prompt="hi", max_tokens=12, seed=1)
    assert text.choices[0].text
    chunks = client.chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=12,
        seed=1,
        stream=True,
        stream_options={"include_usage": True},
    )
    parts, usage = [], None
    for chunk in chunks:
        usage = chunk.usage or usage
        parts += [choice.delta.content or "" for choice in chunk.choices]
    assert "".join(parts) == answer.choices[0].message.content
    assert usage is not None
    assert usage.completion_tokens == answer.usage.completion_tokens


def test_errors_are_the_clients_own_classes(server: Server, client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="other"):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="fake", prompt="x", temperature=3)
    assert caught.value.param == "temperature"
    with (
        OpenAI(base_url=server.url + "/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError) as refused,
    ):
        stranger.models.list()
    assert refused.value.code == "invalid_api_key"


def test_only_probes_need_no_key(server: Server) -> None:
    assert server.get("/health")[0] == server.get("/ready")[0] == 200
    for path in ("/v1/models", "/metrics", "/version", "/nothing"):
        assert server.get(path)[0] == 401
    for key in ("Bearer sesame2", "Bearer", "sesame", "Basic sesame", "Bearer s\u00e9same"):
        status, headers, _ = server.request("GET", "/version", headers={"authorization": key})
        assert (status, headers["www-authenticate"]) == (401, "Bearer")
    assert server.request("GET", "/version", headers={"authorization": "bearer sesame"})[0] == 200


def test_a_websocket_needs_the_key_too(server: Server) -> None:
    url = f"ws://127.0.0.1:{server.port}/v1/chat/ws"
    with pytest.raises(InvalidStatus) as refused, connect(url, proxy=None):
        pass
    assert refused.value.response.status_code == 401
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "stream": False}
    for name, value in (("authorization", "Bearer sesame"), ("x-api-key", "sesame")):
        with connect(url, proxy=None, additional_headers={name: value}) as socket:
            socket.send(json.dumps(body))
            assert json.loads(socket.recv(timeout=30))["type"] == "response"


async def test_a_crowd_of_which_a_third_leaves(server: Server) -> None:
    bearer = {"authorization": "Bearer sesame"}

    def gauge(name: str) -> float:
        text = server.request("GET", "/metrics", headers=bearer)[2].decode()
        return sum(float(row.split()[-1]) for row in text.splitlines() if row.startswith(name))

    started = gauge(STARTED) + 6 + CROWD  # when all were taken
    async with AsyncOpenAI(
        base_url=server.url + "/v1", api_key="sesame", max_retries=0, timeout=60
    ) as client:

        async def ask(i: int, streamed: bool) -> str:
            if not streamed:
                answer = await client.completions.create(
                    model="fake", prompt=f"q{i}", max_tokens=40, seed=i, extra_body=EXTRA
                )
                return answer.choices[0].text
            chunks = await client.completions.create(
                model="fake", prompt=f"q{i}", max_tokens=40, seed=i, stream=True, extra_body=EXTRA
            )
            return "".join([chunk.choices[0].text async for chunk in chunks])

        async def leave(i: int) -> None:
            if i % 2:  # while streaming
                chunks = await client.completions.create(
                    model="fake", prompt=f"q{i}", max_tokens=3000, stream=True, extra_body=EXTRA
                )
                seen = 0
                async for _ in chunks:
                    seen += 1
                    if seen == 5:
                        break
                await chunks.close()
            else:  # while waiting for a whole answer
                task = asyncio.create_task(
                    client.completions.create(
                        model="fake", prompt=f"q{i}", max_tokens=3000, extra_body=EXTRA
                    )
                )
                while await asyncio.to_thread(gauge, STARTED) < started:
                    assert not task.done()
                    await asyncio.sleep(0.1)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

        alone = [await ask(i, bool(i % 2)) for i in range(6)]
        stay = [ask(i, bool(i % 2)) for i in range(CROWD - CROWD // 3)]
        results = await asyncio.gather(*stay, *[leave(1000 + i) for i in range(CROWD // 3)])
        assert [text for text in results[: len(stay)] if not text] == []
        assert results[:6] == alone
    server.wait(lambda: gauge("headrace_requests_running{") == 0, "nothing running")
    server.wait(lambda: gauge("headrace_kv_blocks_used{") == 0, "no block held")
    assert gauge(STARTED) == gauge("headrace_requests_finished_total{")
    aborted = [
        row
        for row in server.request("GET", "/metrics", headers=bearer)[2].decode().splitlines()
        if row.startswith("headrace_requests_finished_total{") and 'reason="abort"' in row
    ]
    assert sum(float(row.split()[-1]) for row in aborted) == CROWD // 3


EXTRA = {"ignore_eos": True}
