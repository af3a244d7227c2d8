"""schemathesis over a server's own OpenAPI document: `scripts/fuzz_http --seconds 300`.

Bodies by the document and bodies against it; every answer must be one that the document names, a
wrong body is refused, and nothing is ever a 500.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile

from tests.e2e.serving import Server

CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance",
    "response_schema_conformance", "negative_data_rejection", "unsupported_method",
)  # fmt: skip


def fuzz(server: Server, *options: str) -> tuple[int, str]:
    """Cases that were tried and passed, and the report. Raises AssertionError for one that failed,
    or if the engine is not as it was before."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [
                sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json",
                "--checks", ",".join(CHECKS), "--no-color", "--no-shrink",
                *options,
            ],
            cwd=folder, capture_output=True, text=True,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    server.wait_idle()
    status, answer = server.post("/v1/completions", {"prompt": "x", "max_tokens": 1})
    assert status == 200, answer
    found = re.search(r"(\d+) generated, (\d+) passed", done.stdout)
    assert found is not None, done.stdout[-4000:]
    assert found[1] == found[2], done.stdout[-8000:]
    return int(found[2]), done.stdout


def small_server() -> Server:
    """One whose answers are short, since a body decides how long they get."""
    return Server(max_model_len=256, kv_blocks=512, max_num_seqs=8, max_queue=64)


def main() -> None:
    """A run of a given time, with a random seed, on the fake backend."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seconds", type=int, default=300)
    parser.add_argument("--seed", type=int, default=None)
    given = parser.parse_args()
    options = ["--phases", "coverage,fuzzing", "--max-time", str(given.seconds)]
    options += ["--seed", str(given.seed)] if given.seed is not None else []
    with small_server() as server:
        _, report = fuzz(server, *options)
        statuses: dict[str, int] = {}
        for status in re.findall(r"headrace\.access \w+ \S+ (\d+)", server.log_path.read_text()):
            statuses[status] = statuses.get(status, 0) + 1
    print(report)
    print("answers by status:", dict(sorted(statuses.items())))


if __name__ == "__main__":
    main()
