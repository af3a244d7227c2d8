"""What may stand as MODEL."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.errors import ModelError
from headrace.sources.cache import cache_home, mark_finished
from headrace.sources.resolve import local, resolve


def say(line: str) -> None:
    raise AssertionError(f"nothing should be fetched: {line}")


def model_folder(path: Path) -> Path:
    path.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (path / name).write_text("{}")
    return path


def test_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model_folder(tmp_path / "owner" / "name")
    files = resolve(str(folder), say=say)
    assert (files.name, files.kind, files.path) == ("name", "hf", folder)
    monkeypatch.chdir(tmp_path)
    assert resolve("owner/name", say=say).kind == "hf"  # a path that exists is no repository
    monkeypatch.chdir(folder)
    assert resolve(".", say=say).name == "name"


@pytest.mark.parametrize("lost", ["config.json", "tokenizer.json", "model.safetensors"])
def test_folder_that_is_no_model(tmp_path: Path, lost: str) -> None:
    folder = model_folder(tmp_path / "m")
    (folder / lost).unlink()
    with pytest.raises(ModelError, match=f"{lost} is missing"):
        resolve(str(folder), say=say)


def test_folder_without_a_shard(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    index = '{"weight_map": {"a": "model.safetensors", "b": "second.safetensors"}}'
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match=r"second\.safetensors is missing"):
        resolve(str(folder), say=say)


def test_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "Some.Model-Q4_1.gguf"
    path.touch()
    files = resolve(str(path), say=say)
    assert (files.name, files.kind, files.path) == ("Some.Model-Q4_1", "gguf", path)


def test_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m.gguf").touch()
    assert resolve("~/m.gguf", say=say).path == tmp_path / "m.gguf"


@pytest.mark.parametrize(
    "source",
    ["nothing", "a/b/c", "./a/b", "no/file.gguf", "hf:", "hf:a", "hf:a/b/c", "hf:../x", "hf:-a/b",
     "pypi:", "pypi:--index-url", "pypi:a b", "pypi:a==", "ftp://x/y", "https://x.y/z", "/no/such"],
)  # fmt: skip
def test_anything_else(source: str) -> None:
    with pytest.raises(ModelError) as caught:
        resolve(source, say=say)
    message = caught.value.message
    assert source in message
    assert any(word in message for word in ("pypi:package", "owner/name", "name==version"))


def test_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(ModelError, match=r"not a \.gguf file"):
        resolve(str(tmp_path / "model.bin"), say=say)


def test_local_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert local("") is None
    assert local("pypi:some-package==1.0") is None
    folder = model_folder(tmp_path / "m")
    assert local(str(folder)) == resolve(str(folder), say=say)
    with pytest.raises(ModelError):
        local("pypi:/")
    data = cache_home() / "models" / "some-package-1.0" / "m.gguf"
    data.parent.mkdir(parents=True)
    data.write_bytes(b"GGUF")
    assert local("pypi:some-package==1.0") is None, "nobody has said that it is whole"
    mark_finished(data, "")
    found = local("pypi:Some_Package==1.0")
    assert found is not None
    assert (found.name, found.path) == ("some-package", data)
