"""Cache and scheduling faults seen in other servers, over HTTP, by their numbers.

B076, B082 and B083 are in test_connections, test_processes and test_serve.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import pytest

from tests.e2e.serving import Server
from tests.e2e.test_connections import send

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
PREFIX = "all of us share these words " * 12  # 336 tokens of the byte tokenizer, 21 blocks


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    settings: dict[str, Any] = {"kv_blocks": 96, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    with Server(fake_step_ms=2.0, **settings) as running:
        yield running


def ask(server: Server, prompt: str, **fields: Any) -> dict[str, Any]:
    status, answer = server.post(
        TEXT, {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True, **fields}
    )
    assert status == 200, answer
    return dict(answer)


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_b076_twenty_who_leave(server: Server) -> None:
    server.wait_idle()
    before = server.metric("headrace_requests_finished_total", reason="abort")
    body = {"prompt": "p", "max_tokens": 1000, "ignore_eos": True, "stream": True}
    for number in range(20):
        sock = send(server, body)
        if number % 2:
            sock.recv(64)  # some leave after the first bytes, some before
        sock.close()
    # One that left before its request was read was never started: no more than those are missing.
    aborted = partial(server.metric, "headrace_requests_finished_total", reason="abort")
    server.wait(lambda: aborted() >= before + 10, "the aborts of those who had read")
    server.wait_idle()
    assert aborted() <= before + 20


def test_b077_aborts_in_every_phase_leak_nothing(server: Server) -> None:
    server.wait_idle()
    for round_ in range(6):
        crowd: list[socket.socket] = []
        for number in range(12):  # eight run, four wait; pools this small preempt as well
            prompt = f"{round_} {number} " + PREFIX
            crowd.append(send(server, {"prompt": prompt, "max_tokens": 300, "stream": True}))
        for sock in crowd[round_ % 2 :: 2]:
            sock.close()
        for sock in crowd:
            sock.close()
    server.wait_idle()
    assert ask(server, PREFIX)["usage"]["completion_tokens"] == 4


def test_b078_a_burst_of_shared_prefixes_then_silence(server: Server) -> None:
    expected = ask(server, PREFIX + "tail 3")["choices"]
    answers: dict[int, Any] = {}

    def one(number: int) -> None:
        answers[number] = ask(server, PREFIX + f"tail {number % 4}")

    threads = [threading.Thread(target=partial(one, n)) for n in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    server.wait_idle()  # shared blocks are counted once: none is left
    assert server.get("/health")[0] == 200
    assert all(answers[n]["choices"] == expected for n in range(3, 24, 4))
    assert cached(ask(server, PREFIX + "tail 3")) >= len(PREFIX) // 16 * 16


def test_b079_adapters_are_no_model_names_here(server: Server) -> None:
    """Without adapters a name that would select one is an unknown model."""
    status, answer = server.post(TEXT, {"model": "fake:adapter", "prompt": "x"})
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


def test_b080_hits_only_within_one_salt(server: Server) -> None:
    prompt = "a secret of some tenant, long enough for blocks. " * 4
    whole = len(prompt) // 16 * 16
    told = [
        cached(ask(server, prompt, cache_salt="s1")),
        cached(ask(server, prompt, cache_salt="s1")),
        cached(ask(server, prompt, cache_salt="s2")),
        cached(ask(server, prompt)),
        cached(ask(server, prompt)),
    ]
    assert told == [0, whole, 0, 0, whole]
    assert server.post(TEXT, {"prompt": "x", "cache_salt": ""})[0] == 400


def test_b081_an_image_is_a_400(server: Server) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    content = [{"type": "text", "text": "What is this?"}, image]
    status, answer = server.post(CHAT, {"messages": [{"role": "user", "content": content}]})
    assert (status, answer["error"]["param"]) == (400, "messages")
    assert "image_url" in answer["error"]["message"]


def test_b085_counters_never_fall_under_preemption(server: Server) -> None:
    names = ("headrace_steps", "headrace_preemptions", "headrace_prompt_tokens",
             "headrace_cached_tokens", "headrace_generation_tokens",
             "headrace_requests_started", "headrace_requests_finished")  # fmt: skip
    started = partial(server.metric, "headrace_requests_started_total")
    before = started()
    prompts = [f"{n} " + PREFIX[:200] for n in range(8)]  # of one request: they come together
    crowd = send(server, {"prompt": prompts, "max_tokens": 400, "ignore_eos": True})
    server.wait(lambda: started() == before + 8, "all have begun")
    seen: list[list[float]] = []
    runs = True
    while runs:
        runs = server.metric("headrace_requests_running") > 0
        seen.append([server.metric(f"{name}_total") for name in names])
    for earlier, later in pairwise(seen):
        assert all(a <= b for a, b in zip(earlier, later, strict=True)), (earlier, later)
    assert seen[-1][1] > 0, "a pool of 96 blocks preempts eight sequences of 37 blocks"
    crowd.close()
    server.wait_idle()
    assert started() == server.metric("headrace_requests_finished_total")
