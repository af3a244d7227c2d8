"""What every kernel asks of the tensors it is given."""

from __future__ import annotations

from torch import Tensor


def check_output(out: Tensor, shape: tuple[int, ...]) -> None:
    """Of that shape, row after row."""
    assert out.shape == shape, f"{tuple(out.shape)} instead of {shape}"
    assert out.is_contiguous(), "rows lie one after another"
