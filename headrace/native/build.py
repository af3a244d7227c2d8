"""Compiles `src/` into shared libraries, once for each compiler, instruction set and source.

At first use only the best set of this processor is compiled: that is the time a newcomer waits.
The library of kernels may also hold several sets (`build(sets=...)`); which one runs is chosen when
it starts. Merging of pieces (`build_pieces`) is a library of its own: text needs no kernels.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec

from headrace.sources import cache

log = logging.getLogger("headrace.native")

L = TypeVar("L")

SOURCES = Path(__file__).parent / "src"
_COMPILERS = ("g++", "clang++", "c++")
_REMEDY = "install a C++17 compiler (Debian: apt install g++; macOS: xcode-select --install)"
_TIMEOUT_S = 300.0
FLAGS = [
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-psabi",  # vectors pass between inlined functions only
]
_AVX2 = ["-DHR_AVX2", "-mavx2", "-mfma", "-mf16c"]
_AVX512 = ["-DHR_AVX512", "-mavx2", "-mfma", "-mf16c"]
_AVX512 += [f"-mavx512{part}" for part in ("f", "bw", "dq", "vl", "vnni")]
_NEEDS = {  # as Linux names them
    "avx512": {"avx2", "fma", "f16c"}
    | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"},
    "avx2": {"avx2", "fma", "f16c"},
    "neon": {"asimddp"},
}
_PER_SET = ("linear", "attention", "elementwise", "quantise", "table")
_ONCE = ("pack", "pool", "dispatch")
_PIECES = "pieces"


class Unavailable(msgspec.Struct, frozen=True):
    """Why there is no library, and the one thing to do about it."""

    reason: str
    remedy: str


def instruction_sets(machine: str = platform.machine()) -> dict[str, list[str]]:
    """Kernel tables of an architecture, best first -> the flags they are compiled with."""
    if machine in ("x86_64", "AMD64"):
        return {"avx512": _AVX512, "avx2": _AVX2, "generic": []}
    if machine in ("aarch64", "arm64"):
        return {"neon": ["-march=armv8.2-a+dotprod"], "generic": []}
    return {"generic": []}


def best_set(machine: str = platform.machine(), cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The first set whose instructions the processor has, by Linux's names for them.

    Without /proc/cpuinfo: neon on arm64 (every Apple processor has it), else generic.
    """
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return "neon" if machine == "arm64" else "generic"
    found = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    flags = set(found.partition(":")[2].split())
    return next(
        name for name in instruction_sets(machine) if _NEEDS.get(name, frozenset()) <= flags
    )


def find_compiler(environ: Mapping[str, str] = os.environ) -> str | Unavailable:
    """$CXX, or the first compiler on PATH."""
    named = environ.get("CXX")
    for name in [named] if named else _COMPILERS:
        path = shutil.which(name, path=environ.get("PATH"))
        if path:
            return path
    missing = f"CXX = {named} is not a program" if named else "no C++ compiler on PATH"
    return Unavailable(missing, _REMEDY)


def build(
    environ: Mapping[str, str] = os.environ,
    sets: Sequence[str] = (),
    extra_flags: Sequence[str] = (),
) -> Path | Unavailable:
    """The library with kernels for `sets` (none: this processor's best), cached or newly built."""
    sets = sets or (best_set(),)
    kernels = [path for path in SOURCES.iterdir() if path.stem != _PIECES]
    return _cached(environ, "libheadrace.so", [*FLAGS, *extra_flags], sets, kernels)


def build_pieces(
    environ: Mapping[str, str] = os.environ, extra_flags: Sequence[str] = ()
) -> Path | Unavailable:
    """The library that merges pieces of text, cached or newly built."""
    sources = [SOURCES / f"{_PIECES}.cpp"]
    return _cached(environ, "libpieces.so", [*FLAGS, *extra_flags], (), sources)


