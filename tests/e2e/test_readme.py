"""What the README tells people to type."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

from headrace.stages import STAGES
from tests.e2e.serve_process import ServeProcess

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_the_first_request() -> None:
    (block,) = re.findall(r"```bash\n(curl .*?)```", README, re.DOTALL)
    with ServeProcess(
        "--backend", "fake", "--served-model-name", "smollm2-135m-instruct"
    ) as server:
        command = "exec " + block.replace("http://127.0.0.1:8000", server.url)
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["choices"][0]["message"]["content"]


def test_the_map_of_stages() -> None:
    for stage in STAGES:
        where = ", ".join(f"`{module}`" for module in stage.modules) or "not yet"
        assert f"| {stage.number} {stage.name} | {stage.problem} | {where} |" in README


def test_named_files_exist() -> None:
    root = Path(__file__).parents[2]
    for name in re.findall(r"\]\(([\w./]+)\)", README):
        assert (root / name).exists(), name
