"""The matrices of one decoder layer and the head, with what a step does around each of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.activation import activation
from headrace.kernels.columns import StepColumns
from headrace.kernels.gate_up import gate_up, gate_up_reference
from headrace.kernels.linear import linear, linear_reference
from headrace.kernels.product import Config, Norm, Workspace
from headrace.kernels.qkv import qkv, qkv_reference
from headrace.kernels.rms_norm import rms_norm
from headrace.kernels.rotary import rotary_write

BLOCK_SIZE = 16


@dataclasses.dataclass(frozen=True)
class Shape:
    """Of a decoder; the default is Qwen2.5-14B's."""

    hidden: int = 5120
    heads: int = 40
    kv_heads: int = 8
    head_dim: int = 128
    ffn: int = 13824
    vocab: int = 152064

    def matrices(self) -> dict[str, tuple[int, int]]:
        """kind -> (N, K) of its weight, in the order of a step."""
        inner = self.heads * self.head_dim
        return {
            "qkv": (inner + 2 * self.kv_heads * self.head_dim, self.hidden),
            "out": (self.hidden, inner),
            "gate_up": (2 * self.ffn, self.hidden),
            "down": (self.hidden, self.ffn),
            "head": (self.vocab, self.hidden),
        }


class Step:
    """What layers read and write beside their weights, for m tokens of one dtype on one device.

    Every token is the tenth of a sequence of its own.
    """

    def __init__(self, shape: Shape, m: int, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.m = shape, m

        def draw(*sizes: int) -> Tensor:
            return torch.randn(sizes, device=device).to(dtype)

        self.x = draw(m, shape.hidden)
        self.attended = draw(m, shape.heads * shape.head_dim)
        self.inner = draw(m, shape.ffn)
        self.norm = Norm(draw(shape.hidden), 1e-6)
        self.bias = draw(shape.matrices()["qkv"][0])
        rows = torch.arange(m + 1, dtype=torch.int32, device=device)
        self.columns = StepColumns(
            rows=rows[:m],
            positions=torch.full_like(rows[:m], 9),
            writes=torch.ones_like(rows[:m]),
            tables=rows[:, None].contiguous(),
        )
        angles = torch.rand(BLOCK_SIZE, shape.head_dim // 2, device=device)
        self.cos, self.sin = angles.cos(), angles.sin()
        cache = (m + 1, shape.kv_heads, BLOCK_SIZE, shape.head_dim)
        self.k, self.v = draw(*cache), draw(*cache)
        self.out = torch.empty(m, shape.hidden, dtype=dtype, device=device)
        self.workspace = Workspace(device)

    def source(self, kind: str) -> Tensor:
        """What the layer's product reads."""
        return {"out": self.attended, "down": self.inner}.get(kind, self.x)

    def ours(self, kind: str, weight: Tensor, config: Config, with_pdl: bool) -> Tensor:
        """The layer with its norm, bias, rotary, KV write, SiLU or residual."""
        x = self.source(kind)
        last: dict[str, Any] = {"config": config, "workspace": self.workspace, "with_pdl": with_pdl}
        if kind == "qkv":
            paged = (self.columns, self.cos, self.sin, self.k, self.v)
            heads = self.shape.heads
            return qkv(x, weight, self.bias, *paged, heads=heads, norm=self.norm, **last)
        if kind == "gate_up":
            return gate_up(x, weight, norm=self.norm, **last)
        if kind == "head":
            return linear(x, weight, norm=self.norm, **last)
        return linear(x, weight, residual=self.x, out=self.out, **last)

    def library(self, kind: str, weight: Tensor, with_pdl: bool) -> Tensor:
        """The same with the library's product and element-wise kernels around it."""
        x = self.source(kind)
        if kind in ("out", "down"):
            return torch.addmm(self.x, x, weight.T, out=self.out)
        x = rms_norm(x, *self.norm[:2], with_pdl=with_pdl)
        if kind == "qkv":
            paged = (self.columns, self.cos, self.sin, self.k, self.v)
            y = torch.addmm(self.bias, x, weight.T)
            return rotary_write(y, *paged, self.shape.heads, with_pdl=with_pdl)
        y = F.linear(x, weight)
        return activation(y, with_pdl=with_pdl) if kind == "gate_up" else y

    def reference(self, kind: str, weight: Tensor) -> Tensor:
        """The same in float64."""
        x = self.source(kind)
        if kind == "qkv":
            cache = (self.k.clone(), self.v.clone())
            args = (self.bias, self.columns, self.cos, self.sin, *cache)
            return qkv_reference(x, weight, *args, heads=self.shape.heads, norm=self.norm)
        if kind == "gate_up":
            return gate_up_reference(x, weight, norm=self.norm)
        if kind == "head":
            return linear_reference(x, weight, norm=self.norm)
        return linear_reference(x, weight, residual=self.x)

    def error(self, reference: Tensor, run: Callable[[], Tensor]) -> float:
        """||out - reference|| / ||reference|| of a run; outputs begin as NaN."""
        self.out.fill_(float("nan"))
        out = run().double()
        return float((out - reference).norm() / reference.norm())
