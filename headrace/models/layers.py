"""The parts of a decoder. Shapes: T = tokens of one step, all rows one after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace.models.ops import Ops
from headrace.models.order import AttentionFacts, BlockOrder, DecoderOrder
from headrace.models.positions import rotaries
from headrace.models.spec import CLAMP, CLAMP_SLOPE, Act, ModelSpec


def unset(*shape: int, dtype: torch.dtype, device: str | None = None) -> nn.Parameter:
    """Memory that the weight loader fills; untouched pages cost nothing until then."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


class Linear(nn.Module):
    """x [..., in] -> x W^T + b [..., out], W [out, in]."""

    def __init__(self, n_in: int, n_out: int, dtype: torch.dtype, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = unset(n_out, n_in, dtype=dtype)
        self.bias = unset(n_out, dtype=dtype) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Embedding(nn.Module):
    """One row a token id (or a position), times `scale`, both rounded to `dtype`.

    partial: ids past the last row take the first. Such a table is in the processor's memory,
    wherever the model is; the loader may leave it in the checkpoint, in the type that it has there
    (`Slot.mapped`).
    """

    def __init__(
        self,
        rows: int,
        hidden: int,
        dtype: torch.dtype,
        scale: float = 1.0,
        *,
        partial: bool = False,
    ) -> None:
        super().__init__()
        self.weight = unset(rows, hidden, dtype=dtype, device="cpu" if partial else None)
        self.dtype, self.scale, self.partial = dtype, scale, partial


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, over the last axis, in the type of x.

    A float32 weight is multiplied before the result is rounded.
    folded: `weight` is 1, for the matrix behind the norm holds it; see `Decoder.fold_norms`.
    """

    folded = False

    def __init__(self, hidden: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = unset(hidden, dtype=dtype)
        self.hidden, self.eps = hidden, eps

    def fold_into(self, linear: Linear) -> None:
        """Multiply the columns of `linear`, each product rounded once, and leave 1 here, in the
        type of the matrix."""
        linear.weight.mul_(self.weight)
        self.weight = nn.Parameter(torch.ones_like(linear.weight[0]), requires_grad=False)
        self.folded = True

    def forward(self, x: Tensor) -> Tensor:
        wide = F.rms_norm(x.to(self.weight.dtype), (self.hidden,), self.weight, self.eps)
        return wide.to(x.dtype)


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + eps) * weight + bias, over the last axis."""

    def __init__(self, hidden: int, eps: float, dtype: torch.dtype, *, bias: bool) -> None:
        super().__init__()
        self.weight = unset(hidden, dtype=dtype)
        self.bias = unset(hidden, dtype=dtype) if bias else None
        self.hidden, self.eps = hidden, eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (self.hidden,), self.weight, self.bias, self.eps)


Norm = RMSNorm | LayerNorm


def norm_of(spec: ModelSpec, width: int, dtype: torch.dtype) -> Norm:
    """A norm of the model's kind."""
    if spec.norm == "layer":
        return LayerNorm(width, spec.norm_eps, dtype, bias=spec.norm_bias)
    return RMSNorm(width, spec.norm_eps, torch.float32 if spec.norm == "rms_wide" else dtype)


def plain(act: Act, x: Tensor) -> Tensor:
    """The activation by itself."""
    if act == "silu":
        return F.silu(x)
    if act == "relu":
        return F.relu(x)
    assert act != "clamped", "clamped needs a gate"
    return F.gelu(x, approximate="tanh" if act == "gelu_tanh" else "none")


def gated(act: Act, gate: Tensor, up: Tensor) -> Tensor:
    """act(gate) * up; clamped: gpt-oss's, where both are cut off and up has 1 added."""
    if act != "clamped":
        return plain(act, gate) * up
    gate, up = gate.clamp(max=CLAMP), up.clamp(-CLAMP, CLAMP)
    return gate * torch.sigmoid(CLAMP_SLOPE * gate) * (up + 1)


