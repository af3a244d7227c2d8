"""Rows of an ablation: each switches one more technique on, by settings that can be served."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from headrace.backends.choose import settled
from headrace.bench.naive import refuse
from headrace.bench.techniques import NAIVE, TECHNIQUES, Load, Technique, arguments, rows_of
from headrace.cli.main import cli
from headrace.cli.options import read_settings
from headrace.cli.serve import command as serve
from headrace.config import Settings
from headrace.errors import ConfigError

LOAD = Load(sequences=8, max_model_len=1000, whole=3)
BACKENDS = pytest.mark.parametrize("backend", ["fake", "cpu", "cuda"])


@BACKENDS
def test_each_row_changes_one_technique(backend: str) -> None:
    rows, fixed = rows_of(backend, LOAD)
    mine = [one for one in TECHNIQUES if backend in one.off]
    assert [row.name for row in rows[1:]] == [one.name for one in mine]
    assert len({row.name for row in rows}) == len(rows)
    assert not {one.name for one in fixed} & {row.name for row in rows}
    assert {one.name for one in fixed} == {o.name for o in TECHNIQUES if backend in o.never_off}
    for before, row, technique in zip(rows, rows[1:], mine, strict=False):
        off = {*technique.off[backend], *(("block_size", "kv_blocks") * technique.unpaged)}
        if before.name == NAIVE:
            continue
        changed = {
            key
            for key in {*before.settings, *row.settings}
            if before.settings.get(key) != row.settings.get(key)
        }
        assert changed == off | set(technique.on.get(backend, {}))
        assert changed, f"{row.name} changes nothing"


@BACKENDS
def test_every_row_can_be_served(backend: str) -> None:
    """Its flags are the command's, and no backend or engine refuses one."""
    for row in rows_of(backend, LOAD)[0]:
        flags = arguments(row.settings)
        given: dict[str, Any] = dict(serve.make_context("serve", flags).params)
        given.pop("config_file"), given.pop("model")
        settings, _ = read_settings(None, given)
        for key, value in row.settings.items():
            assert getattr(settings, key) == value, f"{row.name}: {key}"
        if row.name == NAIVE:
            refuse(settings)
        elif backend != "cuda":
            settled(msgspec.structs.replace(settings, backend=backend))


def test_the_same_memory_with_and_without_pages() -> None:
    rows = {row.name: row.settings for row in rows_of("cpu", LOAD)[0]}
    whole, paged = rows["continuous batching"], rows["paged KV cache"]
    assert (whole["block_size"], whole["kv_blocks"]) == (1000, 3)
    assert (paged["block_size"], paged["kv_blocks"]) == (16, 3 * 63)
    assert rows[NAIVE] == {"engine": "naive", "max_model_len": 1000}
    assert rows["static batches"]["scheduling_policy"] == "static"
    assert rows["prefix reuse"].get("prefix_caching", True)


def test_a_technique_that_comes_later_adds_a_row() -> None:
    later = Technique(name="more", what="of it", off={"fake": {"strict": False}},
                      on={"fake": {"strict": True}})  # fmt: skip
    rows, _ = rows_of("fake", LOAD, (*TECHNIQUES, later))
    assert rows[-1].name == "more"
    assert rows[-1].settings["strict"] is True
    assert all(row.settings["strict"] is False for row in rows[:-1])
    assert "--no-strict" in arguments(rows[0].settings)


def test_the_command_refuses(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match="no row 'magic' here; there are"):
        run("--backend", "fake", "--only", "magic")
    with pytest.raises(ConfigError, match="--plot needs --out"):
        run("--backend", "fake", "--plot")


def run(*args: str) -> None:
    CliRunner().invoke(cli, ["ablate", *args], catch_exceptions=False)


def test_graphs_are_for_a_card() -> None:
    for backend in ("fake", "cpu"):
        with pytest.raises(ConfigError, match="cuda_graphs"):
            settled(Settings(backend=backend, cuda_graphs=False))
