"""Bytecode goes into our folder only where nobody else keeps it, and is used from there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.bytecode import unkept

SCRIPT = """
import json, sys
from pathlib import Path
from headrace.bytecode import kept
sys.path.insert(0, sys.argv[1])
before = sys.pycache_prefix, sys.dont_write_bytecode
with kept("large", Path(sys.argv[2])):
    import large.part
after = sys.pycache_prefix, sys.dont_write_bytecode
import large.other
paths = large.part.__cached__, large.other.__cached__
print(json.dumps([paths[0], before == after, paths[1], large.part.value]))
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "site" / "large"
    folder.mkdir(parents=True)
    for name in ("__init__", "part", "other"):
        (folder / f"{name}.py").write_text("value = 1\n")
    return folder


def run(package: Path, cache: Path, **environ: str) -> Any:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(package.parent), str(cache)],
        env=inherited | {"PYTHONPATH": os.getcwd()} | environ,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def files(folder: Path) -> set[str]:
    return {found.name.partition(".")[0] for found in folder.rglob("*.pyc")}


def test_kept_where_imports_may_leave_none(package: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    part, restored, other, _ = run(package, cache, PYTHONDONTWRITEBYTECODE="1")
    assert part.startswith(str(cache))
    assert files(cache) == {"__init__", "part"}
    assert restored
    assert other.startswith(str(package)), "outside of the block nothing changes"
    assert not files(package)

    found = next(cache.rglob("part.*.pyc"))
    before_ns = found.stat().st_mtime_ns
    run(package, cache, PYTHONDONTWRITEBYTECODE="1")
    assert found.stat().st_mtime_ns == before_ns, "the next start uses it"


def test_python_keeps_it_itself(package: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    part, *_ = run(package, cache)
    assert part.startswith(str(package))
    assert not cache.exists()
    assert files(package) == {"__init__", "part", "other"}
    part, *_ = run(package, cache, PYTHONDONTWRITEBYTECODE="1")
    assert part.startswith(str(package)), "it is there already"
    assert not cache.exists()


def test_a_release_has_its_own_where_all_files_have_one_time(package: Path, tmp_path: Path) -> None:
    """As in images that are made to be the same bytes each time."""
    facts, values = package.parent / "large-0.dist-info" / "METADATA", []
    facts.parent.mkdir()
    for release in ("1.0", "1.1"):
        facts.write_text(f"Metadata-Version: 2.1\nName: large\nVersion: {release}\n")
        (package / "part.py").write_text(f"value = {release[-1]}\n")
        os.utime(package / "part.py", (0, 0))
        values.append(run(package, tmp_path / "cache", PYTHONDONTWRITEBYTECODE="1")[-1])
    assert values == [0, 1]


def test_no_such_package() -> None:
    assert not unkept("there_is_no_such_package")
