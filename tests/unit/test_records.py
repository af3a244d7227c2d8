"""Records of requests in the HTTP process: rings and bounds, who sees what, and the prompt."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.api import record_relay
from headrace.api.prompt_spans import content_spans
from headrace.api.record import MOST_BYTES, MOST_TOKENS, Full, Record
from headrace.api.record_relay import PATIENCE_S, Looked, RecordRelay
from headrace.api.recorder import HEADER, MOST_FULL, MOST_FULL_A_KEY, MOST_SAME, Recorder
from headrace.errors import InvalidRequest
from headrace.observe.current import quantile
from headrace.sources.card import read_card
from headrace.sources.resolve import FAKE
from headrace.text.conversation import Asked
from headrace.text.template import ChatTemplate
from tests.unit.test_page import client

FULL = {HEADER: b"full"}


def caller(name: str, key: str = "", at_s: float = 1.0) -> SimpleNamespace:
    return SimpleNamespace(
        request_id=name, path="/v1/completions", key=key, arrived_s=at_s, trace_id=""
    )


def opened(
    recorder: Recorder, name: str, *, full: bool = False, key: str = "", at_s: float = 1.0
) -> Record:
    made = recorder.open(caller(name, key, at_s), FULL if full else {})
    assert made is not None
    return made


def names(recorder: Recorder, key: str = "") -> list[str]:
    return [record.id for record in recorder.newest(1000, key)]


def test_the_newest_stay() -> None:
    recorder = Recorder("m", 3, 1000, offers_full=True)
    for i in range(5):
        recorder.close(opened(recorder, f"r{i}"), 200, "")
    assert sorted(names(recorder)) == ["r2", "r3", "r4"]
    assert recorder.meant("r1", "") == []


def test_light_ones_do_not_push_out_a_full_one() -> None:
    recorder = Recorder("m", 2, 10**6, offers_full=True)
    recorder.close(opened(recorder, "mine", full=True), 200, "")
    for i in range(9):
        recorder.close(opened(recorder, f"r{i}"), 200, "")
    (found,) = recorder.meant("mine", "")
    assert found.whole()["full"]


def test_full_ones_are_bounded_by_bytes() -> None:
    recorder = Recorder("m", 100, 20_000, offers_full=True)
    for i in range(8):
        record = opened(recorder, f"f{i}", full=True)
        assert record.full is not None
        record.full.hear(b"x" * 5000)
        recorder.close(record, 200, "")
    assert 1 <= len(names(recorder)) <= 3
    record = opened(recorder, "large", full=True)
    assert record.full is not None
    record.full.hear(b"x" * 50_000)
    recorder.close(record, 200, "")
    assert names(recorder) == ["large"]  # the newest always stays


def test_only_some_are_recorded_in_full_at_once() -> None:
    recorder = Recorder("m", 100, 10**6, offers_full=True)
    running = [opened(recorder, f"f{i}", full=True) for i in range(MOST_FULL)]
    late = opened(recorder, "late", full=True)
    assert late.full is None
    assert "light record" in late.whole()["note"]
    recorder.close(late, 200, "")
    recorder.close(running[0], 200, "")
    assert opened(recorder, "later", full=True).full is not None


def test_one_key_leaves_room_for_others() -> None:
    recorder = Recorder("m", 100, 10**6, offers_full=True)
    running = [opened(recorder, f"a{i}", full=True, key="a") for i in range(MOST_FULL_A_KEY)]
    late = opened(recorder, "late", full=True, key="a")
    assert late.full is None
    assert "of this key" in late.whole()["note"]
    for i in range(MOST_FULL - MOST_FULL_A_KEY):
        assert opened(recorder, f"b{i}", full=True, key="b").full is not None
    assert opened(recorder, "c", full=True, key="c").full is None, "all places are taken"
    recorder.close(running[0], 200, "")
    assert opened(recorder, "c", full=True, key="c").full is not None
    recorder.close(running[1], 200, "")
    assert opened(recorder, "again", full=True, key="a").full is not None


def test_what_a_filter_hides_is_recorded_for_admins_alone() -> None:
    recorder = Recorder("m", 100, 10**6, offers_full=True, filtered=True)
    light = opened(recorder, "a", full=True, key="a")
    assert light.full is None
    assert "a filter" in light.whole()["note"]
    full = recorder.open(caller("b", "b"), FULL, admin=True)
    assert full is not None
    assert full.full is not None


@pytest.mark.parametrize(
    ("recorder", "value"),
    [
        (Recorder("m", 10, 1000, offers_full=True), b"fully"),
        (Recorder("m", 10, 1000, offers_full=False), b"full"),
        (Recorder("m", 0, 1000, offers_full=True), b"full"),
    ],
    ids=["unknown", "no-ui", "none"],
)
def test_a_header_that_cannot_be_honoured_is_refused(recorder: Recorder, value: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        recorder.open(caller("x"), {HEADER: value})
    assert caught.value.param == "X-Headrace-Record"


def test_without_a_ring_nothing_is_kept() -> None:
    recorder = Recorder("m", 0, 1000, offers_full=True)
    assert recorder.open(caller("x"), {}) is None
    assert names(recorder) == []


def test_a_key_sees_its_own_requests() -> None:
    recorder = Recorder("m", 10, 10**6, offers_full=True)
    for i in range(4):
        recorder.close(opened(recorder, f"r{i}", key=f"key{i % 2}", full=i > 1), 200, "")
    assert sorted(names(recorder, "key0")) == ["r0", "r2"]
    assert recorder.meant("r1", "key0") == []
    (found,) = recorder.meant("r1", "key1")
    assert recorder.find(found.name, "key0") is None
    assert recorder.find(found.name, "key1") is found
    assert len(names(recorder)) == 4


def test_a_full_record_says_when_it_was_cut() -> None:
    full = Full()
    for i in range(MOST_TOKENS + 5):
        full.token(0, i, 1.0)
    assert len(full.tokens) == MOST_TOKENS
    assert str(MOST_TOKENS) in full.cut
    large = Full()
    for _ in range(3):
        large.hear(bytes(MOST_BYTES // 2))
    assert len(large.told) == 2
    assert large.size_bytes <= MOST_BYTES
    assert str(MOST_BYTES) in large.cut


TEMPLATE = ChatTemplate(read_card(FAKE))


async def test_who_sees_which_requests() -> None:
    """Through the HTTP edge, without an engine: what it refuses is recorded as well."""
    body = {"model": "fake", "prompt": "hi"}

    def shown(key: str, name: str) -> dict[str, str]:
        return {"authorization": f"Bearer {key}", "x-request-id": name}

    async with client(api_key=("a", "b"), admin_key=("root",)) as http:
        for key in ("a", "b", "root"):
            answer = await http.post("/v1/completions", json=body, headers=shown(key, f"by-{key}"))
            assert answer.status_code == 503
        for key, seen in (("a", ["by-a"]), ("b", ["by-b"]), ("root", ["by-root", "by-b", "by-a"])):
            listed = await http.get("/ui/api/requests", headers=shown(key, "look"))
            assert [record["id"] for record in listed.json()] == seen
            assert {record["status"] for record in listed.json()} == {503}
            one = await http.get("/ui/api/requests/by-a", headers=shown(key, "look"))
            assert one.status_code == (200 if "by-a" in seen else 404)
            assert "sha256" not in listed.text
        assert (await http.get("/ui/api/requests")).status_code == 401


@pytest.mark.parametrize("limit", ["0", "1001", "9" * 5000, "-1", "1e3", "", "²"])
async def test_a_count_that_is_none_is_refused(limit: str) -> None:
    async with client() as http:
        answer = await http.get("/ui/api/requests", params={"limit": limit})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "limit"


def relays(folder: Path) -> tuple[Recorder, RecordRelay, RecordRelay]:
    """Two processes: the recorder of the first, and what they ask each other with."""
    one, two = (Recorder("m", 10, 10**6, offers_full=True) for _ in range(2))
    first = RecordRelay(one, lambda record: record.whole(), 0, folder)
    return one, first, RecordRelay(two, lambda record: record.whole(), 1, folder)


async def test_another_process_that_takes_long_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says at once that it has the record; then a patience that is over harms nothing."""
    recorder, first, second = relays(tmp_path)
    recorder.close(opened(recorder, "mine", full=True), 200, "")
    await first.start()
    try:
        said = asyncio.Event()
        made = first._whole

        async def slow(record: Record) -> bytes:
            await said.wait()
            return await made(record)

        monkeypatch.setattr(first, "_whole", slow)
        look = asyncio.create_task(second.find("mine", ""))
        rescheduled = asyncio.Timeout.reschedule

        def noted(timeout: asyncio.Timeout, when: float | None) -> None:
            if when is not None and when > asyncio.get_running_loop().time() + PATIENCE_S:
                said.set()  # only now does it go on
            rescheduled(timeout, when)

        monkeypatch.setattr(asyncio.Timeout, "reschedule", noted)
        found = (await look).found
        assert found is not None
        assert msgspec.json.decode(found)["id"] == "mine"
        assert (await second.find("other", "")).found is None
    finally:
        await first.close()


