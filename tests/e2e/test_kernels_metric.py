"""What computes, and why: in the log of the start and, word for word, in /metrics."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from headrace.messages import KernelsInfo
from headrace.runner.build_cpu import Kernels, kernels_info
from tests.backend.test_quantization import NATIVE, folder
from tests.backend.test_weights import CONFIG
from tests.devices import load
from tests.e2e.serve_process import ServeProcess


def labels_of(metrics: str) -> dict[str, str]:
    """Of the one series."""
    (series,) = [x for x in metrics.splitlines() if x.startswith("headrace_kernels_info{")]
    assert series.endswith("} 1.0"), series
    found: dict[str, str] = json.loads(
        "{" + re.sub(r"(\w+)=(?=\")", r'"\1":', series.split("{", 1)[1].rsplit("}", 1)[0]) + "}"
    )
    return found


@pytest.mark.on_cpu
def test_no_compiler(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    options = ("--backend", "cpu", "--load-format", "dummy", "--kv-blocks", "8")
    with ServeProcess(str(tmp_path), *options, CXX="no-such-compiler") as server:
        labels = labels_of(server.get("/metrics")[1])
    assert labels["backend"] == "cpu"
    assert (labels["kernels"], labels["precision"]) == ("torch", "exact")
    assert labels["isa"]
    assert "CXX = no-such-compiler is not a program; install a C++17 compiler" in labels["reason"]
    assert f"torch: {labels['reason']}" in server.said


@NATIVE
@pytest.mark.on_cpu
def test_native(tmp_path: Path) -> None:
    files = folder(tmp_path)
    runner = load("native", files, cpu_precision="fast", kv_blocks=8)
    info = runner.capacity.kernels
    runner.close()
    assert info == KernelsInfo("cpu", "native", info.isa, "fast", "as set")
    assert info.isa in ("avx512", "avx2", "neon", "generic")


def test_reason_is_the_log_line() -> None:
    kernels = Kernels(None, True, "why not")
    assert kernels_info(kernels, None).reason in str(kernels)
