"""A step's arithmetic on a GPU; see `models.ops.Ops`.

Few tokens (at most `product.MAX_TOKENS`): Triton kernels that stream each weight once, with the
norm, bias, rotary, KV write, activation and residual inside. More: the library's matrix products
(cuBLAS) with one element-wise kernel between two of them. Which one, per shape, is data:
`kernels.tuned`. Norms whose weights have another type than the stream, and layer norms, are kernels
of their own, and so is what else no product ends in.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from headrace.backends.cuda.attention import StepAttention
from headrace.backends.cuda.buffers import Buffers
from headrace.backends.cuda.kv_store import CudaKvStore, IdSlots
from headrace.backends.cuda.latent import LatentStep
from headrace.backends.cuda.turns import Turns
from headrace.kernels import altup, product, streams
from headrace.kernels.activation import activation
from headrace.kernels.begin import begin
from headrace.kernels.columns import GroupColumns
from headrace.kernels.gate_up import gate_up
from headrace.kernels.gate_up_tiles import TileConfig, fits, gate_up_tiles
from headrace.kernels.gather import gather_rows
from headrace.kernels.latent import LatentShape, latent_write
from headrace.kernels.layer_norm import layer_norm
from headrace.kernels.linear import linear
from headrace.kernels.norm_add import norm_add
from headrace.kernels.product import MAX_TOKENS, Config, Workspace
from headrace.kernels.qkv import qkv
from headrace.kernels.rms_norm import inverse_rms, rms_norm
from headrace.kernels.rotary import rotary_write
from headrace.kernels.soft_cap import cap_rows
from headrace.kernels.sparse import sparse_gate
from headrace.models.altup import AltUpBlock, SparseMlp
from headrace.models.latent import LatentAttention
from headrace.models.layers import (
    Attention,
    Embedding,
    GatedMlp,
    GivenAttention,
    Linear,
    Mlp,
    Norm,
    RMSNorm,
)
from headrace.models.routed import RoutedMlp

# Of `models.features`, beyond the plain decoder.
COMPUTES = frozenset({
    "scaled embedding", "learned positions", "layer norm", "wide norms", "post norms",
    "clipped q, k and v", "q and k norms", "layers without rotary embedding",
    "two rotary embeddings", "rotary frequencies by length", "shared K and V", "sliding window",
    "scaled scores", "soft-capped scores", "attention sinks", "ALiBi", "output bias",
    "MLP without a gate", "MLP of gelu", "MLP of gelu_tanh", "MLP of relu", "MLP of clamped",
    "MLP bias", "layers of several widths", "soft-capped logits", "experts", "latent attention",
    "v norms", "AltUp", "sparse activations",
})  # fmt: skip

# kind, m tokens, N and K of a weight -> configuration of the kernel for few tokens; None: the
# library is faster. See `kernels.tuned.choose`.
Choose = Callable[[str, int, int, int], Config | None]
# m tokens, N and K of gate and up -> the kernel that has their activation too; None: the library.
ChooseTiles = Callable[[int, int, int], TileConfig | None]


@dataclasses.dataclass(frozen=True)
class Place:
    """What every step of one model shares."""

    store: CudaKvStore
    slots: IdSlots
    buffers: Buffers
    workspace: Workspace
    turns: Turns
    last: Tensor  # [rows] int32, the token last drawn into each device row
    choose: Choose
    choose_tiles: ChooseTiles
    multiprocessors: int
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
    A layer's KV group says which of the columns are its own.

    wanted: None = the whole step goes through the last layer. Else what that layer returns stands
    in the buffer `chosen`.
    """

    def __init__(
        self,
        place: Place,
        columns: GroupColumns,
        ids: Tensor,
        attention: StepAttention | LatentStep,
        wanted: Wanted | None = None,
    ) -> None:
        self._place, self._columns, self._ids = place, columns, ids
        self._attention, self._wanted = attention, wanted
        self._tokens, self._rows = ids.shape[0], columns[0].rows
        self._at_hand: tuple[Tensor, Norm] | None = None  # what `residual` left normed, for `qkv`

    def _config(self, kind: str, tokens: int, weight: Tensor) -> Config | None:
        n, k = weight.shape
        return self._place.choose(kind, tokens, n, k)

    def _options(self, config: Config) -> dict[str, Any]:
        place = self._place
        return {"config": config, "workspace": place.workspace, "with_pdl": place.pdl}

    def _normed(self, x: Tensor, norm: Norm) -> Tensor:
        if self._at_hand is not None and self._at_hand[0] is x and self._at_hand[1] is norm:
            return self._place.buffers.normed[: x.shape[0]]
        self._at_hand = None
        out, with_pdl = self._place.buffers.normed[: x.shape[0]], self._place.pdl
        if isinstance(norm, RMSNorm):
            return rms_norm(x, norm.weight, norm.eps, out=out, with_pdl=with_pdl)
        return layer_norm(x, norm.weight, norm.bias, norm.eps, out=out, with_pdl=with_pdl)

    def _taken(self, x: Tensor, norm: Norm) -> tuple[Tensor, product.Norm | None]:
        """x, and the norm that a kernel for few tokens may fold in; else x is normed before."""
        if isinstance(norm, RMSNorm) and norm.weight.dtype == x.dtype:
            return x, product.Norm(norm.weight, norm.eps, norm.folded)
        return self._normed(x, norm), None

    def _scale(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """What is left of a folded norm: a factor for each row of the product behind it."""
        out = self._place.buffers.scale[: x.shape[0]]
        return inverse_rms(x, norm.eps, out=out, with_pdl=self._place.pdl)

    def embed(self, embedding: Embedding, positions: Embedding | None) -> Tensor:
        """-> x [T, hidden]. Moves the step's positions on by one first; see `kernels.begin`."""
        place = self._place
        x, kept, slots = place.buffers.x[: self._tokens], place.buffers.ids, place.slots
        begin(
            self._ids,
            self._place.last,
            embedding.weight,
            self._columns[0].over(slots.tables),
            slots.ids,
            x,
            scale=embedding.scale,
            learned=None if positions is None else positions.weight,
            kept=None if kept is None else kept[: self._tokens],
            with_pdl=self._place.pdl,
        )
        self._place.turns.begin(self._columns[0])
        return x

    def rows(self, table: Embedding) -> Tensor:
        """-> [T, width]."""
        buffers, n = self._place.buffers, self._tokens
        assert buffers.ids is not None, "made for a model with such a table"
        out, with_pdl = buffers.rows[:n], self._place.pdl
        return gather_rows(buffers.ids[:n], table.weight, table.scale, out=out, with_pdl=with_pdl)

    def qkv(self, attention: Attention, x: Tensor, norm: Norm, weights: Linear) -> Tensor:
        """-> q [T, heads, d]; k and v are in the cache."""
        place, n = self._place, self._tokens
        k, v = place.store.k[attention.reads], place.store.v[attention.reads]
        columns = self._columns[place.store.groups[attention.reads]]
        out, turn = place.buffers.q[:n], place.turns.of(attention.rope)
        norms = None
        if attention.q_norm is not None:
            q_norm = attention.q_norm
            k_norm = attention.k_norm or q_norm  # of no use to a layer without keys
            norms = q_norm.weight, k_norm.weight, q_norm.eps
        plain = not (attention.clip or turn.by_token) and attention.rope != "none"
        config = self._config("qkv", n, weights.weight)
        if norms is None:
            fits = not attention.v_eps
        else:
            fits = config is not None and config.block_n == out.shape[2]
        if config is not None and fits and plain and attention.own:
            y, gain = self._taken(x, norm)
            return qkv(
                y,
                weights.weight,
                weights.bias,
                columns,
                turn.cos,
                turn.sin,
                k,
                v,
                heads=out.shape[1],
                norm=gain,
                norms=norms,
                v_eps=attention.v_eps,
                q=out,
                **self._options(config),
            )
        both, factor, bias = self._projected(x, norm, weights, config)
        return rotary_write(
            both,
            columns,
            turn.cos,
            turn.sin,
            k,
            v,
            out.shape[1],
            **factor,
            bias=bias,
            clip=attention.clip,
            norms=norms,
            v_eps=attention.v_eps,
            turned=attention.rope != "none",
            by_token=turn.by_token,
            own=attention.own,
            out=out,
            with_pdl=place.pdl,
        )

    def _projected(
        self, x: Tensor, norm: Norm, weights: Linear, config: Config | None
    ) -> tuple[Tensor, dict[str, Any], Tensor | None]:
        """q, k and v of a product, what its rows are to be multiplied by (as `rotary_write` has
        it), and a bias that is still to be added."""
        weight, bias = weights.weight, weights.bias
        both = _first_rows(self._place.buffers.qkv, self._tokens, weight.shape[0])
        if config is not None:
            y, gain = self._taken(x, norm)
            return linear(y, weight, norm=gain, out=both, **self._options(config)), {}, bias
        if isinstance(norm, RMSNorm) and norm.folded:
            torch.mm(x, weight.t(), out=both)
            few = x.shape[0] <= MAX_TOKENS  # of many, every program reading a row costs more
            return both, {"rms_of": (x, norm.eps)} if few else {"scale": self._scale(x, norm)}, bias
        if bias is None:
            return torch.mm(self._normed(x, norm), weight.t(), out=both), {}, None
        return torch.addmm(bias, self._normed(x, norm), weight.t(), out=both), {}, None

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
            self._columns[0],
            place.turns.of("global").cos,
            place.turns.of("global").sin,
            place.store.k[attention.layer],
            place.latent,
            out=buffers.q[:n],
            with_pdl=place.pdl,
        )

    def _normed_product(
        self, x: Tensor, norm: Norm, weights: Linear, out_of_norm: Tensor, out: Tensor
    ) -> Tensor:
        assert isinstance(norm, RMSNorm), "latent attention has no other"
        assert weights.bias is None, "latent attention has none"
        config = self._config("qkv", x.shape[0], weights.weight)
        if config is not None:
            gain = product.Norm(norm.weight, norm.eps, norm.folded)
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
        chosen = x.new_empty(self._tokens, x.shape[1])
        if x.shape[1] == self._place.buffers.chosen.shape[1]:
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
        k, v, group = store.k[layer], store.v[layer], store.groups[layer]
        out = self._attention.attend(attention, q, k, v, out, group)
        return out.view(self._tokens, -1)

    def attend_latent(self, attention: LatentAttention, q: Tensor) -> Tensor:
        """-> [T, heads * value]."""
        assert isinstance(self._attention, LatentStep), "made for latent attention"
        out = self._place.buffers.attended[: self._tokens].view(self._tokens, -1)
        return self._attention.attend(attention, q, self._place.store.k[attention.layer], out)

    def add_linear(self, x: Tensor, y: Tensor, weights: Linear, post: Norm | None) -> Tensor:
        """-> x + post(linear(y)), in place."""
        return self._add("out", x, y, weights, post)

    def _add(self, kind: str, x: Tensor, y: Tensor, weights: Linear, post: Norm | None) -> Tensor:
        weight, bias = weights.weight, weights.bias
        config = self._config(kind, self._tokens, weight)
        if post is not None:
            return self._add_normed(x, y, weights, config, post)
        if config is not None:
            options = self._options(config)
            return linear(y, weight, bias=bias, residual=x, out=x, **options)
        if bias is not None:
            x += bias
        return x.addmm_(y, weight.t())

    def _add_normed(
        self, x: Tensor, y: Tensor, weights: Linear, config: Config | None, post: Norm
    ) -> Tensor:
        """x + post(linear(y)), in place."""
        weight, bias, with_pdl = weights.weight, weights.bias, self._place.pdl
        added, self._at_hand = self._place.buffers.normed[: x.shape[0]], None
        if config is not None:
            linear(y, weight, bias=bias, out=added, **self._options(config))
        elif bias is None:
            torch.mm(y, weight.t(), out=added)
        else:
            torch.addmm(bias, y, weight.t(), out=added)
        if isinstance(post, RMSNorm):
            return norm_add(x, added, post.weight, post.eps, with_pdl=with_pdl)
        x += layer_norm(added, post.weight, post.bias, post.eps, out=added, with_pdl=with_pdl)
        return x

    def add_mlp(self, x: Tensor, norm: Norm, mlp: Mlp, post: Norm | None) -> Tensor:
        """-> x + post(mlp(norm(x))), in place."""
        buffers, n = self._place.buffers, self._tokens
        first = mlp.gate_up if isinstance(mlp, GatedMlp) else mlp.up
        config = self._config("gate_up", n, first.weight)
        if config is not None and isinstance(mlp, SparseMlp):  # its bound is of a whole gate
            y, gain = self._taken(x, norm)
            both = _first_rows(buffers.gate_up, n, first.weight.shape[0])
            linear(y, first.weight, norm=gain, out=both, **self._options(config))
            return self._add("down", x, self._sparse(both, mlp, None), mlp.down, post)
        if config is not None:
            y, gain = self._taken(x, norm)
            inner = _first_rows(buffers.inner, n, mlp.down.weight.shape[1])
            run = gate_up if isinstance(mlp, GatedMlp) else linear
            more = {"norm": gain, "act": mlp.act, "out": inner, **self._options(config)}
            run(y, first.weight, bias=first.bias, **more)
            return self._add("down", x, inner, mlp.down, post)
        pieces = -(-n // buffers.gate_up.shape[0])
        for piece in range(pieces):
            rows = x[n * piece // pieces : n * (piece + 1) // pieces]
            self._add_mlp_rows(rows, norm, mlp, first, post)
        return x

    def _add_mlp_rows(
        self, x: Tensor, norm: Norm, mlp: Mlp, first: Linear, post: Norm | None
    ) -> Tensor:
        """`add_mlp` for as many rows as the buffers hold, by the library's products."""
        rows, buffers, weight = x.shape[0], self._place.buffers, first.weight
        inner = _first_rows(buffers.inner, rows, mlp.down.weight.shape[1])
        scale = self._scale(x, norm) if isinstance(norm, RMSNorm) and norm.folded else None
        y = self._normed(x, norm) if scale is None else x
        tiles = self._place.choose_tiles(rows, *weight.shape)
        plain = isinstance(mlp, GatedMlp) and not isinstance(mlp, SparseMlp) and first.bias is None
        if tiles is not None and plain and fits(y, weight):
            gate_up_tiles(
                y,
                weight,
                mlp.act,
                scale=scale,
                out=inner,
                config=tiles,
                multiprocessors=self._place.multiprocessors,
            )
            return self._add("down", x, inner, mlp.down, post)
        both = _first_rows(buffers.gate_up, rows, weight.shape[0])
        torch.mm(y, weight.t(), out=both)
        if isinstance(mlp, SparseMlp):
            return self._add("down", x, self._sparse(both, mlp, scale), mlp.down, post)
        activation(
            both,
            mlp.act,
            gated=isinstance(mlp, GatedMlp),
            scale=scale,
            bias=first.bias,
            out=inner,
            with_pdl=self._place.pdl,
        )
        return self._add("down", x, inner, mlp.down, post)

    def _sparse(self, both: Tensor, mlp: SparseMlp, scale: Tensor | None) -> Tensor:
        inner = _first_rows(self._place.buffers.inner, both.shape[0], mlp.down.weight.shape[1])
        with_pdl = self._place.pdl
        return sparse_gate(both, mlp.deviations, mlp.act, scale=scale, out=inner, with_pdl=with_pdl)

    def tokens(self) -> tuple[Tensor, Tensor]:
        """No model that was not refused asks for it."""
        raise AssertionError("a model that was refused when it was loaded")

    def attend_given(self, attention: GivenAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """No model that was not refused asks for it."""
        raise AssertionError("a model that was refused when it was loaded")

    def add_experts(self, layer: int, x: Tensor, norm: Norm, mlp: RoutedMlp) -> Tensor:
        """-> x + mlp(norm(x)), in place."""
        place, mixture, n = self._place, self._place.buffers.mixture, self._tokens
        assert mixture is not None, "made for a mixture"
        spare = self._columns[0].tables.shape[0] - 1
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

    def spread(self, weights: Sequence[Tensor], x: Tensor) -> Tensor:
        """-> streams [T, S, hidden]."""
        others = x.new_empty(len(weights), *x.shape)
        for weight, other in zip(weights, others, strict=True):
            torch.mm(x, weight.t(), out=other)
        return streams.spread(x, others, with_pdl=self._place.pdl)

    def gather(self, weights: Sequence[Tensor], every: Tensor) -> Tensor:
        """-> x [T, hidden], in the buffer of the residual stream, or of what is left of it."""
        buffers, n, first = self._place.buffers, every.shape[0], every[:, 0]
        out = (buffers.x if self._wanted is None else buffers.chosen)[:n]
        others = first.new_empty(len(weights), *first.shape)
        for i, weight in enumerate(weights):
            torch.mm(every[:, i + 1], weight.t(), out=others[i])
        return streams.gather(first, others, out=out, with_pdl=self._place.pdl)

    def predict(self, block: AltUpBlock, every: Tensor) -> tuple[Tensor, Tensor]:
        """-> streams [T, S, hidden], the active one [T, hidden]."""
        norm, router = block.router_norm, block.router.weight
        weights, active = block.predictions.weight, block.altup.active
        gain, with_pdl = (norm.weight, norm.eps), self._place.pdl
        return altup.predict(every, gain, router, weights, active, with_pdl=with_pdl)

    def residual(self, block: AltUpBlock, x: Tensor) -> Tensor:
        """-> [T, hidden]."""
        normed, norm = self._normed(x, block.attn_norm), block.laurel_norm
        self._at_hand = x, block.attn_norm
        low = self._product(self._product(normed, block.laurel_left), block.laurel_right)
        gain, with_pdl = (norm.weight, norm.eps), self._place.pdl
        return altup.residual(normed, low, gain, 0.5**0.5, with_pdl=with_pdl)

    def correct(self, block: AltUpBlock, every: Tensor, x: Tensor, inputs: Tensor) -> Tensor:
        """-> streams [T, S, hidden]."""
        norm, last, with_pdl = block.router_norm, block.layer_norm, self._place.pdl
        every, first = altup.correct(
            every,
            x,
            (norm.weight, norm.eps),
            block.router.weight,
            block.corrections.weight,
            block.scale if block.altup.scaled else None,
            block.altup.active,
            with_pdl=with_pdl,
        )
        gate = self._product(first, block.layer_gate)
        altup.gate_inputs(gate, inputs, block.ffn.act, with_pdl=with_pdl)
        own = self._product(gate, block.layer_out)
        return altup.add_to_others(every, own, (last.weight, last.eps), with_pdl=with_pdl)

    def _product(self, x: Tensor, weights: Linear) -> Tensor:
        """x W^T, in memory of its own."""
        config = self._config("out", x.shape[0], weights.weight)
        if config is None:
            return torch.mm(x, weights.weight.t())
        return linear(x, weights.weight, **self._options(config))

    def head(self, x: Tensor, norm: Norm, weight: Tensor, softcap: float) -> Tensor:
        """x [n, hidden] -> logits [n, vocab], in the model's dtype."""
        n = x.shape[0]
        out = self._place.buffers.logits[:n]
        config = self._config("head", n, weight)
        if config is not None:
            y, gain = self._taken(x, norm)
            return linear(y, weight, norm=gain, cap=softcap, out=out, **self._options(config))
        torch.mm(self._normed(x, norm), weight.t(), out=out)
        return cap_rows(out, softcap, with_pdl=self._place.pdl) if softcap else out


def _first_rows(buffer: Tensor, rows: int, width: int) -> Tensor:
    """[rows, width] of a buffer's memory, whose rows may be wider."""
    return buffer.view(-1)[: rows * width].view(rows, width)
