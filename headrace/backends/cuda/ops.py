"""A step's arithmetic on a GPU; see `models.ops.Ops`.

Few tokens (at most `product.MAX_TOKENS`): Triton kernels that stream each weight once, with the
norm, bias, rotary, KV write, SiLU and residual inside. More: the library's matrix products (cuBLAS)
with one element-wise kernel between two of them. Which one, per shape, is data: `kernels.tuned`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headrace.backends.cuda.attention import StepAttention
from headrace.backends.cuda.buffers import Buffers
from headrace.backends.cuda.kv_store import CudaKvStore
from headrace.backends.cuda.latent import LatentStep
from headrace.kernels.begin import begin
from headrace.kernels.columns import StepColumns
from headrace.kernels.gate_up import gate_up
from headrace.kernels.latent import LatentShape, latent_write
from headrace.kernels.linear import linear
from headrace.kernels.product import Config, Workspace
from headrace.kernels.qkv import qkv
from headrace.kernels.rms_norm import inverse_rms, rms_norm
from headrace.kernels.rotary import rotary_write
from headrace.kernels.silu_mul import silu_mul
from headrace.models.latent import LatentAttention
from headrace.models.layers import Attention, Embedding, GatedMlp, Linear, Mlp, Norm, RMSNorm
from headrace.models.routed import RoutedMlp

# Of `models.features`, beyond the plain decoder.
COMPUTES = frozenset({
    "q and k norms", "sliding window", "attention sinks", "scaled scores", "soft-capped scores",
    "output bias", "experts", "MLP of clamped", "latent attention",
})  # fmt: skip
_REFUSED = "refused at load: see COMPUTES"

# kind, m tokens, N and K of a weight -> configuration of the kernel for few tokens; None: the
# library is faster. See `kernels.tuned.choose`.
Choose = Callable[[str, int, int, int], Config | None]


@dataclasses.dataclass(frozen=True)
class Place:
    """What every step of one model shares. cos and sin are [positions, d/2] float32."""

    store: CudaKvStore
    buffers: Buffers
    workspace: Workspace
    cos: Tensor
    sin: Tensor
    last: Tensor  # [rows] int32, the token last drawn into each device row
    choose: Choose
    pdl: bool  # kernels start while the one before drains
    latent: LatentShape | None = None


@dataclasses.dataclass(frozen=True)
class Wanted:
    """The tokens of a step whose logits are wanted: their places in it [n] int32, and their
    attention, each a query of its own whose K and V the cache has."""

    places: Tensor
    attention: StepAttention | LatentStep
    rows: Tensor  # their device rows, [n] int32


class CudaOps:
    """One step of `tokens` tokens. `columns` and `ids` hold that many entries on the device.

    wanted: None = the whole step goes through the last layer. Else what that layer returns stands
    in the buffer `chosen`.
    """

    def __init__(
        self,
        place: Place,
        columns: StepColumns,
        ids: Tensor,
        attention: StepAttention | LatentStep,
        wanted: Wanted | None = None,
    ) -> None:
        self._place, self._columns, self._ids = place, columns, ids
        self._attention, self._wanted = attention, wanted
        self._tokens, self._rows = ids.shape[0], columns.rows

    def _config(self, kind: str, tokens: int, weight: Tensor) -> Config | None:
        n, k = weight.shape
        return self._place.choose(kind, tokens, n, k)

    def _options(self, config: Config) -> dict[str, Any]:
        place = self._place
        return {"config": config, "workspace": place.workspace, "with_pdl": place.pdl}

    def _normed(self, x: Tensor, norm: Norm) -> Tensor:
        assert isinstance(norm, RMSNorm), _REFUSED
        out = self._place.buffers.normed[: x.shape[0]]
        return rms_norm(x, norm.weight, norm.eps, out=out, with_pdl=self._place.pdl)

    def _scale(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """What is left of a folded norm: a factor for each row of the product behind it."""
        out = self._place.buffers.scale[: x.shape[0]]
        return inverse_rms(x, norm.eps, out=out, with_pdl=self._place.pdl)

    def embed(self, embedding: Embedding, positions: Embedding | None) -> Tensor:
        """-> x [T, hidden]. Moves the step's positions on by one first; see `kernels.begin`."""
        assert positions is None, _REFUSED
        x = self._place.buffers.x[: self._tokens]
        begin(
            self._ids,
            self._place.last,
            embedding.weight,
            self._columns,
            self._place.store.ids,
            x,
            with_pdl=self._place.pdl,
        )
        return x

    def qkv(self, attention: Attention, x: Tensor, norm: Norm, weights: Linear) -> Tensor:
        """-> q [T, heads, d]; k and v are in the cache."""
        assert isinstance(norm, RMSNorm), _REFUSED
        place, n = self._place, self._tokens
        k, v = place.store.k[attention.layer], place.store.v[attention.layer]
        out = place.buffers.q[:n]
        config = self._config("qkv", n, weights.weight)
        norms = None
        if attention.q_norm is not None and attention.k_norm is not None:
            q_norm, k_norm = attention.q_norm, attention.k_norm
            norms = q_norm.weight, k_norm.weight, q_norm.eps
        if config is not None and norms is None:
            return qkv(
                x,
                weights.weight,
                weights.bias,
                self._columns,
                place.cos,
                place.sin,
                k,
                v,
                heads=out.shape[1],
                norm=(norm.weight, norm.eps),
                q=out,
                **self._options(config),
            )
        both, scale, bias = place.buffers.qkv[:n], None, weights.bias
        if config is not None:
            gain = (norm.weight, norm.eps)
            linear(x, weights.weight, norm=gain, out=both, **self._options(config))
        elif norm.folded:
            scale = self._scale(x, norm)
            torch.mm(x, weights.weight.t(), out=both)
        elif bias is None:
            torch.mm(self._normed(x, norm), weights.weight.t(), out=both)
        else:
            torch.addmm(bias, self._normed(x, norm), weights.weight.t(), out=both)
            bias = None
        return rotary_write(
            both,
            self._columns,
            place.cos,
            place.sin,
            k,
            v,
            out.shape[1],
            scale=scale,
            bias=bias,
            norms=norms,
            out=out,
            with_pdl=place.pdl,
        )

    def latent(self, attention: LatentAttention, x: Tensor, norm: Norm, weights: Linear) -> Tensor:
        """-> q [T, heads, plain + rope]; the tokens' lines are in the cache."""
        place, n = self._place, self._tokens
        assert place.latent is not None, "made for a model of latent attention"
        buffers = place.buffers
        both = self._normed_product(x, norm, weights, buffers.normed, buffers.qkv[:n])
        q, kv = both[:, : attention.q_width], both[:, attention.q_width :]
        if attention.q_norm is not None and attention.q_up is not None:
            low = buffers.q_low[:n]
            low.copy_(q)
            q = self._normed_product(low, attention.q_norm, attention.q_up, low, buffers.q_high[:n])
        return latent_write(
            q,
            kv,
            (attention.kv_norm.weight, attention.kv_norm.eps),
            self._columns,
            place.cos,
            place.sin,
            place.store.k[attention.layer],
            place.latent,
            out=buffers.q[:n],
            with_pdl=place.pdl,
        )

    def _normed_product(
        self, x: Tensor, norm: Norm, weights: Linear, out_of_norm: Tensor, out: Tensor
    ) -> Tensor:
        assert isinstance(norm, RMSNorm), _REFUSED
        assert weights.bias is None, _REFUSED
        config = self._config("qkv", x.shape[0], weights.weight)
        if config is not None:
            gain = (norm.weight, norm.eps)
            return linear(x, weights.weight, norm=gain, out=out, **self._options(config))
        normed = out_of_norm[: x.shape[0]]
        rms_norm(x, norm.weight, norm.eps, out=normed, with_pdl=self._place.pdl)
        return torch.mm(normed, weights.weight.t(), out=out)

    def narrow(self, x: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        """See `Ops`."""
        wanted = self._wanted
        if wanted is None:
            return x, q
        self._tokens, self._attention = wanted.places.shape[0], wanted.attention
        self._rows = wanted.rows
        chosen = self._place.buffers.chosen[: self._tokens]
        chosen_q = self._place.buffers.chosen_q[: self._tokens]
        if self._tokens:
            torch.index_select(x, 0, wanted.places, out=chosen)
            torch.index_select(q, 0, wanted.places, out=chosen_q)
        return chosen, chosen_q

    def attend(self, attention: Attention, q: Tensor) -> Tensor:
        """-> [T, heads * d]."""
        assert isinstance(self._attention, StepAttention), "made for attention by heads"
        store, layer = self._place.store, attention.reads
        out = self._place.buffers.attended[: self._tokens]
        out = self._attention.attend(attention, q, store.k[layer], store.v[layer], out)
        return out.view(self._tokens, -1)

    def attend_latent(self, attention: LatentAttention, q: Tensor) -> Tensor:
        """-> [T, heads * value]."""
        assert isinstance(self._attention, LatentStep), "made for latent attention"
        out = self._place.buffers.attended[: self._tokens].view(self._tokens, -1)
        return self._attention.attend(attention, q, self._place.store.k[attention.layer], out)

    def add_linear(self, x: Tensor, y: Tensor, weights: Linear, post: Norm | None) -> Tensor:
        """-> x + linear(y), in place."""
        assert post is None, _REFUSED
        return self._add("out", x, y, weights)

    def _add(self, kind: str, x: Tensor, y: Tensor, weights: Linear) -> Tensor:
        config = self._config(kind, self._tokens, weights.weight)
        if config is not None:
            return linear(
                y,
                weights.weight,
                bias=weights.bias,
                residual=x,
                out=x,
                **self._options(config),
            )
        if weights.bias is not None:
            x += weights.bias
        return x.addmm_(y, weights.weight.t())

    def add_mlp(self, x: Tensor, norm: Norm, mlp: Mlp, post: Norm | None) -> Tensor:
        """-> x + mlp(norm(x)), in place."""
        assert isinstance(norm, RMSNorm), _REFUSED
        assert isinstance(mlp, GatedMlp), _REFUSED
        assert mlp.act == "silu", _REFUSED  # clamped is in experts alone
        assert post is None, _REFUSED
        buffers, n = self._place.buffers, self._tokens
        weight = mlp.gate_up.weight
        config = self._config("gate_up", n, weight)
        if config is not None:
            inner = buffers.inner[:n]
            gate_up(x, weight, norm=(norm.weight, norm.eps), out=inner, **self._options(config))
            return self._add("down", x, inner, mlp.down)
        pieces = -(-n // buffers.gate_up.shape[0])
        for piece in range(pieces):
            self._add_mlp_rows(x[n * piece // pieces : n * (piece + 1) // pieces], norm, mlp)
        return x

    def _add_mlp_rows(self, x: Tensor, norm: RMSNorm, mlp: GatedMlp) -> None:
        """x += mlp(norm(x)) for as many rows as the buffers hold, by the library's products."""
        rows, buffers, weight = x.shape[0], self._place.buffers, mlp.gate_up.weight
        both, inner = buffers.gate_up[:rows], buffers.inner[:rows]
        scale = self._scale(x, norm) if norm.folded else None
        torch.mm(x if norm.folded else self._normed(x, norm), weight.t(), out=both)
        silu_mul(both, scale=scale, out=inner, with_pdl=self._place.pdl)
        self._add("down", x, inner, mlp.down)

    def add_experts(self, layer: int, x: Tensor, norm: Norm, mlp: RoutedMlp) -> Tensor:
        """-> x + mlp(norm(x)), in place."""
        place, mixture, n = self._place, self._place.buffers.mixture, self._tokens
        assert mixture is not None, "made for a mixture"
        spare = self._columns.tables.shape[0] - 1
        pieces = -(-n // mixture.tokens)
        for piece in range(pieces):
            own = slice(n * piece // pieces, n * (piece + 1) // pieces)
            mixture.add(
                layer,
                x[own],
                self._normed(x[own], norm),
                mlp,
                self._rows[own],
                spare,
                place.workspace,
                with_pdl=place.pdl,
            )
        return x

    def head(self, x: Tensor, norm: Norm, weight: Tensor, softcap: float) -> Tensor:
        """x [n, hidden] -> logits [n, vocab], in the model's dtype."""
        assert isinstance(norm, RMSNorm), _REFUSED
        assert not softcap, _REFUSED
        n = x.shape[0]
        out = self._place.buffers.logits[:n]
        config = self._config("head", n, weight)
        if config is None:
            return torch.mm(self._normed(x, norm), weight.t(), out=out)
        gain = (norm.weight, norm.eps)
        return linear(x, weight, norm=gain, out=out, **self._options(config))
