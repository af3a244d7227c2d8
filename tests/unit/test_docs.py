"""The HTTP page names every field, with the class that the code puts it in."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import tomllib
from pathlib import Path

import click
import pytest

from headrace.api import spans
from headrace.api.classify import Classify
from headrace.api.embeddings import Embeddings
from headrace.api.metering import UsageRecord
from headrace.api.pooled import MAX_INPUTS, Pooled
from headrace.api.schemas import ACCEPTED, MAX_N, MAX_STOP_IDS, MAX_STOPS, NOT_YET, Chat, Completion
from headrace.api.score import Score
from headrace.bench.stats import FORMULAS, SLOS
from headrace.cli import ablate, plan
from headrace.cli.bench import OPTIONS, workload_of
from headrace.cli.bench import command as bench
from headrace.cli.sim import command as sim
from headrace.config import Settings, flag_of
from headrace.draws import (
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_BREAKER_CHARS,
    MAX_BREAKERS,
    MAX_IDS,
    Draws,
)

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SAMPLING = (DOCS / "sampling.md").read_text()
PAGE = (DOCS / "http.md").read_text()
EMBEDDINGS = (DOCS / "embeddings.md").read_text()
REFUSED = PAGE.split("**Refused until", 1)[1].split("**Unknown**", 1)[0]
HARMLESS = PAGE.split("**Harmless, accepted**", 1)[1].split("**Refused until", 1)[0]
HONOURED = PAGE.split("**Honoured by both", 1)[1].split("**Harmless, accepted**", 1)[0]


def names(text: str) -> set[str]:
    return set(re.findall(r"`([a-z_]+)`", text))


@pytest.mark.parametrize("kind", [Chat, Completion])
def test_every_honoured_field(kind: type[Chat] | type[Completion]) -> None:
    assert set(kind.__struct_fields__) <= names(HONOURED)


def test_every_other_field() -> None:
    assert names(HARMLESS) == ACCEPTED
    assert names(REFUSED) - {"unsupported_parameter", "param"} == set(NOT_YET)


def test_the_sampling_page_names_every_field() -> None:
    assert set(Draws.__struct_fields__) <= set(re.findall(r"\b[a-z_]+\b", SAMPLING))


def test_limits() -> None:
    assert f"up to {MAX_BIASES} ids" in PAGE
    assert f"up to {MAX_IDS} ids" in PAGE
    assert f"up to {MAX_BAD_WORDS} words of 1 to {MAX_BAD_WORD_CHARS}" in PAGE
    assert f"up to {MAX_BREAKERS} texts of 1 to {MAX_BREAKER_CHARS}" in PAGE
    assert f"1 to {MAX_N}, and" in PAGE
    assert f"a string or up to {MAX_STOPS}" in PAGE
    assert f"up to {MAX_STOP_IDS} ids" in PAGE


@pytest.mark.parametrize("kind", [Embeddings, Classify, Score])
def test_the_page_of_embeddings_names_every_field(kind: type[Pooled]) -> None:
    named = set(re.findall(r"`([a-z_0-9]+)`", EMBEDDINGS))
    assert {*kind.__struct_fields__, *kind.HARMLESS, *kind.REFUSED} <= named
    assert f"up to {MAX_INPUTS} texts" in EMBEDDINGS


def test_the_examples_of_embeddings_run() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", EMBEDDINGS, re.DOTALL)
    shown = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(shown):
        patch.setenv("HEADRACE_BACKEND", "fake")
        exec(compile(code, "docs/embeddings.md", "exec"), {})
    assert -1.001 <= float(shown.getvalue()) <= 1.001


def test_the_page_of_bench_names_every_option_and_formula() -> None:
    page = (DOCS / "bench.md").read_text()
    for name, formula in FORMULAS.items():
        assert f"| {name} | {formula} |" in page
    named = set(re.findall(r"--[a-z-]+", page))
    plain = {"--url", "--model", "--api-key", "--endpoint", "--stream", "--temperature"}
    plain |= {"--timeout", "--name"}  # what they do is what they are called
    for option, _ in OPTIONS:
        yes, _, no = option.partition("/")
        assert named & {yes, no} or yes in plain, option
    for name in SLOS:
        assert name in page


def test_the_examples_of_bench_are_options_that_exist(tmp_path: Path) -> None:
    page = (DOCS / "bench.md").read_text()
    (block,) = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    lines = [line.partition(" #")[0].split()[2:] for line in block.splitlines()]
    assert len(lines) == 5
    for arguments in lines:
        if arguments[0] == "compare":
            assert len(arguments) == 3
            continue
        context = bench.make_context("bench", arguments)
        assert not context.args
        if not context.params["trace"]:
            workload_of(context.params)


@pytest.mark.parametrize("command", [plan.command, ablate.command], ids=["plan", "ablate"])
def test_the_pages_of_plan_and_ablate(command: click.Command) -> None:
    """Every option is named, every named one exists, and the examples are options that exist."""
    page = (DOCS / f"{command.name}.md").read_text()
    options = {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
    named = set(re.findall(r"--[a-z][a-z-]+", page))
    plain = {"--backend", "--json", "--api-key", "--seed", "--max-tokens"}
    plain |= {"--measure-prompt", "--measure-output"}  # what they do is what they are called
    for param in command.params:
        assert {*param.opts, *param.secondary_opts} & (named | plain | {"model"}), param.name
    settings = {flag_of(name) for name in Settings.__struct_fields__}
    negated = {flag.replace("--", "--no-", 1) for flag in settings}
    assert named <= options | settings | negated, named - options - settings - negated
    (block,) = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    for line in block.splitlines():
        words = shlex.split(line.partition(" #")[0])
        assert words[:2] == ["headrace", command.name]
        assert command.make_context(str(command.name), words[2:])


def test_the_page_of_the_simulator() -> None:
    page = (DOCS / "sim.md").read_text()
    options = {name for param in sim.params for name in param.opts}
    named = set(re.findall(r"--[a-z][a-z-]+", page))
    assert options <= named, options - named
    (block,) = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    for line in block.splitlines():
        words = shlex.split(line)
        assert words[:2] == ["headrace", "sim"]
        assert sim.make_context("sim", words[2:])


def test_pages_name_every_dependency_and_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    page = (DOCS / "dependencies.md").read_text()
    always, _, optional = page.partition("## Extras")
    cells = [re.sub(r" \(.*\)", "", cell) for cell in first_cells(always)]
    named = {name for cell in cells for name in cell.split(", ")}
    assert named - {"triton"} == {distribution(one) for one in project["dependencies"]}
    assert set(first_cells(optional)) == set(extras)
    for extra in extras.keys() - {"test"}:
        (row,) = re.findall(rf"^\| {extra} \| (.*?) \|", optional, re.MULTILINE)
        assert set(row.split(", ")) == {distribution(one) for one in extras[extra]}
    table = (DOCS / "operations.md").read_text().partition("## Optional packages")[2]
    told = re.findall(r"`(\w+)`", " ".join(first_cells(table.partition("## Start")[0])))
    assert set(told) == extras.keys() - {"test", "check"}


def test_the_page_of_metering_names_every_field() -> None:
    page = (DOCS / "metering.md").read_text().partition("## The log")[2].partition("## ")[0]
    told = re.findall(r"`(\w+)`", " ".join(first_cells(page)))
    assert sorted(told) == sorted(UsageRecord.__struct_fields__)


def test_the_page_of_tracing_names_every_attribute() -> None:
    page = (DOCS / "tracing.md").read_text()
    cells = re.findall(r"`([\w.]+)`", " ".join(first_cells(page)))
    for name in {*spans.PARAMETERS, *spans.PENALTIES}:
        assert name in cells or name.removeprefix("gen_ai.request") in cells, name


def first_cells(page: str) -> list[str]:
    """Of the rows of all tables, but for their heads."""
    lines = page.splitlines()
    rows = zip(lines, [*lines[1:], ""], strict=True)
    return [
        line.split("|")[1].strip()
        for line, after in rows
        if line.startswith("| ") and not after.startswith("|-")
    ]


def distribution(requirement: str) -> str:
    """`msgspec>=0.19` -> `msgspec`."""
    return re.split(r"[<>=;\[ ]", requirement)[0]


def test_tests_that_pages_name_are_there() -> None:
    pages = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
    named = {
        found
        for page in pages
        for found in re.findall(r"`(tests/\S+\.py)::(\w+)`", page.read_text())
    }
    assert len(named) > 10
    for file, name in named:
        assert re.search(rf"^(async )?(def|class) {name}\b", (ROOT / file).read_text(), re.M), (
            f"{file} has no {name}"
        )
