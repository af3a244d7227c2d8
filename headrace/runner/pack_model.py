"""Weights for the native kernels from a model in torch's tensors, as random ones are drawn."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from headrace.models.layers import Decoder
from headrace.native.library import Library
from headrace.native.weights import Arena, PackedMatrix
from headrace.runner.checkpoint import bytes_of
from headrace.runner.pack import NUMBERS, Weights, fill, is_plain, packed_type


def pack_model(model: Decoder, library: Library, *, quantization: str = "none") -> Weights:
    """All of `model`; gate and up apart, as `pack.load` has them. `quantization`: see there.

    Each matrix of the model gives up its own memory once it is packed.
    """
    weights, arena = Weights({}, {}), Arena()
    for name, parameter in list(model.named_parameters()):
        if is_plain(name, parameter.shape):
            weights.vectors[name] = parameter.float().numpy()
            continue
        weights.packed[name] = []
        for part in parameter.chunk(2) if name.endswith("gate_up.weight") else (parameter,):
            stored = NUMBERS[str(part.dtype).removeprefix("torch.")]
            number = packed_type(name, stored, tuple(part.shape), library, quantization)
            matrix = PackedMatrix(library, arena, number, *part.shape)
            rows = np.arange(part.shape[0], dtype=np.int32)
            fill(matrix, bytes_of(part), stored, rows, library)
            weights.packed[name].append(matrix)
        _empty(model, name)
    return weights


def _empty(model: Decoder, name: str) -> None:
    owner, _, leaf = name.rpartition(".")
    kept = torch.empty_like(model.get_parameter(name), device="meta")
    setattr(model.get_submodule(owner), leaf, nn.Parameter(kept, requires_grad=False))
