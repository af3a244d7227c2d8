"""A step's arithmetic in plain torch; see `models.ops.Ops`."""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from headrace.backends.cpu.attention import StepAttention
from headrace.models.layers import Embedding, Linear, RMSNorm, SwiGLU, rotate


class Wanted(NamedTuple):
    """The tokens of a step that yield logits, and their attention: each a row of its own, whose K
    and V the cache has."""

    tokens: list[int]
    step: StepAttention


class TorchOps:
    """ids [T] int64; rotary: cos and sin, each [T, 1, d/2]; wanted: None = every token is."""

    def __init__(
        self,
        ids: Tensor,
        step: StepAttention,
        rotary: tuple[Tensor, Tensor],
        wanted: Wanted | None = None,
    ) -> None:
        self._ids, self._step, self._rotary, self._wanted = ids, step, rotary, wanted
        self._fresh: tuple[Tensor, Tensor] | None = None  # k and v between `qkv` and `attend`
        self._layer = -1  # of the last `qkv`

    def embed(self, embedding: Embedding) -> Tensor:
        """-> x [T, hidden]."""
        return F.embedding(self._ids, embedding.weight)

    def qkv(self, layer: int, x: Tensor, norm: RMSNorm, linear: Linear) -> Tensor:
        """-> q [T, heads, d]; k and v reach the cache with `attend`."""
        store = self._step.store
        out = linear(norm(x)).view(x.shape[0], -1, store.head_dim)
        turned = rotate(out[:, : -store.kv_heads], *self._rotary)
        self._fresh = turned[:, -store.kv_heads :], out[:, -store.kv_heads :]
        self._layer = layer
        return turned[:, : -store.kv_heads]

    def narrow(self, x: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        """See `Ops`."""
        if self._wanted is None:
            return x, q
        assert self._fresh is not None, "narrow() follows qkv()"
        self._step.write(self._layer, *self._fresh)
        tokens, self._step = self._wanted
        k, v = self._fresh
        self._fresh = k[tokens], v[tokens]
        return x[tokens], q[tokens]

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """-> [T, heads * d]."""
        assert self._fresh is not None, "attend() follows qkv()"
        k, v = self._fresh
        self._fresh = None
        return self._step.attend(layer, q, k, v)

    def add_linear(self, x: Tensor, y: Tensor, linear: Linear) -> Tensor:
        """-> x + linear(y)."""
        added: Tensor = x + linear(y)
        return added

    def add_mlp(self, x: Tensor, norm: RMSNorm, mlp: SwiGLU) -> Tensor:
        """-> x + mlp(norm(x))."""
        added: Tensor = x + mlp(norm(x))
        return added

    def head(self, x: Tensor, norm: RMSNorm, weight: Tensor) -> Tensor:
        """-> logits [n, vocab] float32."""
        return F.linear(norm(x), weight).float()
