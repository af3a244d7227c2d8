"""What is shown while weights load."""

from __future__ import annotations

import pytest

from headrace import load_bar
from headrace.load_bar import LoadBar

GIB = 2**30


def test_without_a_terminal_there_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    with LoadBar(said.append, shown=False) as bar:
        bar.show(GIB, 4 * GIB)
        assert not said, "a fast load says nothing"
        monkeypatch.setattr(load_bar, "LINE_S", 0.0)
        bar.show(2 * GIB, 4 * GIB)
    assert said == ["loaded 2.00 of 4.00 GiB of weights"]


def test_a_bar_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setattr(load_bar, "REFRESH_S", 0.0)
    said: list[str] = []
    bar = LoadBar(said.append, shown=True)
    bar.show(GIB, 4 * GIB)
    assert "1.0/4.0 GiB" in capsys.readouterr().err
    bar.show(4 * GIB, 4 * GIB)
    shown = capsys.readouterr().err
    assert "4.0/4.0 GiB" in shown
    assert shown.endswith(("\x1b[?25h", "\x1b[2K")), "the cursor is back and the line empty"
    bar.stop()
    assert not capsys.readouterr().err
    assert not said
