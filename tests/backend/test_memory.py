"""What a loaded model takes: its packed weights and its KV cache once, and little beside."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.sources.files import ModelFiles
from tests.devices import WITHOUT_NATIVE

ALLOWANCE_BYTES = 32 * 2**20  # buffers of a step, rotary tables, the library, threads, objects

# Run by itself: what other tests left in memory would hide a second copy.
MEASURE = """
import ctypes, gc, json, sys
from pathlib import Path
from headrace.backends.choose import settled
from headrace.config import Settings
from headrace.models.kv_layout import layout_of
from headrace.native.library import load
from headrace.runner import ledger
from headrace.runner.build import load_runner
from headrace.sources.files import ModelFiles

def resident():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    sizes = dict(line.split(":", 1) for line in lines)
    return {key: int(sizes[key].split()[0]) * 1024 for key in ("VmRSS", "VmHWM")}

path, kv_dtype = sys.argv[1:]
files = ModelFiles("model", "gguf", Path(path))
load()  # builds at the first use ever
before = resident()
settings = settled(Settings(backend="cpu", kv_blocks=64, max_num_seqs=8, kv_dtype=kv_dtype))
runner, info = load_runner(settings, files, lambda name, seconds: None)
loaded = resident()
forward = runner._forward
memory = runner._memory
for array in memory.arrays():
    array.fill(1)
filled = resident()
packed = [m for matrices in forward._weights.values() for m in matrices]
print(json.dumps({
    "before": before["VmRSS"], "peak": loaded["VmHWM"], "loaded": loaded["VmRSS"],
    "filled": filled["VmRSS"], "weights": sum(m.memory.size for m in packed),
    "types": sorted({m.ggml_type for m in packed}),
    "kv": (memory.blocks + 1) * memory.block_size
    * ledger.kv_block_bytes(info.spec, layout_of(info.spec), kv_dtype, 1),
    "torch": "torch" in sys.modules,
}))
"""


@pytest.mark.on_cpu
@pytest.mark.skipif(bool(WITHOUT_NATIVE), reason=WITHOUT_NATIVE)
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc/self/status")
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_nothing_is_there_twice(default_model: ModelFiles, kv_dtype: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(default_model.path), kv_dtype],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    found = json.loads(done.stdout)
    file_bytes = default_model.path.stat().st_size
    assert not found["torch"], "130 MiB and two seconds of every start"
    assert found["types"] == [3, 8], "Q4_1 and Q8_0, as in the file"
    # Panels of 16 rows pad little; the vocabulary is in the file and not here.
    assert 0.95 * file_bytes < found["weights"] < 1.02 * file_bytes
    assert found["weights"] > 2 * ALLOWANCE_BYTES, "a second copy would fit the allowance"
    for when, wanted in (
        ("peak", found["weights"]),
        ("loaded", found["weights"]),
        ("filled", found["weights"] + found["kv"]),
    ):
        grown = found[when] - found["before"]
        assert 0.95 * wanted < grown < wanted + ALLOWANCE_BYTES, (when, grown, found)