def opened(built: Path | Unavailable, load: Callable[[Path], L]) -> L | Unavailable:
    """What `load` makes of the library at a path."""
    if isinstance(built, Unavailable):
        return built
    try:
        return load(built)
    except OSError as error:
        return Unavailable(f"cannot load {built}: {error}", f"remove {built.parent}")


def _cached(
    environ: Mapping[str, str],
    name: str,
    flags: list[str],
    sets: Sequence[str],
    sources: Sequence[Path],
) -> Path | Unavailable:
    """The library `name` of the newest sources. sets: of kernels; none: it has no kernels."""
    compiler = find_compiler(environ)
    if isinstance(compiler, Unavailable):
        return compiler
    try:
        folder = cache.cache_home(environ) / "native" / _key(compiler, flags, sets, sources)
        path = folder / name
        if path.exists():
            return path
        with cache.lock(folder.parent / f"{path.stem}.lock"):
            if path.exists():  # another process was building it
                return path
            return _build(compiler, flags, sets, path)
    except OSError as error:
        return Unavailable(f"cannot build in {cache.cache_home(environ)}: {error}", "make room")


@functools.cache
def _version(compiler: str) -> str:
    """What the compiler says it is; a key, not for people."""
    said = subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    return said.stdout


def _key(compiler: str, flags: list[str], sets: Sequence[str], sources: Sequence[Path]) -> str:
    own = [(name, instruction_sets()[name]) for name in sets]
    digest = hashlib.sha256(repr((_version(compiler), flags, own)).encode())
    for source in sorted(sources):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:20]


def commands_for(
    compiler: str,
    flags: Sequence[str],
    sets: Sequence[str],
    folder: Path,
    machine: str = platform.machine(),
) -> tuple[list[list[str]], list[str]]:
    """Commands that make the objects of a library for `machine`, and those objects."""
    commands, objects = [], []
    units = [(source, name) for name in sets for source in _PER_SET]
    for source, name in [*units, *((source, "") for source in _ONCE)]:
        target = str(folder / f"{source}.{name or 'all'}.o")
        own = [f"-DHR_ISA={name or 'packing'}", *(f"-DHR_HAS_{known.upper()}" for known in sets)]
        if name:
            own += [*instruction_sets(machine)[name], f"-DHR_TABLE=k_{name}"]
        commands.append(
            [compiler, *flags, *own, "-c", str(SOURCES / f"{source}.cpp"), "-o", target]
        )
        objects.append(target)
    return commands, objects


def _pieces_for(
    compiler: str, flags: Sequence[str], folder: Path
) -> tuple[list[list[str]], list[str]]:
    made = str(folder / f"{_PIECES}.o")
    return [[compiler, *flags, "-c", str(SOURCES / f"{_PIECES}.cpp"), "-o", made]], [made]


def _build(compiler: str, flags: list[str], sets: Sequence[str], path: Path) -> Path | Unavailable:
    log.info("building %s with %s, once: seconds to half a minute", path.stem, compiler)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as temporary:
        folder = Path(temporary)
        commands, objects = (
            commands_for(compiler, flags, sets, folder)
            if sets
            else _pieces_for(compiler, flags, folder)
        )
        with ThreadPoolExecutor(max(1, (os.cpu_count() or 1))) as jobs:
            failures = [said for said in jobs.map(_run, commands) if said]
        made = folder / path.name
        link = [compiler, *flags, "-shared", "-pthread", *objects, "-o", str(made)]
        failures = failures or [said for said in [_run(link)] if said]
        if failures:
            return Unavailable(f"{compiler} failed: {failures[0]}", _REMEDY)
        os.replace(made, path)
    return path


def _run(command: list[str]) -> str:
    """ "" if the command worked, else the start of what it said."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no result after {_TIMEOUT_S:.0f} s"
    said = [line for line in done.stderr.splitlines() if "error" in line] or [done.stderr]
    return "" if done.returncode == 0 else said[0][:500]
