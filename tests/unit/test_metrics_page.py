"""The page of several processes: as prometheus_client would write it, read again and again."""

from __future__ import annotations

import math
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.mmap_dict import MmapedDict, mmap_key
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.parser import text_string_to_metric_families

from headrace.observe.current import current
from headrace.observe.metrics_page import Page, _Chunk, _Series

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]
INF = float("inf")


def parsed(text: str) -> Samples:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.startswith("vllm:")
    }


def oracle(folder: Path) -> Samples:
    """What prometheus_client makes of the same files."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(folder))  # type: ignore[no-untyped-call]
    return parsed(generate_latest(registry).decode())


class Writer:
    """A process that counts, without being one."""

    def __init__(self, folder: Path, pid: int) -> None:
        self._folder, self._pid = folder, pid
        self._files: dict[str, MmapedDict] = {}

    def write(
        self,
        kind: str,
        sample: str,
        value: float,
        labels: dict[str, str],
        family: str = "",
        stamp_s: float = 0.0,
    ) -> None:
        if kind not in self._files:
            path = str(self._folder / f"{kind}_{self._pid}.db")
            self._files[kind] = MmapedDict(path)  # type: ignore[no-untyped-call]
        key = mmap_key(family or sample, sample, list(labels), list(labels.values()), "what it is")
        self._files[kind].write_value(key, value, stamp_s)  # type: ignore[no-untyped-call]

    def histogram(self, name: str, values: dict[str, float], total: float) -> None:
        self.write("histogram", f"{name}_sum", total, {"m": "a"}, name)
        for bound, value in values.items():
            self.write("histogram", f"{name}_bucket", value, {"m": "a", "le": bound}, name)

    def close(self) -> None:
        for file in self._files.values():
            file.close()  # type: ignore[no-untyped-call]


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Callable[[int], Writer]]:
    made: list[Writer] = []

    def make(pid: int) -> Writer:
        made.append(Writer(tmp_path, pid))
        return made[-1]

    yield make
    for one in made:
        one.close()


NAMES = st.sampled_from(["a", "b", "c_seconds"])
LABELS = st.dictionaries(st.sampled_from(["x", "y"]), st.text(max_size=3), max_size=2)
NUMBERS = st.floats(0, 1e12, allow_nan=False)
WRITES = st.lists(
    st.one_of(
        st.tuples(st.just("counter"), NAMES, LABELS, NUMBERS),
        st.tuples(st.just("gauge_livemostrecent"), NAMES, LABELS, NUMBERS),
        st.tuples(st.just("gauge_max"), NAMES, LABELS, NUMBERS),
        st.tuples(st.just("gauge_all"), NAMES, LABELS, NUMBERS),
        st.tuples(st.just("histogram"), NAMES, st.just({}), NUMBERS),
    ),
    max_size=12,
)


SAME: tuple[str, str, dict[str, str], float] = ("gauge_livemostrecent", "a", {}, 1.0)


@given(rounds=st.lists(st.tuples(st.integers(1, 3), WRITES), min_size=1, max_size=4))
@example(rounds=[(2, [SAME]), (1, [("gauge_livemostrecent", "a", {}, 0.0)]), (2, [SAME])])
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_any_writes_read_as_by_prometheus_client(
    tmp_path_factory: pytest.TempPathFactory, rounds: list[tuple[int, Any]]
) -> None:
    """One page reads the files as they grow; the oracle reads each time anew."""
    folder = tmp_path_factory.mktemp("metrics")
    page, stamp_s = Page(folder), 1.0
    writers = {pid: Writer(folder, pid) for pid in (1, 2, 3)}
    for pid, writes in rounds:
        for kind, name, labels, value in writes:
            stamp_s += 1
            if kind == "histogram":
                counts = {"0.1": value // 3, "2.5": value // 7, "+Inf": 1.0}
                writers[pid].histogram(f"h_{name}", counts, value)
            else:
                family = f"{kind}_{name}"
                sample = f"{family}_total" if kind == "counter" else family
                writers[pid].write(kind, sample, value, labels, family, stamp_s)
        found, wanted = parsed(page.text().decode()), oracle(folder)
        assert found.keys() == wanted.keys()
        assert all(math.isclose(found[key], value, rel_tol=1e-12) for key, value in wanted.items())
    for one in writers.values():
        one.close()


def test_what_changed_shows_and_what_was_not_written_does_not_move(
    tmp_path: Path, writer: Callable[[int], Writer]
) -> None:
    first, second, page = writer(1), writer(2), Page(tmp_path)
    for i in range(3000):  # more than one chunk, and the file outgrows its first mapping
        first.write("counter", "n_total", i, {"i": str(i)}, "n")
    before = page.text().decode()
    second.write("counter", "n_total", 0.5, {"i": "7"}, "n")
    first.write("counter", "n_total", 1e6, {"i": "2999"}, "n")
    lines = zip(before.splitlines(), page.text().decode().splitlines(), strict=True)
    assert [new for old, new in lines if old != new] == [
        'n_total{i="7"} 7.5',
        'n_total{i="2999"} 1000000.0',
    ]


def test_a_process_that_was_forgotten(tmp_path: Path, writer: Callable[[int], Writer]) -> None:
    dead, page = writer(1), Page(tmp_path)
    dead.write("gauge_livemostrecent", "headrace_requests_running", 3.0, {}, stamp_s=5.0)
    dead.write("counter", "n_total", 2.0, {}, "n")
    assert "vllm:num_requests_running" in page.text().decode()
    (tmp_path / "gauge_livemostrecent_1.db").unlink()
    assert parsed(page.text().decode()) == {("n_total", ()): 2.0}
    writer(4).write("gauge_livemostrecent", "headrace_requests_running", 1.0, {}, stamp_s=6.0)
    assert parsed(page.text().decode())["headrace_requests_running", ()] == 1.0


@pytest.mark.parametrize("pid", [1, 9])
def test_a_page_that_shows_no_request_has_counted_all(
    tmp_path: Path, writer: Callable[[int], Writer], monkeypatch: pytest.MonkeyPatch, pid: int
) -> None:
    """A process writes between any two reads of one page: what ended, then that nothing runs."""
    engine, other = writer(pid), writer(5)
    other.write("counter", "m_total", 1.0, {}, "m")
    other.write("gauge_livemostrecent", "other", 1.0, {}, stamp_s=1.0)
    left, read = 0, _Chunk.read  # reads until the process writes

    def interrupted(chunk: _Chunk, dirty: set[_Series]) -> None:
        nonlocal left
        if left == 0:
            engine.write("counter", "ended_total", 1.0, {}, "ended")
            engine.write("gauge_livemostrecent", "running", 0.0, {}, stamp_s=3.0)
        left -= 1
        read(chunk, dirty)

    monkeypatch.setattr(_Chunk, "read", interrupted)
    shown = set()
    for at in range(5):  # 4 files of one chunk each, and one time after all
        engine.write("counter", "ended_total", 0.0, {}, "ended")
        engine.write("gauge_livemostrecent", "running", 1.0, {}, stamp_s=2.0)
        left = at
        found = parsed(Page(tmp_path).text().decode())
        assert left == at - 4
        shown.add((found["running", ()], found["ended_total", ()]))
    assert shown == {(1.0, 0.0), (1.0, 1.0), (0.0, 1.0)}, "never that nothing runs or has ended"


def test_half_a_histogram_is_not_shown(tmp_path: Path, writer: Callable[[int], Writer]) -> None:
    one, page = writer(1), Page(tmp_path)
    one.histogram("h", {"1.0": 2.0}, 0.5)
    assert (page.text(), page.reading("h")) == (b"", None)
    one.histogram("h", {"+Inf": 1.0}, 0.5)
    assert parsed(page.text().decode())["h_count", (("m", "a"),)] == 3.0


def test_readings(tmp_path: Path, writer: Callable[[int], Writer]) -> None:
    page = Page(tmp_path)
    for pid in (1, 2):
        writer(pid).histogram("h", {"0.1": 3.0, "0.2": 1.0, "+Inf": 1.0}, 2.0)
    writer(1).write("counter", "n_total", 2.0, {"x": "a"}, "n")
    writer(2).write("counter", "n_total", 3.0, {"x": "b"}, "n")
    count = page.reading("n")
    assert count is not None
    assert (count.kind, count.value) == ("counter", 5.0)
    times = page.reading("h")
    assert times is not None
    assert (times.value, times.sum, times.bounds) == (10.0, 4.0, (0.1, 0.2, INF))
    assert times.counts == (6.0, 2.0, 2.0)
    assert page.reading("other") is None
    now = current(["n_total", "n", "h", "other"], page.reading)
    assert now["n_total"] == now["n"] == 5.0
    assert now["h"] == {"count": 10.0, "unit": "", "p50": pytest.approx(1 / 12), "p99": 0.2}
    assert "other" not in now


def test_no_value_is_no_line(tmp_path: Path, writer: Callable[[int], Writer]) -> None:
    one, page = writer(1), Page(tmp_path)
    one.write("gauge_max", "g", float("nan"), {})
    assert page.text() == b""
    one.write("gauge_max", "g", 2.0, {})
    assert page.text().endswith(b"g 2.0\n")


def test_a_file_that_is_just_made(tmp_path: Path, writer: Callable[[int], Writer]) -> None:
    page = Page(tmp_path)
    (tmp_path / "counter_1.db").touch()
    assert page.text() == b""
    (tmp_path / "counter_1.db").write_bytes(struct.pack("i", 0).ljust(1 << 16, b"\0"))
    assert page.text() == b""
    writer(1).write("counter", "n_total", 2.0, {}, "n")
    assert page.text().endswith(b"n_total 2.0\n")


def test_names_of_others(tmp_path: Path) -> None:
    """A process that counts for real shows each value under all of its names."""
    code = (
        "from headrace.observe.metrics import ApiMetrics, EngineMetrics\n"
        "import sys\n"
        "m = ApiMetrics('m'); m.ttft_s.note(0.5); m.flush()\n"
        "sys.stdout.buffer.write(m.expose())"
    )
    env = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, check=True, timeout=60
    )
    text = run.stdout.decode()
    assert 'headrace_ttft_seconds_bucket{model_name="m",le="0.5"} 1\n' in text
    assert 'vllm:time_to_first_token_seconds_bucket{engine="0",model_name="m",le="0.5"} 1\n' in text
    assert 'vllm:time_to_first_token_seconds_sum{engine="0",model_name="m"} 0.5' in text
