"""A step's arithmetic in plain torch; see `models.ops.Ops`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.backends.cpu.attention import Pattern, StepAttention
from headrace.models import altup
from headrace.models.altup import AltUpBlock
from headrace.models.latent import LatentAttention
from headrace.models.layers import Attention, Embedding, GivenAttention, Linear, Mlp, Norm
from headrace.models.positions import rotate
from headrace.models.routed import RoutedMlp

Turns = Mapping[str, tuple[Tensor, Tensor]]  # LayerSpec.rope -> cos and sin, each [T, 1, d/2]


class Wanted(NamedTuple):
    """The tokens of a step that yield logits, and their attention: each a row of its own, whose K
    and V the cache has."""

    tokens: list[int]
    step: StepAttention


class TorchOps:
    """ids [T] int64; wanted: None = every token is; tally: see `models.loads`."""

    def __init__(
        self,
        ids: Tensor,
        step: StepAttention,
        turns: Turns,
        wanted: Wanted | None = None,
        tally: Tensor | None = None,
    ) -> None:
        self._tally = tally
        self._ids, self._step, self._turns, self._wanted = ids, step, turns, wanted
        self._fresh: tuple[Tensor, Tensor] | None = None  # k and v between `qkv` and `attend`
        self._layer = -1  # of the last `qkv`

    def embed(self, embedding: Embedding, positions: Embedding | None) -> Tensor:
        """-> x [T, hidden]."""
        x = _rows(embedding, self._ids)
        if positions is not None:
            # A step that ran past the last token of a sequence is dropped; it must only not fail.
            known = self._step.positions.clamp(max=positions.weight.shape[0] - 1)
            x = x + F.embedding(known, positions.weight)
        return x

    def rows(self, table: Embedding) -> Tensor:
        """-> [T, width]."""
        return _rows(table, self._ids.where(self._ids < table.weight.shape[0], 0))

    def qkv(self, attention: Attention, x: Tensor, norm: Norm, linear: Linear) -> Tensor:
        """-> q [T, heads, d]; k and v reach the cache with `attend`."""
        out: Tensor = linear(norm(x)).view(x.shape[0], -1, attention.head_dim)
        if attention.clip:
            out = out.clamp(-attention.clip, attention.clip)
        heads, turned = attention.heads, out[:, : attention.heads + attention.kv_heads]
        if attention.q_norm is not None:
            normed = [attention.q_norm(turned[:, :heads])]
            if attention.k_norm is not None:
                normed.append(attention.k_norm(turned[:, heads:]))
            turned = torch.cat(normed, 1)
        if attention.rope != "none":
            turned = rotate(turned, *self._turns[attention.rope])
        v = out[:, heads + attention.kv_heads :]
        if attention.v_eps:
            v = F.rms_norm(v.float(), (attention.head_dim,), eps=attention.v_eps).to(v.dtype)
        self._fresh = (turned[:, heads:], v) if attention.own else None
        self._layer = attention.layer
        return turned[:, :heads]

    def narrow(self, x: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        """See `Ops`."""
        if self._wanted is None:
            return x, q
        if self._fresh is not None:
            self._step.write(self._layer, *self._fresh)
        tokens, self._step = self._wanted
        if self._fresh is not None:
            k, v = self._fresh
            self._fresh = k[tokens], v[tokens]
        return x[tokens], q[tokens]

    def attend(self, attention: Attention, q: Tensor) -> Tensor:
        """-> [T, heads * d]."""
        assert (self._fresh is not None) == attention.own, "attend() follows qkv()"
        pattern = Pattern(
            attention.window,
            attention.scale,
            attention.softcap,
            attention.slopes,
            attention.sinks,
        )
        k, v = self._fresh or (None, None)
        self._fresh = None
        return self._step.attend(attention.reads, q, k, v, pattern)

    def add_linear(self, x: Tensor, y: Tensor, linear: Linear, post: Norm | None) -> Tensor:
        """-> x + post(linear(y))."""
        added: Tensor = linear(y)
        return x + (added if post is None else post(added))

    def add_mlp(self, x: Tensor, norm: Norm, mlp: Mlp, post: Norm | None) -> Tensor:
        """-> x + post(mlp(norm(x)))."""
        added: Tensor = mlp(norm(x))
        return x + (added if post is None else post(added))

    def latent(self, attention: LatentAttention, x: Tensor, norm: Norm, linear: Linear) -> Tensor:
        """-> q [T, heads, plain + rope]; the lines reach the cache with `attend_latent`."""
        both: Tensor = linear(norm(x))
        first, rest = both[:, : attention.q_width], both[:, attention.q_width :]
        if attention.q_norm is not None and attention.q_up is not None:
            first = attention.q_up(attention.q_norm(first))
        cos, sin = (t[..., : attention.rope // 2] for t in self._turns["global"])
        q = first.view(x.shape[0], attention.heads, attention.query)
        plain, turning = q[..., : attention.plain], q[..., attention.plain :]
        latent, key = rest[:, None, : attention.rank], rest[:, None, attention.rank :]
        line = torch.cat((attention.kv_norm(latent), rotate(key, cos, sin)), dim=-1)
        self._fresh, self._layer = (line, line), attention.layer
        return torch.cat((plain, rotate(turning, cos, sin)), dim=-1)

    def attend_latent(self, attention: LatentAttention, q: Tensor) -> Tensor:
        """-> [T, heads * value]. Queries go to where the lines are: one key for all heads."""
        assert self._fresh is not None, "attend_latent() follows latent()"
        k, v = self._fresh
        self._fresh = None
        keys, values = attention.up_parts()
        plain, turned = q[..., : attention.plain], q[..., attention.plain :]
        wide = torch.cat((torch.einsum("thp,hpr->thr", plain, keys), turned), dim=-1)
        y = self._step.attend(attention.layer, wide, k, v, Pattern(scale=attention.scale))
        latents = y.view(*q.shape[:2], -1)[..., : attention.rank]
        return torch.einsum("thr,hvr->thv", latents, values).reshape(q.shape[0], -1)

    def tokens(self) -> tuple[Tensor, Tensor]:
        """-> ids and positions, [T]."""
        return self._ids, self._step.positions

    def attend_given(self, attention: GivenAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """-> [T, heads * d]."""
        layer, window, scale, softcap, sinks = attention
        pattern = Pattern(window, scale, softcap, (), sinks)
        return self._step.attend(layer, q, k, v, pattern)

    def add_experts(self, layer: int, x: Tensor, norm: Norm, mlp: RoutedMlp) -> Tensor:
        """-> x + mlp(norm(x))."""
        tally = None if self._tally is None else self._tally[layer]
        added: Tensor = mlp(norm(x), tally)
        return x + added

    def spread(self, weights: Sequence[Tensor], x: Tensor) -> Tensor:
        """-> streams [T, S, hidden]."""
        return altup.spread(weights, x)

    def gather(self, weights: Sequence[Tensor], every: Tensor) -> Tensor:
        """-> x [T, hidden]."""
        return altup.gather(weights, every)

    def predict(self, block: AltUpBlock, every: Tensor) -> tuple[Tensor, Tensor]:
        """-> streams [T, S, hidden], the active one [T, hidden]."""
        return block.predicted(every)

    def residual(self, block: AltUpBlock, x: Tensor) -> Tensor:
        """-> [T, hidden]."""
        return block.residual(x)

    def correct(self, block: AltUpBlock, every: Tensor, x: Tensor, inputs: Tensor) -> Tensor:
        """-> streams [T, S, hidden]."""
        return block.corrected(every, x, inputs)

    def head(self, x: Tensor, norm: Norm, weight: Tensor, softcap: float) -> Tensor:
        """-> logits [n, vocab] float32."""
        logits = F.linear(norm(x), weight)
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        return logits.float()


def _rows(table: Embedding, ids: Tensor) -> Tensor:
    x = F.embedding(ids, table.weight).to(table.dtype)
    return x if table.scale == 1.0 else x * torch.tensor(table.scale, dtype=x.dtype)
