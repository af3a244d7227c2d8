"""Hooks in a running server: before the model, on its words, and on whole answers."""

from __future__ import annotations

import http.client
import json
import re
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.hook_samples import worth
from tests.e2e.serve_process import ServeProcess
from tests.e2e.serving import PATIENCE_S, Server, events

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
OTHERS = ("check=json", "cite=overlap:3", "score=tests.e2e.hook_samples.Scorer")
PAGE = Path(__file__).parents[2] / "docs" / "hooks.md"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("hooks")
    (folder / "prompts").write_text("bomb\nwar => violence\n")
    (folder / "answers").write_text("secret\nold name => NEW\nhalt now => !stop\n")
    words = (f"moderation=words:{folder / 'prompts'}", f"filter=words:{folder / 'answers'}")
    hooks = (*words, *OTHERS, "moderation=tests.e2e.hook_samples.Moderation")
    with Server(fake_step_ms=1.0, hook=hooks, hook_timeout_s=1.0) as running:
        yield running
        running.wait_idle()


def forced(text: str, **more: Any) -> dict[str, Any]:
    """A chat whose answer is `text`."""
    asked = {"choice": [text, text + "?"]}
    messages = [{"role": "user", "content": "say it"}]
    return {
        "messages": messages, "structured_outputs": asked, "temperature": 0, "max_tokens": 200,
        "logit_bias": {str(ord("?")): -100}, **more,
    }  # fmt: skip


