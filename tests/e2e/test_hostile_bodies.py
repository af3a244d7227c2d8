"""Bodies that ask one HTTP process for much work, or hold what no client should send."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.serving import Server

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
# Work of the HTTP process for which another request may wait. Each of these bodies took two seconds
# or more of it, and held up all others; where it takes more, a share of that is allowed.
MOST_BLOCKED_S, MOST_BLOCKED_SHARE = 1.0, 1 / 3


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(max_num_seqs=8, max_queue=10, max_model_len=8192) as running:
        yield running
        running.wait_idle()


def worked_s(server: Server) -> float:
    """Processor time of the HTTP process: a machine that stands still adds nothing."""
    fields = Path(f"/proc/{server.apis[0].pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # 14 and 15 of proc(5)


def blocks(server: Server, path: str, body: dict[str, Any]) -> tuple[str, int]:
    """What was done while a quick request waited beside `body`, "" = not too much; and the status
    of `body`."""
    raw, over = json.dumps(body).encode(), threading.Event()
    waits = [0.0]

    def probe() -> None:
        while not over.is_set():
            before_s = worked_s(server)
            server.get("/version")
            waits.append(worked_s(server) - before_s)
            time.sleep(0.01)

    thread = threading.Thread(target=probe)
    thread.start()
    before_s = worked_s(server)
    try:
        status = server.request("POST", path, raw)[0]
    finally:
        took_s = worked_s(server) - before_s
        over.set()
        thread.join()
    waited_s = max(waits)
    too_long = waited_s >= max(MOST_BLOCKED_S, took_s * MOST_BLOCKED_SHARE)
    return f"{waited_s:.2f} s of {took_s:.2f} s" if too_long else "", status


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (TEXT, {"prompt": "x", "n": 8, "stop": [c * 100_000 for c in "abcdefghijkl"]}, 400),
        (CHAT, {"messages": [{"role": "user", "content": ""}] * 200_000}, 400),
        ("/tokenize", {"prompt": "x " * 400_000, "return_token_strs": True}, 200),
        ("/detokenize", {"tokens": [65] * 2_000_000}, 200),
    ],
    ids=["stops", "messages", "token strings", "ids"],
)
def test_a_large_body_does_not_hold_up_others(
    server: Server, path: str, body: dict[str, Any], status: int
) -> None:
    assert blocks(server, path, body) == ("", status)


def test_stops_of_the_longest_allowed_kind_cost_little(server: Server) -> None:
    body = {"prompt": "x", "n": 8, "max_tokens": 4, "stop": [c * 1000 for c in "abcdefghijklmnop"]}
    assert blocks(server, TEXT, body) == ("", 200)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (TEXT, {"prompt": [["y" * 100_000]]}),
        (TEXT, {"prompt": "x", "model": "m" * 100_000}),
        (CHAT, {"messages": [{"role": "r" * 100_000, "content": "x"}]}),
    ],
)
def test_an_error_does_not_send_the_body_back(
    server: Server, path: str, body: dict[str, Any]
) -> None:
    status, _, raw = server.request("POST", path, body)
    assert status in (400, 404)
    assert len(raw) < 2000
    assert json.loads(raw)["error"]["message"]


def calls(arguments: str) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {
        "max_tokens": 2,
        "messages": [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "42", "tool_call_id": "1"},
        ],
    }


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        ("[" * 100_000, 400),
        (json.dumps("[" * 2000), 200),  # a string that looks like a deep list
        (json.dumps(json.dumps({"a": 1})), 200),
        ("1" * 6000, 200),  # over the digits that Python reads
        (r'{"a": "\ud800"}', 200),
        ("", 200),
    ],
)
def test_b047_tool_arguments_are_never_a_500(server: Server, arguments: str, status: int) -> None:
    got, answer = server.post(CHAT, calls(arguments))
    assert got == status, answer
    if status == 400:
        assert answer["error"]["param"] == "messages"


def test_lone_surrogates_are_a_400(server: Server) -> None:
    for given, field in (({"prompt": "a\ud800b"}, "prompt"), ({"a\udc00": 1}, "a?")):
        status, answer = server.post(TEXT, given)
        assert (status, answer["error"]["code"]) == (400, "invalid_request")
        assert answer["error"]["message"] == f"{field}: half of a surrogate pair is no text"


def test_an_encoded_body_is_a_415(server: Server) -> None:
    encoded = {"content-encoding": "gzip"}
    assert server.request("POST", TEXT, b"\x1f\x8b\x08", encoded)[0] == 415
    plain = {"content-encoding": "identity"}
    assert server.request("POST", TEXT, {"prompt": "x", "max_tokens": 1}, plain)[0] == 200


def test_b090_more_prompts_than_can_ever_be_taken_is_a_400(server: Server) -> None:
    """A 503 would say: try again."""
    status, answer = server.post(TEXT, {"prompt": ["x"] * 19, "max_tokens": 1})
    assert (status, answer["error"]["param"]) == (400, "prompt")
    for _ in range(3):  # an idle server takes what its rows and its queue can hold
        status, answer = server.post(TEXT, {"prompt": ["x"] * 18, "max_tokens": 1})
        assert status == 200, answer
        assert len(answer["choices"]) == 18
