"""`headrace chat` against a server that answers from a script."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from click.testing import CliRunner, Result

from headrace.cli.chat import Talk, command, converse
from headrace.cli.child_server import READY
from headrace.cli.remote import Remote
from headrace.errors import EngineDead, HeadraceError, InvalidRequest, QueueFull
from tests.unit.scripted_server import DONE, ROLE, SSE_HEAD, delta, event, scripted, usage, whole

Steps = list[bytes | float]


def echo(body: dict[str, Any]) -> Steps:
    """Says back the last message in two pieces, with a snowman cut in half by the network."""
    text = "<" + body["messages"][-1]["content"] + ">"
    snowman = delta("☃").decode().encode()
    middle = len(snowman) // 2
    return [
        SSE_HEAD,
        ROLE,
        delta(text),
        b": keep-alive\n\n",
        snowman[:middle],
        0.01,
        snowman[middle:],
        delta("", "stop"),
        usage(1, 2),
        DONE,
    ]


def reader(*lines: str | type[BaseException]) -> Callable[[], str]:
    left = iter(lines)

    def read() -> str:
        line = next(left)
        if isinstance(line, str):
            return line
        raise line

    return read


async def talk_with(script: Any, *lines: str | type[BaseException], **fields: Any) -> Any:
    """(what was printed, the talk, the bodies that the server got)"""
    said: list[str] = []

    def run(url: str) -> Talk:
        talk = Talk(Remote(url), **fields)
        converse(talk, reader(*lines), said.append)
        return talk

    async with scripted(script) as server:
        talk = await asyncio.to_thread(run, server.url)
        return "".join(said), talk, server.requests


async def test_the_history_goes_along() -> None:
    said, talk, bodies = await talk_with(echo, "one", "  ", "two", EOFError, system="Be brief.")
    assert "<one>☃\n" in said
    assert "<two>☃\n" in said
    assert [body["model"] for body in bodies] == ["scripted"] * 2
    assert [m["content"] for m in bodies[1]["messages"]] == ["Be brief.", "one", "<one>☃", "two"]
    assert [m["role"] for m in talk.messages] == ["system", *["user", "assistant"] * 2]


async def test_reset_exit_and_help() -> None:
    said, talk, bodies = await talk_with(
        echo, "one", "/reset", KeyboardInterrupt, "/what", "two", "/exit", system="s"
    )
    assert [m["content"] for m in bodies[1]["messages"]] == ["s", "two"]
    assert said.count("/reset forgets") == 2
    assert len(talk.messages) == 3


async def test_fields_are_sent() -> None:
    _, _, bodies = await talk_with(echo, "hi", "/exit", temperature=0.5, max_tokens=9, seed=4)
    assert {k: bodies[0][k] for k in ("temperature", "max_tokens", "seed", "stream")} == {
        "temperature": 0.5,
        "max_tokens": 9,
        "seed": 4,
        "stream": True,
    }


async def test_a_failed_question_leaves_no_trace() -> None:
    answers: Iterator[Steps] = iter(
        [
            [whole("503 Busy", {"error": {"code": "queue_full", "message": "full"}})],
            [SSE_HEAD, delta("half"), event({"error": {"message": "it broke"}}), DONE],
            [SSE_HEAD, delta("half")],
            echo({"messages": [{"content": "four"}]}),
        ]
    )
    said, talk, bodies = await talk_with(
        lambda body: next(answers), "one", "two", "three", "four", EOFError
    )
    assert "error: full" in said
    assert "error: it broke" in said
    assert "error: the stream ended early" in said
    assert [m["content"] for m in bodies[3]["messages"]] == ["four"]
    assert len(talk.messages) == 2


async def test_stopping_an_answer_closes_the_connection_and_keeps_what_came() -> None:
    more: Steps = [0.02, delta(" on")]
    endless: Steps = [SSE_HEAD, ROLE, delta("and"), *more * 500, DONE]
    said: list[str] = []

    def write(text: str) -> None:
        said.append(text)
        if text == " on" and said.count(text) == 2:
            raise KeyboardInterrupt

    def run(url: str) -> Talk:
        talk = Talk(Remote(url))
        converse(talk, reader("go", "/exit"), write)
        return talk

    async with scripted(lambda body: endless) as server:
        talk = await asyncio.to_thread(run, server.url)
        await asyncio.wait_for(server.was_cut.wait(), 60)
    assert talk.messages[-1] == {"role": "assistant", "content": "and on on"}
    assert "(stopped)" in "".join(said)


async def invoke(script: Any, *arguments: str, text: str = "") -> tuple[Result, list[Any]]:
    async with scripted(script) as server:
        result = await asyncio.to_thread(
            CliRunner().invoke, command, ["--url", server.url, *arguments], text
        )
        return result, server.requests


async def test_one_shot() -> None:
    result, bodies = await invoke(echo, "Hello", "--max-tokens", "5", "--api-key", "k")
    assert (result.exit_code, result.stdout) == (0, "<Hello>☃\n")
    assert bodies[0]["max_tokens"] == 5
    assert "temperature" not in bodies[0]


async def test_one_shot_with_a_pipe() -> None:
    result, bodies = await invoke(echo, "Sum it up:", text="line 1\nline 2\n")
    assert result.exit_code == 0
    assert bodies[0]["messages"][0]["content"] == "Sum it up:\n\nline 1\nline 2"
    result, bodies = await invoke(echo, text="just this\n")
    assert bodies[0]["messages"][0]["content"] == "just this"
    result, _ = await invoke(echo)
    assert result.exit_code == 2


async def test_one_shot_errors_are_words_and_an_exit_code() -> None:
    refused = whole("400 Bad", {"error": {"code": "x", "message": "no such thing"}})
    result, _ = await invoke(lambda body: [refused], "Hello")
    assert result.exit_code == 1
    assert "no such thing" in result.stderr
    result = CliRunner().invoke(command, ["--url", "http://127.0.0.1:9", "x"])
    assert result.exit_code == 1
    assert "127.0.0.1:9" in result.stderr


async def test_errors_have_the_servers_class() -> None:
    full = whole("503 Busy", {"error": {"code": "queue_full", "message": "full"}})
    async with scripted(lambda body: [full]) as server:
        remote = await asyncio.to_thread(Remote, server.url + "/v1/")
        with pytest.raises(QueueFull, match="full"):
            await asyncio.to_thread(list, remote.stream([]))
    plain = b"HTTP/1.1 502 No\r\nContent-Length: 4\r\n\r\noops"
    async with scripted(lambda body: [plain]) as server:
        remote = await asyncio.to_thread(Remote, server.url)
        with pytest.raises(HeadraceError, match="HTTP 502"):
            await asyncio.to_thread(list, remote.stream([]))


def test_bad_addresses() -> None:
    with pytest.raises(InvalidRequest):
        Remote("ftp://somewhere")
    with pytest.raises(EngineDead):
        Remote("127.0.0.1:9")


@pytest.mark.parametrize(
    ("line", "url"),
    [
        ("ready in 2.1 s: http://127.0.0.1:8000\n", "http://127.0.0.1:8000"),
        ("ready: http://[::1]:80", "http://[::1]:80"),
        ("try: curl http://127.0.0.1:8000/v1", None),
        ("  loading weights http://x", None),
    ],
)
def test_the_ready_line(line: str, url: str | None) -> None:
    match = READY.match(line)
    assert (match and match[1]) == url