def test_requests_of_one_id_have_a_record_each() -> None:
    recorder = Recorder("m", 100, 10**6, offers_full=True)
    for i in range(MOST_SAME + 5):
        made = opened(recorder, "mine", at_s=float(i), full=i == 3, key=f"key{i % 2}")
        recorder.close(made, 200, "")
    every = recorder.newest(1000, "")
    assert len({record.name for record in every}) == MOST_SAME + 5
    assert [record.light()["key"] for record in every] == [record.name for record in every]
    assert recorder.meant("mine", "") == every[: MOST_SAME + 1]
    oldest = every[-1]
    assert recorder.find(oldest.name, "") is oldest
    assert recorder.meant(oldest.name, "") == [*every[: MOST_SAME + 1], oldest]
    assert {record.key for record in recorder.meant("mine", "key1")} == {"key1"}
    assert recorder.meant(oldest.name, "key1") == recorder.meant("mine", "key1")


async def test_an_id_stands_for_the_newest_of_all_processes(tmp_path: Path) -> None:
    one, two = (Recorder("m", 10, 10**6, offers_full=True) for _ in range(2))
    relay = [
        RecordRelay(recorder, lambda record: record.whole(), worker, tmp_path)
        for worker, recorder in enumerate((one, two))
    ]
    made = []
    for i, recorder in enumerate((one, two, one, two)):
        made.append(opened(recorder, "mine", full=i == 1))
        made[-1].created_s = 100.0 + i
        recorder.close(made[-1], 200, "")
    other = opened(one, made[1].name)  # its id is the key of one that another process has
    other.created_s = 105.0
    for each in relay:
        await each.start()
    try:
        for asks in relay:
            listed, silent = await asks.newest(10, "")
            assert silent == 0
            assert [light["key"] for light in listed] == [r.name for r in (other, *made[::-1])]
            for given, meant in [("mine", made[3]), *((record.name, record) for record in made)]:
                found = (await asks.find(given, "")).found
                assert found is not None
                told = msgspec.json.decode(found)
                assert told["unanswered"] == 0
                assert (told["id"], told["key"], told["full"]) == (
                    "mine",
                    meant.name,
                    meant is made[1],
                )
                assert told["same_id"] == [
                    {"key": record.name, "at_s": record.created_s}
                    for record in reversed(made)
                    if record is not meant
                ]
            found = (await asks.find(other.name, "")).found
            assert found is not None
            assert msgspec.json.decode(found)["same_id"] == []
            assert await asks.find("mine~", "") == (None, 0)
            assert await asks.find(made[0].name + "0", "") == (None, 0)
    finally:
        for each in relay:
            await each.close()