class GatedMlp(nn.Module):
    """down(act(gate(x)) * up(x)); gate and up are one matrix, gate's rows first."""

    def __init__(
        self, hidden: int, ffn: int, dtype: torch.dtype, act: Act = "silu", *, bias: bool = False
    ) -> None:
        super().__init__()
        self.act: Act = act
        self.gate_up = Linear(hidden, 2 * ffn, dtype, bias=bias)
        self.down = Linear(ffn, hidden, dtype, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        y: Tensor = self.down(gated(self.act, gate, up))
        return y


class PlainMlp(nn.Module):
    """x [..., hidden] -> down(act(up(x))), the same shape."""

    def __init__(
        self, hidden: int, ffn: int, dtype: torch.dtype, act: Act, *, bias: bool = False
    ) -> None:
        super().__init__()
        self.act: Act = act
        self.up = Linear(hidden, ffn, dtype, bias=bias)
        self.down = Linear(ffn, hidden, dtype, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(plain(self.act, self.up(x)))
        return y


Mlp = GatedMlp | PlainMlp


def mlp_of(spec: ModelSpec, index: int, dtype: torch.dtype) -> Mlp:
    """The dense feed-forward of layer `index`."""
    kind = GatedMlp if spec.gated else PlainMlp
    ffn = spec.layer(index).ffn or spec.ffn
    return kind(spec.hidden, ffn, dtype, spec.act, bias=spec.mlp_bias)


class GivenAttention(NamedTuple):
    """The attention of one layer whose q, k and v are made elsewhere; its fields mean what they do
    in the spec. sinks [heads]: None = there are none."""

    layer: int
    window: int
    scale: float
    softcap: float
    sinks: Tensor | None


class Attention(AttentionFacts, nn.Module):
    """What the attention of one layer is, beside its matrices; backends read it."""

    def __init__(self, spec: ModelSpec, index: int, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.learn(spec, index)
        self.q_norm = self.k_norm = None
        if spec.qk_norm:
            wide = torch.float32 if spec.norm == "rms_wide" else dtype
            self.q_norm, self.k_norm = (
                RMSNorm(spec.head_dim, spec.norm_eps, wide) for _ in range(2)
            )
            if not self.own:
                self.k_norm = None
        self.sinks = unset(spec.heads, dtype=dtype) if spec.sinks else None


class Block(BlockOrder[Tensor], nn.Module):
    """One decoder layer. Another kind of attention or feed-forward overrides that part.

    foldable: what the first matrix gives may get its norm's factor afterwards.
    """

    foldable = True

    def __init__(self, spec: ModelSpec, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.index = index
        self.attention = Attention(spec, index, dtype)
        heads = spec.heads + 2 * spec.kv_heads * self.attention.own
        self.attn_norm = norm_of(spec, spec.hidden, dtype)
        self.qkv = Linear(spec.hidden, heads * spec.head_dim, dtype, bias=spec.qkv_bias)
        self.out = Linear(spec.heads * spec.head_dim, spec.hidden, dtype, bias=spec.out_bias)
        self.ffn_norm = norm_of(spec, spec.hidden, dtype)
        self.ffn = mlp_of(spec, index, dtype)
        self.post_attn_norm = norm_of(spec, spec.hidden, dtype) if spec.post_norms else None
        self.post_ffn_norm = norm_of(spec, spec.hidden, dtype) if spec.post_norms else None


class Decoder(DecoderOrder, nn.Module):
    """Embedding, blocks, norm, output layer or classification head. `block` makes layer i."""

    blocks: nn.ModuleList

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        block: Callable[[ModelSpec, int, torch.dtype], Block] = Block,
    ) -> None:
        super().__init__()
        self.spec, self.dtype = spec, dtype
        self.embed = Embedding(spec.vocab_rows, spec.hidden, dtype, spec.embed_scale)
        learned = spec.learned_positions
        self.positions = Embedding(learned, spec.hidden, dtype) if learned else None
        self.blocks = nn.ModuleList(block(spec, i, dtype) for i in range(spec.layers))
        self.norm = norm_of(spec, spec.hidden, dtype)
        self.head = None if spec.tied else Linear(spec.hidden, spec.vocab_rows, dtype)
        self.classifier = Linear(spec.hidden, spec.labels, torch.float32) if spec.labels else None
        self.rotaries = rotaries(spec)

    @torch.inference_mode()
    def fold_norms(self) -> None:
        """Put the weights of the layers' norms into the matrices behind them: what is left of a
        norm is a factor for each token, which a product may get afterwards. The last norm stays:
        its matrix may be the embedding. Layer norms stay too: they are no factor."""
        if self.spec.norm == "layer":
            return
        for block in self.blocks:
            assert isinstance(block, Block), "a decoder is made of blocks"
            feed = getattr(block, "ffn", None)  # a routed one reads its norm in two places
            first = block.qkv if block.foldable else None
            for norm, matrix in ((block.attn_norm, first), (block.ffn_norm, feed)):
                if matrix is None:
                    continue
                assert isinstance(norm, RMSNorm), "only an RMS norm is a factor"
                linear = matrix.gate_up if isinstance(matrix, GatedMlp) else matrix
                linear = linear.up if isinstance(linear, PlainMlp) else linear
                assert isinstance(linear, Linear), "the matrix behind a norm"
                norm.fold_into(linear)

    def logits(self, x: Tensor, ops: Ops) -> Tensor:
        """x [n, hidden] -> [n, vocab_size]. Rows that only pad the vocabulary are left out: every
        id that can be drawn is one that the tokenizer accepts back."""
        weight = self.embed.weight if self.head is None else self.head.weight
        return ops.head(x, self.norm, weight[: self.spec.vocab_size], self.spec.logit_softcap)

    def scores(self, states: Tensor) -> Tensor:
        """states [..., hidden] float32, after the last norm -> [..., labels]."""
        assert self.classifier is not None, "a model without a classification head"
        scored: Tensor = self.classifier(states)
        return scored
