"""Who builds the C++ libraries says so before: it is the longest silence of a first start."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from headrace.native.build import Unavailable, build_pieces


def compiler(folder: Path, script: str) -> dict[str, str]:
    """An environment with a compiler that does what `script` says, and a cache of its own."""
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return {"CXX": str(path), "XDG_CACHE_HOME": str(folder / "cache")}


def test_a_build_is_announced_and_what_is_cached_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    environ = compiler(
        tmp_path, 'while [ $# -gt 1 ]; do shift; done; [ "$1" = --version ] || : > "$1"'
    )
    with caplog.at_level(logging.INFO, "headrace.native"):
        for said in (1, 1):
            assert isinstance(build_pieces(environ), Path)
            assert [record.message[:18] for record in caplog.records] == [
                "building libpieces"
            ] * said


def test_a_compiler_that_fails_is_named_with_its_words(tmp_path: Path) -> None:
    failed = build_pieces(compiler(tmp_path, 'echo "error: no headers" >&2; exit 1'))
    assert isinstance(failed, Unavailable)
    assert "compiler failed: error: no headers" in failed.reason
