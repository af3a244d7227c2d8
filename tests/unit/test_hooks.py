"""Hooks that ship with headrace, and how they are found."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar

import pytest

from headrace.errors import ConfigError, HookUnavailable, UnfitAnswer
from headrace.hooks import load
from headrace.hooks.classifier import HttpModeration
from headrace.hooks.contract import Asked, Verdict
from headrace.hooks.json_check import MAX_MEND_CHARS, JsonCheck
from headrace.hooks.load import load_hooks, split
from headrace.hooks.model import ModelModeration, ModelScorer
from headrace.hooks.words import WordModeration


class Tracer:
    """A moderation hook of somebody else's."""

    def __init__(self, text: str) -> None:
        self.text = text

    async def judge(self, texts: Any) -> Verdict:
        return Verdict()


class Broken:
    def __init__(self, text: str) -> None:
        raise OSError("no such thing")


HERE = __name__


def test_kind_name_text() -> None:
    assert split("moderation=http:http://h:1/x#a=b") == ("moderation", "http", "http://h:1/x#a=b")
    assert split("check=json") == ("check", "json", "")
    hooks = load_hooks([f"moderation={HERE}.Tracer:a:b", f"moderation={HERE}.Tracer"])
    assert [hook.text for hook in hooks.moderation] == ["a:b", ""]  # type: ignore[attr-defined]


def test_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    def entries(group: str) -> list[EntryPoint]:
        return [EntryPoint("tracer", f"{HERE}:Tracer", group)] if "moderation" in group else []

    monkeypatch.setattr(load, "entry_points", entries)
    (hook,) = load_hooks(["moderation=tracer:x"]).moderation
    assert isinstance(hook, Tracer)
    with pytest.raises(ConfigError, match="no such hook"):
        load_hooks(["filter=tracer"])


@pytest.mark.parametrize(
    "text",
    [
        "", "moderation", "moderation=", "flavour=words:x", "moderation=nothing",
        "check=json:maybe",
        "moderation=words:/no/such/file", "moderation=no.such.module", f"moderation={HERE}.Nobody",
        f"moderation={HERE}.Broken:x", "moderation=http:ftp://x", "moderation=http:",
        "moderation=http:http://x#fail=sometimes", "moderation=http:http://x#colour=red",
        "moderation=model:http://x", "moderation=model:http://x#labels=,",
        "moderation=model:http://x#labels=a&window=200", "score=model:http://x#label=first",
        "moderation=http:http://x#timeout_s=0", "moderation=http:http://x#timeout_s=nan",
        "moderation=http:http://x#key_env=NO_SUCH_VARIABLE_HERE",
    ],
)  # fmt: skip
def test_what_cannot_be_loaded_says_which(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_hooks([text])
    assert caught.value.param == "hook"


async def test_a_list_of_words_blocks_or_annotates(tmp_path: Path) -> None:
    file = tmp_path / "words"
    file.write_text("bomb\nwar => violence\n")
    hook = WordModeration(str(file))
    assert await hook.judge([]) == Verdict()
    assert await hook.judge(["bombast", "towards"]) == Verdict()
    assert await hook.judge(["War and war"]) == Verdict("annotate", labels={"violence": 2.0})
    for texts in (["war", "a BOMB"], ["x " * 9000 + "bomb"]):
        verdict = await hook.judge(texts)
        assert verdict.action == "block"
        assert "bomb" not in verdict.reason


@pytest.mark.parametrize(
    ("text", "mended"),
    [
        ('{"a": 1}', '{"a": 1}'), ("[1, 2", "[1, 2]"),
        ('{"a": [1, {"b": "c', '{"a": [1, {"b": "c"}]}'),
        (' {"é": "漢', '{"é": "漢"}'), ("12", "12"),
    ],
)  # fmt: skip
def test_json_is_mended(text: str, mended: str) -> None:
    check = JsonCheck("")
    assert (check.applies("json"), check.applies("")) == (True, False)
    assert json.loads(check.check(text)) == json.loads(mended)


@pytest.mark.parametrize("text", ["", "hello", '{"a"', "[" * 5000, '["' + "x" * MAX_MEND_CHARS])
def test_json_that_cannot_be_mended(text: str) -> None:
    with pytest.raises(UnfitAnswer):
        JsonCheck("").check(text)


def test_strict_mends_nothing() -> None:
    assert JsonCheck("strict").check("[1]") == "[1]"
    with pytest.raises(UnfitAnswer):
        JsonCheck("strict").check("[1")


class Classifier(BaseHTTPRequestHandler):
    """Flags texts that say so; does as told otherwise."""

    protocol_version = "HTTP/1.1"
    seen: ClassVar[list[tuple[str, str | None]]] = []
    asked: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.seen.append((self.path, self.headers.get("authorization")))
        if self.path.endswith("/classify"):
            self.classify(body)
            return
        text = " ".join(body["input"])
        if "hang" in text:
            release.wait(30)
        if "drop" in text:
            self.close_connection = True
            return
        result = {
            "flagged": "evil" in text, "categories": {"hate": "evil" in text, "other": False},
            "category_scores": {"hate": 0.9, "other": 0.1},
        }  # fmt: skip
        answer = json.dumps({"results": [result]} if "odd" not in text else {"other": 1}).encode()
        self.send_response(500 if "break" in text else 200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)
        self.close_connection |= "close" in text

    def classify(self, body: dict[str, Any]) -> None:
        """One label for chats: their length. Two for texts: fine, toxic."""
        self.asked.append(body)
        if "messages" in body:
            value = float(sum(len(turn["content"]) for turn in body["messages"]))
            raw = body["use_activation"] is False
            data = [{"index": 0, "label": "R", "probs": [value if raw else 1.0]}]
        else:
            shares = [min(1.0, text.count("!") / 4) for text in body["input"]]
            data = [
                {"index": i, "label": "toxic" if p > 0.5 else "fine", "probs": [1 - p, p]}
                for i, p in enumerate(shares)
            ]
        answer = json.dumps({"object": "list", "data": data}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *args: object) -> None:
        pass


release = threading.Event()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Classifier)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1/moderations?x=1"
    release.set()
    server.shutdown()
    thread.join()
    server.server_close()


