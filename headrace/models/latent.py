"""Latent attention (MLA): the layer's matrices; the cache keeps one line a token for all heads.

https://arxiv.org/abs/2405.04434, section 2.1.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headrace.models.layers import Linear, RMSNorm
from headrace.models.ops import Ops
from headrace.models.routed import RoutedBlock
from headrace.models.spec import ModelSpec

_EPS = 1e-6  # of the norms of the latents, whatever the model's other norms have


class LatentAttention(nn.Module):
    """What the attention of one layer is, beside its first and last matrix; backends read it.

    The first matrix gives q_width numbers (q, or its latent where there is `q_up`), then rank +
    rope numbers: the latent of k and v, and the key that all heads share, not yet turned. kv_up is
    [heads * (plain + value), rank]: each head's key rows, then its value rows.
    """

    def __init__(self, spec: ModelSpec, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        latent = spec.latent
        assert latent is not None, "a layer of latent attention, and none in the spec"
        self.layer, self.heads = index, spec.heads
        self.rank, self.rope, self.value = latent.kv_rank, latent.rope_dim, latent.value_dim
        self.plain = latent.plain_dim
        self.scale = spec.layer(index).scale or self.query**-0.5
        q_rows = spec.heads * self.query
        self.q_width = latent.q_rank or q_rows
        self.q_norm = RMSNorm(latent.q_rank, _EPS, dtype) if latent.q_rank else None
        self.q_up = Linear(latent.q_rank, q_rows, dtype) if latent.q_rank else None
        self.kv_norm = RMSNorm(self.rank, _EPS, dtype)
        self.kv_up = Linear(self.rank, spec.heads * (self.plain + self.value), dtype)

    @property
    def query(self) -> int:
        """Numbers of a head's query."""
        return self.plain + self.rope

    @property
    def line(self) -> int:
        """Numbers that the cache keeps of a token."""
        return self.rank + self.rope

    def up_parts(self) -> tuple[Tensor, Tensor]:
        """kv_up as it makes keys [heads, plain, rank] and values [heads, value, rank]."""
        both = self.kv_up.weight.view(self.heads, self.plain + self.value, self.rank)
        return both[:, : self.plain], both[:, self.plain :]


class LatentBlock(RoutedBlock):
    """A layer of latent attention, whose feed-forward may be routed."""

    foldable = False  # the latents are normed in between

    def __init__(self, spec: ModelSpec, index: int, dtype: torch.dtype) -> None:
        super().__init__(spec, index, dtype)
        del self.attention
        self.latent = LatentAttention(spec, index, dtype)
        rows = self.latent.q_width + self.latent.line
        self.qkv = Linear(spec.hidden, rows, dtype)
        self.out = Linear(spec.heads * self.latent.value, spec.hidden, dtype)

    def project(self, x: Tensor, ops: Ops) -> Tensor:
        """See `Block`."""
        return ops.latent(self.latent, x, self.attn_norm, self.qkv)

    def attend(self, x: Tensor, q: Tensor, ops: Ops) -> Tensor:
        """See `Block`."""
        y = ops.attend_latent(self.latent, q)
        return ops.add_linear(x, y, self.out, self.post_attn_norm)
