"""Kernels of AArch64 without such a machine: compiled as `headrace.native.build` would, emulated.

driver.cpp runs every op on the same random input with the `neon` and the `generic` table of AArch64
and with this machine's `generic` one. The first two are compared bit by bit, and with the third up
to rounding: AArch64 fuses multiply and add, plain x86-64 does not.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.native.build import FLAGS, SOURCES, Unavailable, commands_for, find_compiler

CROSS, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
_DRIVER = Path(__file__).with_name("driver.cpp")
Numbers = npt.NDArray[Any]


def compile_driver(compiler: str, machine: str, sets: tuple[str, ...], folder: Path) -> Path:
    """The driver, linked statically with a library of `sets` for `machine`."""
    folder.mkdir()
    commands, objects = commands_for(compiler, FLAGS, sets, folder, machine)
    program = folder / "driver"
    own = ["-DHR_ISA=driver", f"-I{SOURCES}", "-static", "-pthread", str(_DRIVER)]
    with ThreadPoolExecutor() as jobs:
        list(jobs.map(lambda command: subprocess.run(command, check=True), commands))
    subprocess.run([compiler, *FLAGS, *own, *objects, "-o", str(program)], check=True)
    return program


def read(path: Path) -> dict[str, Numbers]:
    """The records of a file of the driver; 16-bit floats as float32."""
    out: dict[str, Numbers] = {}
    with path.open("rb") as file:
        while name := file.readline().decode().strip():
            kind, count = file.readline().decode().strip(), int(file.readline())
            stored = np.dtype(np.uint16 if kind == "bfloat16" else kind)
            numbers = np.frombuffer(file.read(count * stored.itemsize), stored)
            assert name not in out
            assert numbers.size == count
            if kind == "bfloat16":
                numbers = (numbers.astype(np.uint32) << 16).view(np.float32)
            out[name] = numbers
    return out


def allowed(name: str, numbers: Numbers, wanted: Numbers) -> float:
    """How far apart numbers of two machines may be."""
    if numbers.dtype.kind == "i":
        return 1.0 if "int8 cache" in name else 0.0
    # A number on the edge between two steps of a cache's type may fall on either side.
    top, kind = float(np.abs(wanted).max(initial=0.0)), name.partition(" cache")[0]
    steps = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "int8": 2.0**-7}
    return top * (steps.get(kind, 2e-6) if name.endswith((": k", ": v", ": attention")) else 2e-6)


def differences(got: dict[str, Numbers], wanted: dict[str, Numbers], exact: bool) -> list[str]:
    """Records that differ, in words."""
    said = [f"{name}: only one has it" for name in got.keys() ^ wanted.keys()]
    for name in got.keys() & wanted.keys():
        a, b = got[name], wanted[name]
        if exact and a.tobytes() != b.tobytes():
            said.append(f"{name}: {(a != b).sum()} of {a.size} differ")
        if not exact:
            apart = np.abs(a.astype(np.float64) - b.astype(np.float64)).max(initial=0.0)
            if not apart <= allowed(name, a, b):  # a NaN is no less
                said.append(f"{name}: {apart:.3g} apart, of at most {np.abs(b).max():.3g}")
    return said


def main() -> int:
    """0: all agree."""
    native = find_compiler()
    if isinstance(native, Unavailable):
        sys.exit(native.reason)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        here = compile_driver(native, "", ("generic",), folder / "here")
        there = compile_driver(CROSS, "aarch64", ("neon", "generic"), folder / "there")
        results: list[dict[str, Numbers]] = []
        for command, isa in (
            ([EMULATOR, str(there)], "neon"),
            ([EMULATOR, str(there)], "generic"),
            ([str(here)], "generic"),
        ):
            path = folder / f"results.{len(results)}"
            subprocess.run([*command, isa, str(path)], check=True)
            results.append(read(path))
    neon, portable, ours = results
    against = {
        "neon and generic, both of AArch64, bit by bit": differences(neon, portable, exact=True),
        "neon and this machine's generic": differences(neon, ours, exact=False),
    }
    for what, said in against.items():
        print(f"{what}: {len(neon)} results, {len(said)} differ", *said, sep="\n  ")
    return int(any(against.values()))


if __name__ == "__main__":
    sys.exit(main())