async def judged(text: str, *texts: str) -> Verdict:
    with closing(HttpModeration(text)) as hook:
        return await hook.judge(texts)


async def test_a_classifier_over_http(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLASSIFIER_KEY", "k")
    with closing(HttpModeration(f"{url}#key_env=CLASSIFIER_KEY")) as hook:
        assert await hook.judge(["fine"]) == Verdict()
        assert Classifier.seen[-1] == ("/v1/moderations?x=1", "Bearer k")
        verdict = await hook.judge(["fine", "evil"])
        assert (verdict.action, dict(verdict.labels)) == ("block", {"hate": 0.9})
        assert "hate" in verdict.reason
        for _ in range(3):  # a connection that the service closed is opened anew
            assert await hook.judge(["close"]) == Verdict()
    annotated = Verdict("annotate", labels={"hate": 0.9})
    assert await judged(f"{url}#flagged=annotate", "evil") == annotated


@pytest.mark.parametrize("text", ["break", "drop", "odd"])
async def test_a_classifier_that_fails(url: str, text: str) -> None:
    with pytest.raises(HookUnavailable, match=r"127\.0\.0\.1") as caught:
        await judged(url, text)
    assert "x=1" not in caught.value.message
    assert await judged(f"{url}#fail=open", text) == Verdict()


async def test_a_classifier_that_hangs_or_is_not_there(url: str) -> None:
    with pytest.raises(HookUnavailable, match=r"in 0\.2 s"):
        await judged(f"{url}#timeout_s=0.2", "hang")
    assert await judged(f"{url}#timeout_s=0.2&fail=open", "hang") == Verdict()
    with pytest.raises(HookUnavailable, match="ConnectionRefused"):
        await judged("http://127.0.0.1:9/", "x")


async def test_a_model_moderates(url: str) -> None:
    root = url.partition("/v1")[0]
    with closing(ModelModeration(f"{root}#labels=toxic,rude&threshold=0.7&window=300")) as hook:
        assert await hook.judge([]) == Verdict()
        assert await hook.judge(["ok!", "fine!!"]) == Verdict()
        assert await hook.judge(["so so!!!" + " " * 290]) == Verdict(
            "block", BLOCKED, {"toxic": 0.75}
        )
        hidden = (
            "x" * 998 + "!!!!" + "x" * 998
        )  # on the border of two pieces, if they did not overlap
        assert (await hook.judge(["fine", hidden])).action == "block"
        texts = [text for body in Classifier.asked for text in body["input"]]
        assert max(map(len, texts)) == 300
    with closing(ModelModeration(f"{root}#labels=rude")) as hook:
        assert await hook.judge(["toxic!!!!"]) == Verdict(), "that label is not named"
    with closing(ModelModeration(f"{root}#labels=toxic&flagged=annotate")) as hook:
        assert await hook.judge(["!!!!"]) == Verdict("annotate", labels={"toxic": 1.0})
    with closing(ModelModeration("http://127.0.0.1:9#labels=toxic&fail=open")) as hook:
        assert await hook.judge(["!!!!"]) == Verdict()


BLOCKED = "the request was refused by moderation: toxic"


async def test_a_model_scores(url: str) -> None:
    root = url.partition("/v1")[0]
    chat = Asked([{"role": "user", "content": "hey"}])
    with closing(ModelScorer(root)) as hook:
        for _ in range(2):  # a reward model, once that is known, by its value
            assert await hook.score(chat, ["", "long answer"]) == [3.0, 14.0]
    with closing(ModelScorer(f"{root}#label=1")) as hook:
        assert await hook.score(Asked(prompt="a!"), ["!", "!!!"]) == [0.5, 1.0]
        assert Classifier.asked[-1]["input"][0].startswith("a!")
    with (
        closing(ModelScorer(f"{root}#label=2")) as hook,
        pytest.raises(HookUnavailable, match="2 lab"),
    ):
        await hook.score(Asked(prompt="a"), ["b"])
