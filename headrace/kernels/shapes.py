"""What every kernel asks of the tensors it is given."""

from __future__ import annotations

import torch
from torch import Tensor


def cdiv(a: int, b: int) -> int:
    """ceil(a / b); Triton's own takes a hundred times as long on the host."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The least that is not less than n >= 1."""
    return 1 << (n - 1).bit_length()


def check_output(out: Tensor, shape: tuple[int, ...]) -> None:
    """Of that shape, row after row."""
    assert out.shape == shape, f"{tuple(out.shape)} instead of {shape}"
    assert out.is_contiguous(), "rows lie one after another"


def check_scale(scale: Tensor | None, tokens: int) -> None:
    """A factor for each token, or none."""
    if scale is not None:
        check_output(scale, (tokens,))
        assert scale.dtype == torch.float32, "factors are float32"
