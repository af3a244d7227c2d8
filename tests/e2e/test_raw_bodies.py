"""Bodies that are no JSON, or JSON that nobody meant: a 4xx in the right shape, no more."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.api.openapi import BODIES
from tests.e2e.serving import Server

SAID = [{"role": "user", "content": "x"}]
LEGAL: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": SAID, "max_tokens": 1},
    "/v1/completions": {"prompt": "x", "max_tokens": 1},
    "/v1/responses": {"input": "x", "max_output_tokens": 1, "store": False},
    "/v1/messages": {"model": "fake", "messages": SAID, "max_tokens": 1},
    "/v1/messages/count_tokens": {"model": "fake", "messages": SAID},
    "/v1/embeddings": {"input": "x"},
    "/classify": {"input": "x"},
    "/score": {"text_1": "x", "text_2": "y"},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [65]},
}
DEEP = 20_000
MEMORY_BYTES = 24 * 2**20  # that an allocator may keep; each round sends as many bytes of nonsense


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(max_num_seqs=8, max_model_len=512) as running:
        yield running
        running.wait_idle()


class Line:
    """One connection for many requests; counts those that had to be opened."""

    def __init__(self, server: Server) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        self.opened = 0

    def post(self, path: str, raw: bytes) -> tuple[int, bytes]:
        if self._connection.sock is None:
            self.opened += 1
        self._connection.request("POST", path, raw, {"content-type": "application/json"})
        response = self._connection.getresponse()
        return response.status, response.read()

    def close(self) -> None:
        self._connection.close()


def wrong_bodies(body: dict[str, Any]) -> Iterator[bytes]:
    """None of them may be answered with a 200."""
    raw = json.dumps(body).encode()
    yield from (raw[:cut] for cut in range(len(raw)))
    yield from (raw + tail for tail in (b"x", b"}", b"\0", b"{}", b"\xff"))
    yield from (b"\0" + raw, b"\xef\xbb\xbf" + raw, raw.decode().encode("utf-16"), b"\xff" * 100)
    yield from (b"null", b"1", b'"x"', b"[]", b"[" * DEEP, b"{" * DEEP, b'{"a":' * DEEP)
    yield b'{"a":' + b"[" * DEEP + b"]" * DEEP + b"," + raw[1:]
    yield raw[:-1] + b', "x": NaN}'
    yield raw[:-1] + b', "x": -Infinity}'
    yield raw[:-1] + b', "x": 1e999}'
    yield raw[:-1] + b', "x": 01}'
    yield raw[:-1] + b", 'x': 1}"
    yield raw[:-1] + b', "x": "\x00"}'  # a control character as it is
    yield raw[:-1] + b', "x": "\\ud800"}'
    yield raw[:-1] + b', "x": "\xed\xa0\x80"}'  # a surrogate in UTF-8
    yield raw[:-1] + b', "x": "\xc3"}'


def odd_values() -> Iterator[bytes]:
    """For every field: right for some, and then a 200."""
    yield from (b"null", b"true", b"[]", b"{}", b'""', b"-1", b"1.5", b'"x"', b"[null]")
    yield from (b"9" * 400, b"1" + b"0" * 18, b"1e308", b"[" * 500 + b"]" * 500, b'"\\u0000"')


def refused(path: str, raw: bytes, status: int, answer: bytes) -> None:
    assert 400 <= status < 500, (path, raw[:100], status, answer[:300])
    error = json.loads(answer)["error"]
    assert error["message"], (path, raw[:100])
    assert len(answer) < 3000, "it does not send the body back"


def resident_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


def counts(server: Server) -> list[float]:
    """What the engine did so far."""
    names = ("headrace_requests_started_total", "headrace_steps_total", "headrace_kv_blocks_used")
    return [server.metric(name) for name in names]


def test_every_route_has_a_legal_body_here(server: Server) -> None:
    assert set(LEGAL) == set(BODIES)
    line = Line(server)
    for path, body in LEGAL.items():
        status, answer = line.post(path, json.dumps(body).encode())
        assert status in (200, 400), (path, answer)
        assert status == 200 or path == "/score", answer  # the fake's head has three labels
    line.close()


def test_what_is_no_json_never_reaches_the_engine(server: Server) -> None:
    server.wait_idle()
    line, pids = Line(server), [server.apis[0].pid, server.engine.pid]

    def one_round() -> None:
        for path, body in LEGAL.items():
            for raw in wrong_bodies(body):
                refused(path, raw, *line.post(path, raw))

    one_round()  # fills what is kept: allocators, caches of messages
    before, held = counts(server), [resident_bytes(pid) for pid in pids]
    one_round()
    assert counts(server) == before
    for pid, old in zip(pids, held, strict=True):
        assert resident_bytes(pid) - old < MEMORY_BYTES
    line.close()
    assert line.opened == 1, "a body that is wrong does not cost the connection"


@pytest.mark.parametrize("path", LEGAL)
def test_any_value_of_any_field_is_taken_or_refused(server: Server, path: str) -> None:
    line, body = Line(server), LEGAL[path]
    for field in BODIES[path][0].__struct_fields__:
        rest = {name: value for name, value in body.items() if name != field}
        for value in odd_values():
            raw = (json.dumps({**rest, "~": 0})[:-3] + f"0, {json.dumps(field)}: ").encode()
            raw += value + b"}"
            status, answer = line.post(path, raw)
            if status != 200:
                refused(path, raw, status, answer)
    line.close()


INTERNAL = (
    "handle", "adapter", "arrived_s", "block_table", "computed", "generation", "row", "slot",
    "bootstrap_host", "bootstrap_port", "bootstrap_room", "kv_transfer_params",
    "disagg_prefill_dp_rank", "data_parallel_rank", "session_params", "rid", "input_embeds",
    "return_hidden_states",
    "custom_logit_processor", "lora_path", "lora_request", "vllm_xargs", "mm_processor_kwargs",
    "request_id", "__class__", "__struct_fields__", "hook", "max_num_seqs", "n_probs", "id_slot",
)  # fmt: skip


def test_b091_internal_names_reach_nothing(server: Server) -> None:
    """A long prompt in chunks, with every internal name: the same answer as without."""
    body = {"prompt": "far away " * 40, "max_tokens": 8, "temperature": 0}
    _, plain = server.post("/v1/completions", body)
    values: list[Any] = ["127.0.0.1", 7, {"host": "x", "room": 1}, [1], True]
    for value in values:
        asked = {**body, **dict.fromkeys(INTERNAL, value)}
        status, headers, raw = server.request("POST", "/v1/completions", asked)
        assert status == 200, raw
        assert json.loads(raw)["choices"] == plain["choices"]
        named = headers["x-headrace-ignored-fields"]
        assert all(name in named for name in INTERNAL[:10])
