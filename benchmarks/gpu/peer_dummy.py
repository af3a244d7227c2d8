"""Random weights of the peer as headrace draws them: normal with a deviation of 0.02, norms of 1.

vLLM's own dummy weights are so small that the scores of a router tie, and all tokens go to the same
few experts. As a plug-in of vLLM (entry point `vllm.general_plugins`) this reaches the process that
holds its model, whichever that is.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

STD = 0.02


def register() -> None:
    """vLLM calls it in each of its processes before a model is loaded."""
    from vllm.model_executor.model_loader import dummy_loader, weight_utils

    dummy_loader.initialize_dummy_weights = fill
    weight_utils.initialize_dummy_weights = fill


def fill(model: Any, *_: Any, **__: Any) -> None:
    """In the place of vLLM's `initialize_dummy_weights`."""
    import torch

    for name, tensor in model.state_dict().items():
        if not torch.is_floating_point(tensor):
            continue
        generator = torch.Generator(tensor.device).manual_seed(hash_of(name))
        if tensor.ndim == 1 and "norm" in name:
            tensor.data.fill_(1.0)
        else:
            tensor.data.normal_(0.0, STD, generator=generator)


def hash_of(name: str) -> int:
    """The same in every process."""
    return int.from_bytes(name.encode()[-7:], "little")


def environment(folder: Path) -> dict[str, str]:
    """Makes the plug-in in `folder`; under this environment vLLM finds it."""
    facts = folder / "headrace_dummy-1.dist-info"
    facts.mkdir(parents=True, exist_ok=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: headrace-dummy\nVersion: 1\n")
    entry = "headrace_dummy = benchmarks.gpu.peer_dummy:register"
    (facts / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{entry}\n")
    here = Path(__file__).parents[2]
    paths = [str(folder), str(here), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