@contextlib.asynccontextmanager
async def hanging(folder: Path) -> AsyncIterator[list[bytes]]:
    """A process that takes questions, which are yielded, and answers none."""
    asked: list[bytes] = []
    leaving = asyncio.Event()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readline())
        await leaving.wait()
        writer.close()

    server = await asyncio.start_unix_server(listen, folder / "records-9.sock")
    try:
        yield asked
    finally:
        leaving.set()
        server.close()


async def test_one_that_hangs_keeps_nobody_back_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has it, here or elsewhere: the patience with who has nothing is not waited for."""
    monkeypatch.setattr(record_relay, "PATIENCE_S", 3600.0)  # the test's own limit is shorter
    monkeypatch.setattr(record_relay, "REST_S", 0.2)
    recorder, first, second = relays(tmp_path)
    record = opened(recorder, "mine", full=True)
    recorder.close(record, 200, "")
    await first.start()
    await second.start()
    try:
        async with hanging(tmp_path) as asked:
            for look in (first, second):
                listed, silent = await look.newest(5, "")
                assert ([light["id"] for light in listed], silent) == (["mine"], 1)
                for given in ("mine", record.name):
                    found, silent = await look.find(given, "")
                    assert found is not None
                    told = msgspec.json.decode(found)
                    assert (told["key"], told["unanswered"], silent) == (record.name, 1, 1)
            ops = {msgspec.json.decode(question)["op"] for question in asked}
            assert ops == {"newest", "meant"}, "the whole is asked of who has it"
            monkeypatch.setattr(record_relay, "PATIENCE_S", 0.2)
            assert await first.find("other", "") == (None, 1)
        assert await first.find("other", "") == (None, 0), "who died is not waited for"
    finally:
        await first.close()
        await second.close()


async def test_a_look_says_who_did_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def newest(*_: Any) -> Looked[list[Any]]:
        return Looked([], 2)

    async def find(*_: Any) -> Looked[bytes | None]:
        return Looked(None, 1)

    monkeypatch.setattr(RecordRelay, "newest", newest)
    monkeypatch.setattr(RecordRelay, "find", find)
    async with client() as http:
        listed = await http.get("/ui/api/requests")
        one = await http.get("/ui/api/requests/x")
    assert (listed.json(), listed.headers["x-headrace-unanswered"]) == ([], "2")
    assert one.status_code == 404
    assert "did not answer: 1" in one.json()["error"]["message"]


async def test_a_question_that_is_too_long_harms_no_process(tmp_path: Path) -> None:
    _, first, second = relays(tmp_path)
    await first.start()
    try:
        assert await second.find("\x01" * 60_000, "") == (None, 0)
        reader, writer = await asyncio.open_unix_connection(tmp_path / "records-0.sock")
        writer.write(b"x" * 200_000 + b"\n")
        with suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()
        assert await second.newest(5, "") == ([], 0)
    finally:
        await first.close()


def test_what_a_full_record_takes_is_counted() -> None:
    """Its prompt as Python keeps it, not as it was sent."""
    record = opened(Recorder("m", 10, 10**6, offers_full=True), "f", full=True)
    full = record.full
    assert full is not None
    text = "日本" * 5000
    full.prompted(text, [])
    assert full.size_bytes >= 2 * len(text)
    before = full.size_bytes
    record.submitted([range(10_000, 20_000)], 1, SimpleNamespace())
    assert full.size_bytes - before >= (8 + 28) * 10_000


WORDS = st.text(alphabet=st.sampled_from("ab \n<|>im_start user"), max_size=12)


@given(turns=st.lists(st.tuples(st.sampled_from(["user", "assistant"]), WORDS), min_size=1))
def test_spans_cover_the_prompt_and_hold_the_contents(turns: list[tuple[str, str]]) -> None:
    asked = Asked([{"role": role, "content": content} for role, content in turns])
    text = TEMPLATE.prompt(asked)
    spans = content_spans(text, asked, TEMPLATE.prompt)
    assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])]
    assert spans[-1].end == len(text)
    said = [(s.role, text[s.start : s.end]) for s in spans if s.kind == "content"]
    assert said == [(role, content.strip()) for role, content in turns if content.strip()]


def test_spans_of_a_template_that_looks_into_contents() -> None:
    """Marks change what such a template writes: contents are searched."""

    def render(asked: Asked) -> str:
        content = asked.turns[0]["content"]
        return f"<s>{content}</s>" if len(content) < 10 else "too long"

    spans = content_spans("<s>hello</s>", Asked([{"role": "user", "content": "hello"}]), render)
    assert [(s.start, s.end, s.kind) for s in spans] == [
        (0, 3, "template"),
        (3, 8, "content"),
        (8, 12, "template"),
    ]


def test_quantiles_are_those_of_prometheus() -> None:
    infinite = float("inf")
    buckets = {1.0: 10.0, 2.0: 30.0, 4.0: 40.0, infinite: 40.0}
    assert quantile(buckets, 0.5) == pytest.approx(1.5)  # the 20th of 40: half of bucket (1, 2]
    assert quantile(buckets, 0.25) == pytest.approx(1.0)
    assert quantile(buckets, 0.99) == pytest.approx(3.92)
    assert quantile({1.0: 0.0, infinite: 5.0}, 0.5) == 1.0  # beyond the last edge
    assert quantile({1.0: 0.0, infinite: 0.0}, 0.5) is None
