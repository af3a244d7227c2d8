"""Which graphs are captured and when; the recording itself is a double here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headrace.runner.graphs import OFTEN, RARELY, Graphs, Key

KEYS: list[Key] = [("crowd", 8), ("alone", 4), ("alone", 1), ("alone", 2)]


class Recorder:
    """Writes down what is done to which key; `full`: keys for which there is no memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, stream: Any = "a stream") -> None:
        self.did: list[tuple[str, Key]] = []
        self.full: set[Key] = set()
        self.graphs = Graphs(
            stream,
            KEYS,
            lambda *key: self.did.append(("pad", key)),
            lambda *key: self.did.append(("load", key)),
            lambda *key: self.did.append(("work", key)),
        )
        monkeypatch.setattr(self.graphs, "_record", self._record)

    def _record(self, key: Key) -> Any:
        if key in self.full:
            raise torch.OutOfMemoryError("none left")
        self.did.append(("record", key))
        return Replay(self, key)

    def taken(self) -> list[tuple[str, Key]]:
        did, self.did = self.did, []
        return did


class Replay:
    def __init__(self, recorder: Recorder, key: Key) -> None:
        self._recorder, self._key = recorder, key

    def replay(self) -> None:
        self._recorder.did.append(("replay", self._key))


def captured(*keys: Key) -> list[tuple[str, Key]]:
    return [(what, key) for key in keys for what in ("pad", "load", "record")]


def test_first_those_of_the_start_then_one_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    graphs = recorder.graphs
    graphs.capture(2)
    assert recorder.taken() == captured(*KEYS[:2])
    assert (graphs.captured, graphs.planned) == (2, 4)
    graphs.run("alone", 4)
    graphs.run("alone", 1)
    assert recorder.taken() == [("replay", ("alone", 4)), ("work", ("alone", 1))]
    assert graphs.capture_next()
    assert recorder.taken() == captured(("alone", 1))
    assert graphs.capture_next()
    assert not graphs.capture_next()
    assert recorder.taken() == captured(("alone", 2))
    assert graphs.captured == graphs.planned
    graphs.run("alone", 1)
    assert recorder.taken() == [("replay", ("alone", 1))]


def test_what_is_missed_often_is_captured_before_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    graphs = recorder.graphs
    graphs.capture(1)
    recorder.taken()
    for _ in range(OFTEN - 1):
        graphs.expect("alone", 2)
        graphs.expect("crowd", 8)
        graphs.expect("eager", 3)
    assert recorder.taken() == []
    graphs.expect("alone", 2)
    assert recorder.taken() == captured(("alone", 2))
    for _ in range(OFTEN):
        graphs.expect("alone", 2)
    assert recorder.taken() == []
    assert graphs.captured == 2


def test_the_next_graph_that_is_there_stands_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that is launched call by call costs more than its padding."""
    recorder = Recorder(monkeypatch)
    graphs = recorder.graphs
    graphs.capture(2)
    recorder.taken()
    assert graphs.expect("alone", 4, []) == 4
    assert graphs.expect("crowd", 4, [6, 8]) == 8
    assert graphs.expect("crowd", 4, [6]) == 4
    for _ in range(RARELY - 1):
        assert graphs.expect("alone", 1, [2, 4]) == 4
    assert recorder.taken() == []
    assert graphs.expect("alone", 1, [2, 4]) == 1
    assert recorder.taken() == captured(("alone", 1))
    assert graphs.expect("alone", 1, [2, 4]) == 1
    recorder.full = {("alone", 2)}
    graphs.capture_next()
    assert graphs.expect("alone", 2, [4]) == 4, "there is no memory for its own"


def test_without_memory_steps_go_on_call_by_call(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(monkeypatch)
    graphs = recorder.graphs
    graphs.capture(1)
    recorder.full = {("alone", 4)}
    assert graphs.capture_next()
    assert "no memory for 3 of 4 graphs" in caplog.text
    recorder.taken()
    assert not graphs.capture_next()
    graphs.run("alone", 1)
    assert recorder.taken() == [("work", ("alone", 1))]
    recorder.full = {("crowd", 8)}
    with pytest.raises(torch.OutOfMemoryError):  # at the start it is an error
        graphs.capture(1)


def test_without_a_stream_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch, stream=None)
    recorder.graphs.capture(2)
    assert not recorder.graphs.capture_next()
    assert recorder.taken() == []
