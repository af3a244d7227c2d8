"""The served OpenAPI document: every route is in it, and the server keeps to it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from headrace.api.app import ROUTES
from headrace.api.openapi import BODIES
from tests.e2e.fuzz_http import fuzz, small_server
from tests.e2e.serving import Server


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with small_server() as running:
        yield running


@pytest.fixture(scope="module")
def document(server: Server) -> dict[str, Any]:
    status, made = server.get("/openapi.json")
    assert status == 200
    return dict(made)


def test_every_route_and_every_body(document: dict[str, Any]) -> None:
    for route in ROUTES:
        methods = document["paths"][route.path.replace(":path}", "}")]
        for method in (route.methods or set()) - {"HEAD"}:
            assert ("requestBody" in methods[method.lower()]) == (method == "POST"), route.path
    operations = [one for methods in document["paths"].values() for one in methods.values()]
    assert all(operation["summary"] for operation in operations)
    assert len({operation["operationId"] for operation in operations}) == len(operations)
    for path, (kind, streams) in BODIES.items():
        operation = document["paths"][path]["post"]
        shape = operation["requestBody"]["content"]["application/json"]["schema"]
        name = shape["$ref"].rpartition("/")[2]
        assert set(document["components"]["schemas"][name]["properties"]) == set(
            kind.__struct_fields__
        )
        assert ("text/event-stream" in operation["responses"]["200"]["content"]) == streams
        assert ("stream" in kind.__struct_fields__) == streams


@pytest.mark.parametrize(
    ("path", "body", "legal"),
    [
        ("/v1/completions", {"prompt": "x", "n": 128}, True),
        ("/v1/completions", {"prompt": "x", "n": 129}, False),
        ("/v1/completions", {"prompt": "x", "model": "another"}, False),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, True),
        ("/v1/chat/completions", {"messages": []}, False),
        ("/v1/chat/completions", {"messages": [{"role": "wizard", "content": "x"}]}, False),
        ("/v1/chat/completions", {"messages": [{"role": "user"}], "temperature": 3}, False),
        ("/v1/responses", {"input": "x"}, True),
        ("/v1/responses", {"input": 1}, False),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}, True),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}, False),
        ("/detokenize", {}, False),
    ],
)
def test_its_bodies_say_what_the_server_says(
    server: Server, document: dict[str, Any], path: str, body: dict[str, Any], legal: bool
) -> None:
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    whole = {**schema, "components": document["components"]}
    Draft202012Validator.check_schema(whole)
    assert Draft202012Validator(whole).is_valid(body) == legal
    if not legal:
        status, answer = server.post(path, body)
        assert status in (400, 404), answer


def test_a_short_seeded_run_of_schemathesis(server: Server) -> None:
    count, _ = fuzz(
        server, "--phases", "fuzzing", "--max-examples", "4", "--generation-deterministic"
    )
    assert count >= 40