def both(server: Server, body: dict[str, Any]) -> tuple[str, str, list[str]]:
    """Content and finish_reason, which must not depend on streaming, and the streamed pieces."""
    status, whole = server.post(CHAT, body)
    assert status == 200, whole
    *chunks, done = events(server.request("POST", CHAT, {**body, "stream": True})[2])
    assert done == "[DONE]"
    pieces, finish = [], None
    for chunk in chunks:
        pieces.append(chunk["choices"][0]["delta"].get("content", ""))
        finish = chunk["choices"][0]["finish_reason"] or finish
    (choice,) = whole["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("".join(pieces), finish)
    return "".join(pieces), choice["finish_reason"], [piece for piece in pieces if piece]


def test_words_are_replaced_however_tokens_cut_them(server: Server) -> None:
    asked, said = "the secret of Old Name, secretly, ", "the *** of NEW, secretly, "
    body = forced(asked * 20 + "old nam", max_tokens=1000)  # long: much is sent while it is written
    text, finish, pieces = both(server, body)
    assert (text, finish) == (said * 20 + "old nam", "stop")
    assert len(pieces) > 1, "what can no longer change is sent at once"


def test_a_filter_ends_an_answer_and_the_engine_with_it(server: Server) -> None:
    body = forced("good until halt now and then " + "much more " * 12)
    text, finish, _ = both(server, body)
    assert (text, finish) == ("good until ", "content_filter")
    _, answer = server.post(CHAT, body)
    assert answer["usage"]["completion_tokens"] < 30
    _, answer = server.post(CHAT, {**body, "stop": ["halt"]})
    assert answer["choices"][0]["finish_reason"] == "stop", "a stop string comes first"
    server.wait_idle()


@pytest.mark.parametrize(
    ("name", "told", "finish"),
    [
        ("my secret", "my ***", "tool_calls"),
        ("old name", "NEW", "tool_calls"),
        ("halt now", None, "content_filter"),
        ("secret", "secret", "tool_calls"),  # the client's own
    ],
)
def test_the_name_of_a_tool_that_nobody_offered_is_filtered(
    server: Server, name: str, told: str | None, finish: str
) -> None:
    text = f'Go.\n<tool_call>\n{{"name": "{name}", "arguments": {{"a": "secret"}}}}\n</tool_call>'
    body = forced("", tools=[{"type": "function", "function": {"name": "secret"}}])
    body["structured_outputs"] = {"regex": re.escape(text).replace("\\\n", "\\n")}
    _, answer = server.post(CHAT, body)
    choice = answer["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Go.", finish)
    calls = [call["function"] for call in choice["message"].get("tool_calls", [])]
    assert calls == ([{"name": told, "arguments": '{"a": "***"}'}] if told is not None else [])
    names = ""
    for chunk in events(server.request("POST", CHAT, {**body, "stream": True})[2])[:-1]:
        for call in chunk["choices"][0]["delta"].get("tool_calls", []):
            names += call["function"].get("name", "")
        last = chunk["choices"][0]["finish_reason"]
    assert (names, last) == (told or "", finish)


def test_tokens_would_show_what_is_hidden(server: Server) -> None:
    for path, body, param in (
        (CHAT, {**forced("x"), "logprobs": True}, "logprobs"),
        (CHAT, {**forced("x"), "return_token_ids": True}, "return_token_ids"),
        (TEXT, {"prompt": "x", "logprobs": 1}, "logprobs"),
    ):
        status, answer = server.post(path, body)
        assert (status, answer["error"]["param"]) == (400, param)


def prompts(text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The ways of bringing a text into a prompt."""
    said = {"role": "user", "content": "hello"}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": f'["{text}"]'}}
    yield TEXT, {"prompt": text}
    yield TEXT, {"prompt": ["hello", text], "stream": True}
    yield TEXT, {"prompt": list(text.encode())}
    yield CHAT, {"messages": [{"role": "system", "content": text}, said]}
    yield CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": text}]}]}
    yield CHAT, {"messages": [said, {"role": "assistant", "content": text}, said], "stream": True}
    turns = [said, {"role": "assistant", "tool_calls": [call]}]
    yield CHAT, {"messages": [*turns, {"role": "tool", "content": "x", "tool_call_id": "1"}]}
    for thought in ("reasoning", "reasoning_content"):
        yield CHAT, {"messages": [said, {"role": "assistant", "content": "x", thought: text}, said]}
    plain = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    named = [said, {"role": "assistant", "tool_calls": [{**plain, "id": text}]}]
    yield CHAT, {"messages": named}
    turns = [said, {"role": "assistant", "tool_calls": [plain]}]
    yield CHAT, {"messages": [*turns, {"role": "tool", "content": "x", "tool_call_id": text}]}
    schema = {"type": "object", "properties": {text: {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    yield CHAT, {"messages": [said], "tools": [tool]}
    yield CHAT, {"messages": [said], "chat_template_kwargs": {"note": text}}
    yield CHAT, {"messages": [said], "documents": [{"text": text}]}
    yield CHAT, {"messages": [said], "documents": [{text: "x"}]}
    thinking = [
        {"type": "thinking", "thinking": text, "signature": ""},
        {"type": "text", "text": "x"},
    ]
    yield "/v1/messages", {"messages": [said, {"role": "assistant", "content": thinking}, said]}
    yield "/v1/messages", {"messages": [said], "system": text}
    yield "/v1/responses", {"input": "hello", "instructions": text}
    yield "/v1/embeddings", {"input": ["hello", text]}
    yield "/v1/embeddings", {"input": ["peace", text]}
    yield "/v1/embeddings", {"input": list(text.encode())}
    yield "/classify", {"input": text}
    yield "/classify", {"messages": [{"role": "user", "content": text}]}


def test_a_prompt_is_judged_before_anything_is_computed(server: Server) -> None:
    server.wait_idle()
    started = server.metric("headrace_requests_started_total")
    for path, body in prompts("a bomb."):
        status, answer = server.post(path, {"model": "fake", "max_tokens": 1, **body})
        assert status == 400, (path, body)
        assert answer["error"].get("code", "content_filter") == "content_filter"
        assert "bomb" not in answer["error"]["message"]
    server.wait_idle()
    assert server.metric("headrace_requests_started_total") == started
    blocked = {"kind": "moderation", "outcome": "block"}
    assert server.metric("headrace_hooks_total", **blocked) == len(list(prompts("")))


def test_a_prompt_may_be_annotated(server: Server) -> None:
    for path, body in prompts("at war."):
        asked = {"model": "fake", "max_tokens": 1, **body}
        status, headers, raw = server.request("POST", path, asked)
        assert (status, headers.get("x-headrace-moderation")) == (200, "violence=1"), raw
    _, headers, _ = server.request("POST", TEXT, {"prompt": "peace", "max_tokens": 1})
    assert "x-headrace-moderation" not in headers


SCHEMA = {
    "type": "object", "required": ["words"], "additionalProperties": False,
    "properties": {"words": {"type": "array", "items": {"const": "again"}, "minItems": 40}},
}  # fmt: skip


def test_cut_json_is_mended_and_comes_in_one_piece(server: Server) -> None:
    asked = {"messages": [{"role": "user", "content": "x"}], "temperature": 0, "max_tokens": 60}
    body = {**asked, "structured_outputs": {"json": SCHEMA}}
    text, finish, pieces = both(server, body)
    assert set(json.loads(text)) == {"words"}
    assert (finish, len(pieces)) == ("length", 1)
    whole, finish, _ = both(server, {**body, "max_tokens": 2000})
    assert (json.loads(whole)["words"][:40], finish) == (["again"] * 40, "stop")


def test_an_answer_that_cannot_be_mended_is_an_error(server: Server) -> None:
    asked = {"messages": [{"role": "user", "content": "x"}], "temperature": 0, "max_tokens": 3}
    body = {**asked, "structured_outputs": {"json": {"const": "never whole"}}}
    status, answer = server.post(CHAT, body)
    assert (status, answer["error"]["code"]) == (500, "unfit_answer")
    status, _, raw = server.request("POST", CHAT, {**body, "stream": True})
    assert json.loads(raw.decode().removeprefix("data: "))["error"]["code"] == "unfit_answer"
    server.wait_idle()


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_score_changes_which_answer_is_chosen(server: Server, path: str) -> None:
    other = 0
    for seed in range(4):
        asked: dict[str, Any] = {"max_tokens": 6, "seed": seed, "temperature": 2}
        asked |= (
            {"messages": [{"role": "user", "content": "why"}]}
            if path == CHAT
            else {"prompt": "why"}
        )
        _, every = server.post(path, {**asked, "n": 8})
        texts = [text_of(choice) for choice in every["choices"]]
        assert "score" not in every["choices"][0]
        _, answer = server.post(path, {**asked, "best_of": 8, "n": 2})
        ranked = sorted(texts, key=lambda text: -worth("why", text))
        assert [text_of(choice) for choice in answer["choices"]] == ranked[:2]
        assert answer["choices"][0]["score"] == worth("why", ranked[0])
        other += ranked[0] != texts[0]
    assert other, "the score never mattered"


def text_of(choice: dict[str, Any]) -> str:
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def test_each_prompt_is_ranked_by_itself_and_no_score_is_an_error(server: Server) -> None:
    body = {"prompt": ["one", "two"], "best_of": 4, "max_tokens": 4, "seed": 3, "temperature": 2}
    _, answer = server.post(TEXT, body)
    for choice, prompt in zip(answer["choices"], ("one", "two"), strict=True):
        assert choice["score"] == worth(prompt, choice["text"])
    status, headers, raw = server.request("POST", TEXT, {**body, "prompt": "unlucky"})
    assert (status, headers["retry-after"]) == (503, "1")
    assert json.loads(raw)["error"]["code"] == "hook_unavailable"


FAILING = (
    ("misplaced", 503, "hook_unavailable"), ("lost", 503, "hook_unavailable"),
    ("confused", 500, "request_failed"), ("no number", 500, "request_failed"),
    ("shattered", 500, "internal_error"), ("broken", 500, "internal_error"),
    ("too few", 500, "internal_error"),
)  # fmt: skip


def test_a_hook_that_hangs_raises_or_talks_nonsense_fails_one_request(server: Server) -> None:
    """All over one connection, which a fault of ours does not end; each frees its seat."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    with closing(connection):
        for prompt, status, code in (*FAILING, ("fine", 200, None), *FAILING):
            body = json.dumps({"prompt": prompt, "best_of": 2, "max_tokens": 4})
            connection.request("POST", TEXT, body, {"content-type": "application/json"})
            got = connection.getresponse()
            raw = got.read()
            assert got.status == status, (prompt, raw)
            assert code is None or json.loads(raw)["error"]["code"] == code, prompt
            assert b"inside" not in raw
    server.wait_idle()


def test_an_answer_is_linked_to_the_documents(server: Server) -> None:
    documents = [{"id": "a", "text": "nothing"}, {"title": "T", "text": "Water turns the wheel."}]
    body = forced("Say: water turns the wheel, twice", documents=documents)
    whole = server.post(CHAT, body)[1]["choices"][0]["message"]["annotations"]
    assert whole == [
        {
            "type": "document_citation",
            "document_citation": {
                "start_index": 5, "end_index": 26, "document_index": 1, "title": "T",
                "quote": "Water turns the wheel",
            },
        }
    ]  # fmt: skip
    chunks = events(server.request("POST", CHAT, {**body, "stream": True})[2])[:-1]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert [delta["annotations"] for delta in deltas if "annotations" in delta] == [whole]
    assert "annotations" in deltas[-2], "before the finish chunk"
    _, plain = server.post(CHAT, forced("Say: water turns the wheel, twice"))
    assert "annotations" not in plain["choices"][0]["message"]


def test_the_example_of_the_page(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "shout.py").write_text(code)
    path = ":".join([str(tmp_path), *filter(None, sys.path)])
    args = ("--backend", "fake", "--api-workers", "1", "--hook", "filter=shout.Shout:!")
    with ServeProcess(*args, PYTHONPATH=path) as server:
        status, answer = server.post(CHAT, forced("it works. really."))
        assert status == 200, answer
        assert answer["choices"][0]["message"]["content"] == "IT WORKS! REALLY!"
