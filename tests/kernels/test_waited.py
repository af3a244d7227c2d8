"""What the CUDA runner says of a wait, with events that are none: in Triton's interpreter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headrace.runner import cuda_runner
from headrace.sources.files import ModelFiles
from tests.backend.runner_contract import Steps
from tests.kernels.conftest import CUDA
from tests.kernels.test_cuda_runner import FIRST, files, interpreted, small

__all__ = ["files", "small"]  # used by pytest
pytestmark = pytest.mark.skipif(CUDA, reason="there the events are real")


def test_a_result_says_how_long_the_device_was_waited_for(
    files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not how long the host then reads what it gave."""
    now_s = 5.0

    def passes(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    class Mark:
        """An event of a device that is waited for until it is reached."""

        def record(self) -> None: ...

        def synchronize(self) -> None:
            passes(0.002)

        def elapsed_time(self, other: Mark) -> float:
            return 7.0

    tokens_of = cuda_runner._tokens_of

    def read(*what: Any) -> Any:
        passes(0.3)
        return tokens_of(*what)

    runner = interpreted(files)
    for marks in (runner._began, runner._computed, runner._ended):
        marks[:] = [Mark() for _ in marks]
    monkeypatch.setattr(cuda_runner, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(cuda_runner, "_tokens_of", read)
    steps = Steps(runner)
    steps.join(0, [3, 1, 8])
    steps.forward(0, FIRST)
    result = steps.launch().result()
    runner.close()
    assert now_s == pytest.approx(5.302)
    assert (result.busy_s, result.sample_s) == (0.007, 0.007)
    assert result.waited_s == pytest.approx(0.002)
