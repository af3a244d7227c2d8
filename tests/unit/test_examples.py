"""What README and the pages tell people to type: commands that exist, with options that they have,
and pages that somebody finds."""

from __future__ import annotations

import ast
import re
import shlex
from importlib import import_module
from pathlib import Path

import click
import pytest

from headrace.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"^```.*?^```|`[^`\n]+`", re.DOTALL | re.MULTILINE)
OTHERS = {  # of other programs
    "--config.file",  # prometheus
    "--ubatch-size", "--poll",  # llama-server
    "--generation-config",  # vLLM
}  # fmt: skip


def command_of(name: str) -> click.Command:
    found = import_module(f"headrace.cli.{name}").command
    assert isinstance(found, click.Command)
    return found


def options_of(command: click.Command) -> set[str]:
    own = {name for p in command.params for name in (*p.opts, *p.secondary_opts)}
    if isinstance(command, click.Group):
        own.update(*(options_of(sub) for sub in command.commands.values()))
    return own


def examples(page: Path) -> list[list[str]]:
    """The words behind `headrace` of each line of a block that runs it."""
    found = []
    for kind, block in FENCED.findall(page.read_text()):
        if kind not in ("", "bash"):
            continue
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True) if "headrace " in line else []
            while words and "=" in words[0]:  # VARIABLE=value
                del words[0]
            if words and words[0] in ("headrace", ".venv/bin/headrace"):
                found.append(words[1:])
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_have_the_options_that_examples_give_them(page: Path) -> None:
    for name, *words in examples(page):
        known = options_of(command_of(name))
        for word in words:
            flag = word.partition("=")[0]
            assert not flag.startswith("--") or flag in known, f"headrace {name} has no {flag}"


def test_every_flag_that_a_page_names_is_an_option() -> None:
    known = {"--help", "--version", *OTHERS}.union(*(options_of(command_of(c)) for c in COMMANDS))
    scripts = [*ROOT.glob("benchmarks/**/*.py"), *ROOT.glob("scripts/*")]
    known |= set(re.findall(r"--[a-z][a-z-]+", "\n".join(p.read_text() for p in scripts)))
    for page in PAGES:
        shown = " ".join(CODE.findall(page.read_text()))
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z.-]*[a-z]", shown))
        assert not named - known, f"{page.name}: {sorted(named - known)}"


def test_the_way_of_one_request() -> None:
    """Where design.md sends who reads the code, the named function or class is defined."""
    page = (ROOT / "docs" / "design.md").read_text()
    named = re.findall(r"^\| `([\w/]+\.py)` \| `(\w+)` \|", page, re.MULTILINE)
    assert len(named) > 10
    for path, name in named:
        tree = ast.parse((ROOT / "headrace" / path).read_text())
        kinds = ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef
        assert name in {node.name for node in ast.walk(tree) if isinstance(node, kinds)}, path


def test_every_page_is_one_click_from_the_readme() -> None:
    linked = set(re.findall(r"\]\((docs/[\w-]+\.md)[)#]", (ROOT / "README.md").read_text()))
    assert linked == {str(page.relative_to(ROOT)) for page in PAGES[1:]}
