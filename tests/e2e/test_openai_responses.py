"""/v1/responses with OpenAI's own client, on the fake model behind two HTTP processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.e2e.serving import Server

PATH = "/v1/responses"
SEED: dict[str, Any] = {"seed": 4}


@pytest.fixture
def server(shared_server: Server) -> Server:
    return shared_server


@pytest.fixture
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0) as made:
        yield made


def streamed(server: Server, **fields: Any) -> list[dict[str, Any]]:
    """The events; checks names and numbers."""
    status, headers, raw = server.request("POST", PATH, {**fields, "stream": True})
    assert (status, headers["content-type"].split(";")[0]) == (200, "text/event-stream"), raw
    blocks = [block.split("\n") for block in raw.decode().strip().split("\n\n")]
    datas = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert [name.removeprefix("event: ") for name, _ in blocks] == [d["type"] for d in datas]
    assert [data["sequence_number"] for data in datas] == list(range(len(datas)))
    return datas


def test_whole(client: OpenAI) -> None:
    answer = client.responses.create(
        model="fake", input="hi", max_output_tokens=20, instructions="Be brief.",
        metadata={"a": "b"}, temperature=0.5, extra_body={**SEED, "ignore_eos": True},
    )  # fmt: skip
    assert answer.object == "response"
    assert (answer.status, answer.incomplete_details.reason) == (  # type: ignore[union-attr]
        "incomplete", "max_output_tokens",
    )  # fmt: skip
    assert len(answer.output_text) == answer.usage.output_tokens == 20  # type: ignore[union-attr]
    assert (answer.instructions, answer.metadata, answer.temperature) == (
        "Be brief.", {"a": "b"}, 0.5,
    )  # fmt: skip
    kept = client.responses.retrieve(answer.id)
    assert kept.model_dump() == answer.model_dump()


def test_a_stream_is_the_whole_answer_in_order(client: OpenAI, server: Server) -> None:
    fields: dict[str, Any] = {"model": "fake", "input": "hi", "max_output_tokens": 60}
    whole = client.responses.create(**fields, extra_body=SEED)
    events = streamed(server, **fields, **SEED)
    kinds = [event["type"] for event in events]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.content_part.added",
    ]  # fmt: skip
    assert kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done",
        f"response.{whole.status}",
    ]  # fmt: skip
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert "".join(event["delta"] for event in events[4:-4]) == whole.output_text
    last = events[-1]["response"]
    assert last["output"][0] == events[-2]["item"]
    assert last["usage"]["output_tokens"] == whole.usage.output_tokens


async def test_async_and_a_chain_over_all_processes(server: Server) -> None:
    async with AsyncOpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0) as client:
        items: list[Any] = []
        previous = None
        for turn in range(6):  # each may land on another process
            said = [{"role": "user", "content": f"turn {turn}"}]
            items += said
            answer = await client.responses.create(
                model="fake", input=said, previous_response_id=previous,  # type: ignore[arg-type]
                max_output_tokens=10, extra_body=SEED,
            )  # fmt: skip
            whole = await client.responses.create(
                model="fake", input=items, store=False, max_output_tokens=10, extra_body=SEED
            )
            assert answer.output_text == whole.output_text
            assert answer.usage.input_tokens == whole.usage.input_tokens  # type: ignore[union-attr]
            assert not json.loads(whole.to_json())["store"]
            items += [item.model_dump() for item in answer.output]
            previous = answer.id
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(whole.id)
            for _ in range(3):
                assert (await client.responses.retrieve(answer.id)).id == answer.id


def test_delete_and_list(client: OpenAI) -> None:
    answer = client.responses.create(
        model="fake", max_output_tokens=3,
        input=[{"role": "user", "content": f"{i}"} for i in range(5)],
    )  # fmt: skip
    listed = client.responses.input_items.list(answer.id, limit=2)
    texts = [item.to_dict()["content"][0]["text"] for item in listed]  # type: ignore[index]
    assert texts == ["4", "3", "2", "1", "0"], "newest first, page after page"
    client.responses.delete(answer.id)
    for gone in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError) as caught:
            gone(answer.id)
        assert caught.value.code == "response_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model="fake", input="x", previous_response_id=answer.id)
    assert refused.value.code == "previous_response_not_found"


def test_a_json_schema(client: OpenAI) -> None:
    schema = {
        "type": "object", "properties": {"kind": {"enum": ["cat", "dog"]}},
        "required": ["kind"], "additionalProperties": False,
    }  # fmt: skip
    form: Any = {"type": "json_schema", "name": "pet", "schema": schema, "strict": True}
    fields: dict[str, Any] = {"model": "fake", "input": "A pet.", "text": {"format": form}}
    answer = client.responses.create(**fields, extra_body=SEED)
    assert json.loads(answer.output_text)["kind"] in ("cat", "dog")
    assert answer.status == "completed"
    with client.responses.stream(**fields, extra_body=SEED) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_text == answer.output_text
    assert kinds[-1] == "response.completed"


def test_logprobs(client: OpenAI, server: Server) -> None:
    fields: dict[str, Any] = {
        "model": "fake", "input": "hi", "max_output_tokens": 8, "top_logprobs": 2,
        "include": ["message.output_text.logprobs"],
    }  # fmt: skip
    (part,) = client.responses.create(**fields, extra_body=SEED).output[0].content
    assert "".join(one.token for one in part.logprobs) == part.text
    assert all(len(one.top_logprobs) == 2 for one in part.logprobs)
    events = streamed(server, **fields, **SEED)
    told = [one for e in events if e["type"].endswith("text.delta") for one in e["logprobs"]]
    assert told == [one.model_dump() for one in part.logprobs]


def test_items_render_as_chat_does(server: Server) -> None:
    items = [
        {"role": "developer", "content": "d"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "u"}]},
        {"type": "reasoning", "id": "rs", "summary": [],
         "content": [{"type": "reasoning_text", "text": "r"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "t"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "42"},
        {"type": "function_call", "call_id": "e", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "e", "output": "43"},
    ]  # fmt: skip
    call: dict[str, Any] = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    turns = [
        {"role": "system", "content": "i"},
        {"role": "developer", "content": "d"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "t", "reasoning_content": "r",
         "tool_calls": [{**call, "id": "c"}]},
        {"role": "tool", "tool_call_id": "c", "content": "42"},
        {"role": "assistant", "content": None, "tool_calls": [{**call, "id": "e"}]},
        {"role": "tool", "tool_call_id": "e", "content": "43"},
    ]  # fmt: skip
    status, answer = server.post(
        PATH, {"input": items, "instructions": "i", "max_output_tokens": 1, "store": False}
    )
    assert status == 200, answer
    count = server.post("/tokenize", {"messages": turns})[1]["count"]
    assert answer["usage"]["input_tokens"] == count


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"input": [{"role": "nobody", "content": "x"}]}, "input"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input"),
        ({"input": "x" * 5000}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 5000}, "input"),
        ({"temperature": 3}, "temperature"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["x"]}, "include"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "a b", "schema": {}}}}, "text"),
        ({"text": {"verbosity": "low"}}, "text"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"metadata": {"a": 1}}, "metadata[...]"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ],
)  # fmt: skip
def test_refusals_name_the_callers_field(server: Server, fields: Any, param: str) -> None:
    status, answer = server.post(PATH, {"input": "hi", "max_output_tokens": 2, **fields})
    assert (status, answer["error"]["param"]) == (400, param), answer
