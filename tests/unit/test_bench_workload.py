"""What a load run sends, as pure functions of its options: no network, no clock."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.bench.arrivals import arrival_times_s
from headrace.bench.job import Job, arrivals_of, sessions_of
from headrace.bench.lengths import Lengths, parse_lengths
from headrace.bench.load import Target
from headrace.bench.stats import Shape
from headrace.bench.trace import read_trace
from headrace.bench.workload import SCHEMA, WORDS, Ask, Said, Workload
from headrace.errors import ConfigError


def asks(load: Workload, part: str = "x", count: int | None = None) -> list[Ask]:
    sessions = load.sessions(part, load.requests if count is None else count)
    return [ask for session in sessions for turn in session.turns for ask in turn.asks]


def texts(load: Workload, part: str = "x") -> list[str]:
    return [str(ask.prompt) for ask in asks(load, part)]


def test_same_seed_and_nonce_same_prompts() -> None:
    load = Workload(requests=5, seed=3, nonce="n")
    assert texts(load) == texts(Workload(requests=5, seed=3, nonce="n"))
    assert not set(texts(load)) & set(texts(Workload(requests=5, seed=4, nonce="n")))
    assert not set(texts(load)) & set(texts(load, "y"))


def test_another_nonce_is_the_same_work_in_other_words() -> None:
    lengths = Lengths("uniform", 3, 90)
    load = Workload(requests=20, prompt_tokens=lengths, max_tokens=lengths, cancel=0.5, nonce="a")
    other = Workload(requests=20, prompt_tokens=lengths, max_tokens=lengths, cancel=0.5, nonce="b")
    one, two = asks(load), asks(other)
    assert not {str(ask.prompt) for ask in one} & {str(ask.prompt) for ask in two}
    for a, b in zip(one, two, strict=True):
        assert len(str(a.prompt).split()) == len(str(b.prompt).split())
        assert (a.max_tokens, a.cancel_after_chunks) == (b.max_tokens, b.cancel_after_chunks)


def test_sizes() -> None:
    (text,) = texts(Workload(requests=1, prompt_tokens=30))
    assert len(text.split()) == 30
    assert set(text.split()) <= set(WORDS)
    (ids,) = asks(Workload(requests=1, prompt_tokens=30, kind="ids", id_range=(5, 9)))
    assert isinstance(ids.prompt, list)
    assert len(ids.prompt) == 30
    assert set(ids.prompt) <= {5, 6, 7, 8}


def test_bodies() -> None:
    load = Workload(requests=2, single="Hello", ignore_eos=False, max_tokens=7)
    first, second = (load.body("m", ask) for ask in asks(load))
    assert first == second
    assert first["messages"] == [{"role": "user", "content": "Hello"}]
    assert first["max_tokens"] == 7
    assert "ignore_eos" not in first
    assert first["stream_options"] == {"include_usage": True}
    ids = Workload(requests=1, kind="ids", endpoint="completions", stream=False)
    body = ids.body("m", asks(ids)[0])
    assert isinstance(body["prompt"], list)
    assert body["ignore_eos"] is True
    assert "stream_options" not in body


@pytest.mark.parametrize(
    ("text", "low", "high", "mean"),
    [
        ("uniform:10:20", 10, 20, 15),
        ("normal:100:10", 1, 200, 100),
        ("lognormal:50:0.5", 1, 2000, 50 * math.exp(0.125)),
    ],
)
def test_laws_of_lengths(text: str, low: int, high: int, mean: float) -> None:
    law = parse_lengths(text)
    assert isinstance(law, Lengths)
    assert str(law) == text
    source = random.Random(1)
    drawn = [law.draw(source) for _ in range(4000)]
    assert min(drawn) >= low
    assert max(drawn) <= high
    assert sum(drawn) / len(drawn) == pytest.approx(mean, rel=0.05)


@pytest.mark.parametrize(
    "text", ["", "0", "x", "uniform:5", "uniform:9:3", "normal:0:1", "normal:nan:1", "pareto:1:2"]
)
def test_lengths_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="no length"):
        parse_lengths(text)


@given(st.text(max_size=20))
def test_any_text_is_a_length_or_refused(text: str) -> None:
    try:
        length = parse_lengths(text)
    except ConfigError:
        return
    assert (length if isinstance(length, int) else length.draw(random.Random(0))) >= 1


class TestSharing:
    def prefix(self, text: str) -> str:
        return " ".join(text.split()[:20])

    def test_groups_share_a_prefix_and_nothing_else(self) -> None:
        load = Workload(requests=200, prefixes=4, prefix_tokens=20, prompt_tokens=10)
        found = texts(load)
        assert {len(text.split()) for text in found} == {30}
        groups = Counter(map(self.prefix, found))
        assert len(groups) == 4
        assert min(groups.values()) > 25
        assert len(set(found)) == 200

    def test_zipf_makes_some_hot(self) -> None:
        load = Workload(requests=2000, prefixes=50, prefix_tokens=20, prompt_tokens=1, zipf=1.0)
        (_, first), (_, second) = Counter(map(self.prefix, texts(load))).most_common(2)
        assert first / 2000 == pytest.approx(1 / sum(1 / k for k in range(1, 51)), rel=0.15)
        assert first / second == pytest.approx(2, rel=0.3)

    def test_drift_moves_the_hot_ones(self) -> None:
        load = Workload(
            requests=300, prefixes=3, prefix_tokens=20, prompt_tokens=1, zipf=3.0, drift=100
        )
        found = list(map(self.prefix, texts(load)))
        hot = [Counter(found[i : i + 100]).most_common(1)[0][0] for i in (0, 100, 200)]
        assert len(set(hot)) == 3
        assert hot[1] in found[:100]  # it had a lower rank before


class TestSessions:
    def test_turns_carry_what_was_said(self) -> None:
        load = Workload(requests=6, turns=3, think_s=2.0, prefixes=1, prefix_tokens=9)
        sessions = list(load.sessions("x", 2))
        assert [len(session.turns) for session in sessions] == [3, 3]
        assert sessions[0].turns[0].think_s == 0
        assert all(turn.think_s > 0 for turn in sessions[0].turns[1:])
        assert len(str(sessions[0].turns[1].asks[0].prompt).split()) == 64  # the prefix is first's
        said = [Said("a", "b"), Said("c", "d")]
        body = load.body("m", Ask(prompt="e", max_tokens=1), said)
        assert [m["content"] for m in body["messages"]] == list("abcde")
        assert [m["role"] for m in body["messages"]] == ["user", "assistant"] * 2 + ["user"]
        plain = Workload(endpoint="completions").body("m", Ask(prompt="e", max_tokens=1), said)
        assert plain["prompt"] == "a\nb\nc\nd\ne"

    def test_think_time_has_its_mean(self) -> None:
        load = Workload(turns=2, think_s=3.0, prompt_tokens=1)
        think = [session.turns[1].think_s for session in load.sessions("x", 2000)]
        assert sum(think) / 2000 == pytest.approx(3.0, rel=0.1)

    def test_agents_fan_out_and_join(self) -> None:
        load = Workload(requests=10, fan_out=3)
        (session,) = load.sessions("x", 1)
        assert [len(turn.asks) for turn in session.turns] == [1, 3, 1]
        assert load.asks_a_session == 5

    def test_a_level_has_whole_sessions_and_enough(self) -> None:
        def count(load: Workload, shape: Shape, of: int = 1) -> list[int]:
            jobs = [
                Job(target=TARGET, workload=load, shape=shape, part="x", index=i, of=of)
                for i in range(of)
            ]
            return [len(list(sessions_of(job))) for job in jobs]

        assert count(Workload(requests=10, turns=4), Shape(concurrency=1)) == [3]
        assert count(Workload(requests=2), Shape(concurrency=5)) == [5]
        assert count(Workload(requests=10), Shape(concurrency=2), of=3) == [4, 3, 3]


def test_structured_and_cancelled_shares() -> None:
    load = Workload(requests=1000, structured=0.3, cancel=0.2, max_tokens=10)
    found = asks(load)
    assert sum(ask.structured for ask in found) / 1000 == pytest.approx(0.3, abs=0.05)
    chunks = [x.cancel_after_chunks for x in found if x.cancel_after_chunks is not None]
    assert len(chunks) / 1000 == pytest.approx(0.2, abs=0.05)
    assert set(chunks) == set(range(10))
    body = load.body("m", next(ask for ask in found if ask.structured))
    assert body["response_format"]["json_schema"]["schema"] == SCHEMA
    assert "ignore_eos" not in body


TARGET = Target(url="http://none", model="m")


class TestArrivals:
    @given(
        rate=st.floats(0.01, 1000),
        count=st.integers(1, 200),
        burstiness=st.sampled_from([0.1, 1.0, 7.0, math.inf]),
        burst=st.integers(1, 9),
    )
    def test_offered_rate_is_exact(
        self, rate: float, count: int, burstiness: float, burst: int
    ) -> None:
        times = arrival_times_s(rate, count, burstiness=burstiness, burst=burst, key="k")
        assert times == arrival_times_s(rate, count, burstiness=burstiness, burst=burst, key="k")
        assert len(times) == count
        assert times == sorted(times)
        assert times[-1] == pytest.approx(math.ceil(count / burst) * burst / rate)
        assert len(set(times)) <= math.ceil(count / burst)

    @pytest.mark.parametrize(("burstiness", "spread"), [(0.25, 2.0), (1.0, 1.0), (4.0, 0.5)])
    def test_gaps_have_the_spread_of_their_law(self, burstiness: float, spread: float) -> None:
        """A gamma law of shape b has a coefficient of variation of 1 / sqrt(b)."""
        times = arrival_times_s(10, 5000, burstiness=burstiness, burst=1, key="k")
        gaps = [b - a for a, b in itertools.pairwise([0.0, *times])]
        mean = sum(gaps) / len(gaps)
        std = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
        assert mean == pytest.approx(0.1)
        assert std / mean == pytest.approx(spread, rel=0.1)

    def test_an_even_open_loop_of_a_level_in_two_shares(self) -> None:
        shape = Shape(rate=4.0, burstiness=0, duration_s=2.0)
        shares = [
            list(
                arrivals_of(
                    Job(target=TARGET, workload=Workload(), shape=shape, part="x", index=i, of=2)
                )
            )
            for i in (0, 1)
        ]
        assert [after for after, _ in shares[0]] == pytest.approx([0.25, 0.75, 1.25, 1.75])
        assert [after for after, _ in shares[1]] == pytest.approx([0.5, 1.0, 1.5, 2.0])
        assert [session.index for _, session in shares[1]] == [1, 3, 5, 7]


LINES: list[dict[str, Any]] = [
    {"timestamp": 0, "input_length": 1100, "output_length": 30, "hash_ids": [0, 1, 2]},
    {"timestamp": 500, "input_length": 700, "output_length": 2, "hash_ids": [0, 9]},
    {"timestamp": 4000, "input_length": 1024, "output_length": 0, "hash_ids": [0, 1]},
]


class TestTrace:
    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        path = tmp_path / "trace.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
        return path

    def test_equal_ids_are_equal_tokens(self, file: Path) -> None:
        load = Workload(trace=str(file), requests=0)
        one, two, three = (str(ask.prompt).split() for ask in asks(load, count=3))
        assert [len(one), len(two), len(three)] == [1100, 700, 1024]
        assert one[:512] == two[:512] == three[:512]
        assert one[512:1024] == three[512:]
        assert one[512:700] != two[512:]
        assert [ask.max_tokens for ask in asks(load, count=3)] == [30, 2, 1]

    def test_smaller_blocks_keep_the_sharing(self, file: Path) -> None:
        load = Workload(trace=str(file), trace_block_tokens=16, kind="ids", endpoint="completions")
        one, two, three = (ask.prompt for ask in asks(load, count=3))
        assert [len(one), len(two), len(three)] == [34, 21, 32]
        assert one[:16] == two[:16] == three[:16]
        assert one[16:32] == three[16:]

    def test_times_and_speed(self, file: Path) -> None:
        load = Workload(trace=str(file), requests=0, speed=2.0)

        def times(load: Workload, **more: Any) -> list[float]:
            shape = Shape(trace=True, **more)
            job = Job(target=TARGET, workload=load, shape=shape, part="x")
            return [after for after, _ in arrivals_of(job)]

        assert times(load) == [0, 0.25, 2.0]
        assert times(load, duration_s=1.0) == [0, 0.25]
        assert times(Workload(trace=str(file), requests=1)) == [0]

    def test_gzipped(self, file: Path) -> None:
        packed = file.with_suffix(".jsonl.gz")
        packed.write_bytes(gzip.compress(file.read_bytes()))
        assert list(read_trace(str(packed))) == list(read_trace(str(file)))

    @pytest.mark.parametrize(
        "line",
        [
            "{",
            '{"timestamp": 1}',
            json.dumps(LINES[0] | {"input_length": 5000}),
            json.dumps(LINES[0] | {"timestamp": -1}),
            json.dumps(LINES[0] | {"output_length": -1}),
        ],
    )
    def test_a_wrong_line_is_named(self, tmp_path: Path, line: str) -> None:
        file = tmp_path / "bad.jsonl"
        file.write_text(json.dumps(LINES[0]) + "\n" + line + "\n")
        with pytest.raises(ConfigError, match="line 2"):
            list(read_trace(str(file)))

    def test_no_such_file(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"cannot read .*none: No such file"):
            list(read_trace(str(tmp_path / "none")))
