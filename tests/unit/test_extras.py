"""What is said where an optional package is missing can be typed as it stands."""

from __future__ import annotations

import re
import shlex
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from headrace.extras import install, packages_of

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
SAID = {
    name
    for path in (ROOT / "headrace").rglob("*.py")
    for name in re.findall(r"""\binstall\(['"](\w+)['"]\)""", path.read_text())
}


@pytest.mark.parametrize("extra", sorted(SAID))
def test_what_is_said_installs_what_the_extra_names(extra: str) -> None:
    assert sorted(packages_of(extra)) == sorted(EXTRAS[extra])
    words = shlex.split(install(extra))
    assert words == [sys.executable, "-m", "pip", "install", *packages_of(extra)]


def test_without_an_installed_headrace_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", missing)
    assert install("flash").endswith(" -m pip install 'headrace[flash]'")


def test_every_extra_of_serving_is_said_somewhere() -> None:
    assert set(EXTRAS) - {"test", "check"} == SAID
