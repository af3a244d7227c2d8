"""hf: sources against a hub on localhost: whole, or not at all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from headrace.errors import DownloadError, ModelError
from headrace.sources import hub
from headrace.sources.files import ModelFiles
from headrace.sources.resolve import local, resolve
from tests.unit.fake_hub import FakeHub, serve

REPO = "someone/tiny-model"
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
INDEX = {"weight_map": dict(zip("ab", SHARDS, strict=True))}
FILES: dict[str, bytes] = {
    "config.json": b'{"vocab_size": 8}',
    "generation_config.json": b'{"eos_token_id": 1}',
    "tokenizer.json": b'{"model": {}}',
    "tokenizer_config.json": b"{}",
    "chat_template.jinja": b"x",
    "model.safetensors.index.json": json.dumps(INDEX).encode(),
    SHARDS[0]: os.urandom(200_000),
    SHARDS[1]: os.urandom(100_000),
    "README.md": b"not needed",
    "pytorch_model.bin": b"not needed",
}
WANTED = set(FILES) - {"README.md", "pytorch_model.bin"}


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with serve(FakeHub(REPO, dict(FILES))) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


def get(source: str = f"hf:{REPO}") -> ModelFiles:
    return resolve(source, say=lambda line: None)


def assert_whole(files: ModelFiles) -> None:
    assert (files.name, files.kind) == (REPO, "hf")
    assert {p.name: p.read_bytes() for p in files.path.iterdir()} == {n: FILES[n] for n in WANTED}


def test_only_what_is_needed(served: FakeHub) -> None:
    assert_whole(get())
    assert sorted(served.downloads()) == sorted(WANTED)


def test_bare_name_is_a_repository(served: FakeHub) -> None:
    assert_whole(get(REPO))


def test_second_time_without_network(served: FakeHub) -> None:
    get()
    served.asked.clear()
    assert_whole(get())
    assert served.asked == []


def test_what_reads_no_weights_downloads_none(served: FakeHub) -> None:
    """A plan, an inspection, random weights, a gateway's tokenizer."""
    outline = {name for name in WANTED if "safetensors" not in name}
    for _ in range(2):
        files = resolve(f"hf:{REPO}", say=print, weights=False)
        assert {path.name for path in files.path.iterdir()} == outline
        assert sorted(served.downloads()) == sorted(outline)
    assert local(REPO, weights=False) == files
    assert local(REPO) is None
    assert_whole(get())
    assert sorted(served.downloads()) == sorted(WANTED), "what was there came again"


def test_a_whole_model_is_an_outline_too(served: FakeHub) -> None:
    get()
    served.asked.clear()
    assert_whole(resolve(f"hf:{REPO}", say=print, weights=False))
    assert served.asked == []


def test_cut_connection_is_resumed(served: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)  # what is resumed are whole chunks
    served.cut[SHARDS[0]] = 1
    assert_whole(get())
    assert served.ranges == ["bytes=100000-"]


@pytest.mark.parametrize("name", [SHARDS[0], "tokenizer.json", "generation_config.json"])
def test_interrupted_is_not_whole(
    served: FakeHub, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is missing, even a file that some models lack, the next start gets it."""
    served.broken.add(name)
    with pytest.raises(DownloadError, match=REPO):
        get()
    with pytest.raises(DownloadError, match=REPO):
        get()
    served.broken.clear()
    assert_whole(get())


def test_killed_midway(served: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served.stalled.add(SHARDS[0])
    code = f"from headrace.sources.resolve import resolve; resolve('hf:{REPO}', say=print)"
    environ = os.environ | {"HF_HUB_CACHE": str(tmp_path / "hub")}
    with subprocess.Popen([sys.executable, "-c", code], env=environ, stderr=-3) as process:
        deadline = time.monotonic() + 60
        while SHARDS[0] not in served.downloads() and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    assert SHARDS[0] in served.downloads()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DownloadError, match="HF_HUB_OFFLINE is set"):
        get()
    monkeypatch.delenv("HF_HUB_OFFLINE")
    served.stalled.clear()
    assert_whole(get())


def test_offline(served: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DownloadError, match="there is no copy"):
        get()
    assert served.asked == []
    monkeypatch.delenv("HF_HUB_OFFLINE")
    get()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert_whole(get())


def test_offline_with_a_copy_that_someone_else_made(
    served: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No mark of ours, but every file that a model needs."""
    get()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert_whole(get())
    (hub.fetch(REPO, print) / SHARDS[1]).unlink()
    with pytest.raises(DownloadError, match=f"{SHARDS[1]} is missing|no copy"):
        get()


def test_file_deleted_from_the_cache(served: FakeHub) -> None:
    (get().path / SHARDS[1]).unlink()
    assert_whole(get())


def test_hub_that_cannot_be_reached(served: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(DownloadError, match=r"could not download hf:.*HF_HUB_OFFLINE=1"):
        get()


def test_unknown_and_gated(served: FakeHub) -> None:
    with pytest.raises(DownloadError, match="knows no hf:no/such"):
        get("hf:no/such")
    served.gated = True
    with pytest.raises(DownloadError, match=r"gated.*HF_TOKEN"):
        get()


def test_repository_without_weights(served: FakeHub) -> None:
    for name in ("model.safetensors.index.json", *SHARDS):
        del served.files[name]
    with pytest.raises(ModelError, match=r"has no model\.safetensors"):
        get()
