"""The parts of a decoder. Shapes: T = tokens of one step, all rows one after another."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace.models.ops import Ops
from headrace.models.spec import ModelSpec, Rope


def _unset(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """Memory that the weight loader fills; untouched pages cost nothing until then."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


class Linear(nn.Module):
    """y = x W^T + b, W [out, in]."""

    def __init__(self, n_in: int, n_out: int, dtype: torch.dtype, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = _unset(n_out, n_in, dtype=dtype)
        self.bias = _unset(n_out, dtype=dtype) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Embedding(nn.Module):
    """One row a token id."""

    def __init__(self, rows: int, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = _unset(rows, hidden, dtype=dtype)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, over the last axis.

    folded: `weight` is 1, for the matrix behind the norm holds it; see `Decoder.fold_norms`.
    """

    folded = False

    def __init__(self, hidden: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = _unset(hidden, dtype=dtype)
        self.hidden, self.eps = hidden, eps

    def fold_into(self, linear: Linear) -> None:
        """Multiply the columns of `linear`, each product rounded once, and leave 1 here."""
        linear.weight.mul_(self.weight)
        self.weight.fill_(1)
        self.folded = True

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (self.hidden,), self.weight, self.eps)


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """[head_dim / 2] float32, on the CPU. `Rotary`, which holds the tensor, applies `factors`."""
    # Not where the model is: on the meta device this would import torch's compiler (3 s, 80 MB).
    base = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    frequencies = 1.0 / (rope.theta**base)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind != "llama3":
        return frequencies
    # Llama 3.1: https://arxiv.org/abs/2407.21783, and Meta's reference `apply_scaling`.
    turns = rope.original_positions * frequencies / (2 * math.pi)  # over the original context
    blend = ((turns - rope.low_freq) / (rope.high_freq - rope.low_freq)).clamp(0, 1)
    return (1 - blend) * frequencies / rope.factor + blend * frequencies


class Rotary(nn.Module):
    """Rotary embedding of halves: pair i is (x[i], x[i + d/2])."""

    frequencies: Tensor

    def __init__(self, rope: Rope, head_dim: int) -> None:
        super().__init__()
        frequencies = inverse_frequencies(rope, head_dim).to(torch.get_default_device())
        self.register_buffer("frequencies", frequencies, persistent=False)
        stored = rope.kind == "factors"
        self.factors = _unset(head_dim // 2, dtype=torch.float32) if stored else None

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions [T] -> cos, sin, each [T, 1, d/2]."""
        frequencies = self.frequencies
        if self.factors is not None:
            frequencies = frequencies / self.factors
        angles = positions.to(torch.float32)[:, None, None] * frequencies
        return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, d] turned by the angles of `Rotary`."""
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)); gate and up are one matrix, gate's rows first."""

    def __init__(self, hidden: int, ffn: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_up = Linear(hidden, 2 * ffn, dtype)
        self.down = Linear(ffn, hidden, dtype)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        y: Tensor = self.down(F.silu(gate) * up)
        return y


class Block(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, spec: ModelSpec, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.index = index
        heads = spec.heads + 2 * spec.kv_heads
        self.attn_norm = RMSNorm(spec.hidden, spec.norm_eps, dtype)
        self.qkv = Linear(spec.hidden, heads * spec.head_dim, dtype, bias=spec.qkv_bias)
        self.out = Linear(spec.heads * spec.head_dim, spec.hidden, dtype)
        self.ffn_norm = RMSNorm(spec.hidden, spec.norm_eps, dtype)
        self.ffn = SwiGLU(spec.hidden, spec.ffn, dtype)

    def forward(self, x: Tensor, ops: Ops, *, last: bool = False) -> Tensor:
        """x [T, hidden] -> [T, hidden]; of the last layer [n, hidden], see `Ops.narrow`."""
        q = ops.qkv(self.index, x, self.attn_norm, self.qkv)
        if last:
            x, q = ops.narrow(x, q)
            if not x.shape[0]:  # K and V are written, and nobody waits for more
                return x
        x = ops.add_linear(x, ops.attend(self.index, q), self.out)
        return ops.add_mlp(x, self.ffn_norm, self.ffn)


class Decoder(nn.Module):
    """Embedding, blocks, norm, output layer."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype) -> None:
        super().__init__()
        self.spec, self.dtype = spec, dtype
        self.embed = Embedding(spec.vocab_rows, spec.hidden, dtype)
        self.blocks = nn.ModuleList(Block(spec, i, dtype) for i in range(spec.layers))
        self.norm = RMSNorm(spec.hidden, spec.norm_eps, dtype)
        self.head = None if spec.tied else Linear(spec.hidden, spec.vocab_rows, dtype)
        self.rotary = Rotary(spec.rope, spec.head_dim)

    def forward(self, ops: Ops) -> Tensor:
        """One step -> [n, hidden] of the tokens that `Ops.narrow` leaves, before the last norm."""
        x = ops.embed(self.embed)
        for block in self.blocks:
            x = block(x, ops, last=block is self.blocks[-1])
        return x

    @torch.inference_mode()
    def fold_norms(self) -> None:
        """Put the weights of the layers' norms into the matrices behind them: what is left of a
        norm is a factor for each token, which a product may get afterwards. The last norm stays:
        its matrix may be the embedding."""
        for block in self.blocks:
            assert isinstance(block, Block), "a decoder is made of blocks"
            block.attn_norm.fold_into(block.qkv)
            block.ffn_norm.fold_into(block.ffn.gate_up)

    def logits(self, x: Tensor, ops: Ops) -> Tensor:
        """x [n, hidden] -> [n, vocab_size]. Rows that only pad the vocabulary are left out: every
        id that can be drawn is one that the tokenizer accepts back."""
        weight = self.embed.weight if self.head is None else self.head.weight
        return ops.head(x, self.norm, weight[: self.spec.vocab_size])
