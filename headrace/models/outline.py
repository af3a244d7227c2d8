"""A decoder without tensors: its vectors as numpy arrays, its matrices by name alone. It asks a
backend for the same in the same order as `layers.Decoder` does (`order`), for models whose family
has no layers of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from headrace.models.order import AttentionFacts, BlockOrder, DecoderOrder
from headrace.models.rope import Floats, ropes_of, turns
from headrace.models.spec import Act, ModelSpec

Vectors = Mapping[str, Floats]  # parameter -> float32, as `layers.Decoder` names it

# Matrices that are neither packed, quantised nor kept in the model's own type: small, and outside
# of what backends compute through `Ops`.
PLAIN_MATRICES = frozenset({"classifier.weight"})


class Embedding(NamedTuple):
    """A row a token id, times `scale`."""

    name: str
    scale: float


class Linear(NamedTuple):
    """The matrix `name` and the bias [out]."""

    name: str
    bias: Floats | None


class RMSNorm(NamedTuple):
    """See `layers.RMSNorm`. weight [width]."""

    weight: Floats
    eps: float


class GatedMlp(NamedTuple):
    """See `layers.GatedMlp`."""

    act: Act
    gate_up: Linear
    down: Linear


class Parts:
    """Finds the parts of one model by their names."""

    def __init__(self, spec: ModelSpec, vectors: Vectors) -> None:
        self.eps, self.vectors = spec.norm_eps, vectors

    def linear(self, name: str) -> Linear:
        """A matrix."""
        return Linear(f"{name}.weight", self.vectors.get(f"{name}.bias"))

    def norm(self, name: str) -> RMSNorm | None:
        """None: the model has no such norm."""
        weight = self.vectors.get(f"{name}.weight")
        return None if weight is None else RMSNorm(weight, self.eps)


class Attention(AttentionFacts):
    """See `layers.Attention`."""

    def __init__(self, spec: ModelSpec, index: int, parts: Parts) -> None:
        self.learn(spec, index)
        name = f"blocks.{index}.attention."
        self.q_norm, self.k_norm = parts.norm(f"{name}q_norm"), parts.norm(f"{name}k_norm")


class Block(BlockOrder[Floats]):
    """See `layers.Block`."""

    def __init__(self, spec: ModelSpec, index: int, parts: Parts) -> None:
        name = f"blocks.{index}."
        self.attention = Attention(spec, index, parts)
        self.qkv, self.out = parts.linear(f"{name}qkv"), parts.linear(f"{name}out")
        gate_up, down = parts.linear(f"{name}ffn.gate_up"), parts.linear(f"{name}ffn.down")
        self.ffn = GatedMlp(spec.act, gate_up, down)
        self.attn_norm, self.ffn_norm = (
            parts.norm(f"{name}attn_norm"),
            parts.norm(f"{name}ffn_norm"),
        )
        self.post_attn_norm = parts.norm(f"{name}post_attn_norm")
        self.post_ffn_norm = parts.norm(f"{name}post_ffn_norm")


class Outline(DecoderOrder):
    """Embedding, blocks, norm, output layer or classification head.

    vectors: all of the model's, and its PLAIN_MATRICES.
    """

    positions = None

    def __init__(self, spec: ModelSpec, vectors: Vectors) -> None:
        parts = Parts(spec, vectors)
        self.spec = spec
        self.embed = Embedding("embed.weight", spec.embed_scale)
        self.blocks = [Block(spec, index, parts) for index in range(spec.layers)]
        norm = parts.norm("norm")
        assert norm is not None, "every model has a last norm"
        self.norm = norm
        self.head = "embed.weight" if spec.tied else "head.weight"
        self.classifier = vectors.get("classifier.weight")
        self._factors = {name: vectors.get(f"rotaries.{name}.factors") for name in ropes_of(spec)}

    def logits(self, x: Any, ops: Any) -> Any:
        """Asks for those of the hidden states `x` of `forward`; see `layers.Decoder`."""
        spec = self.spec
        return ops.head(x, self.norm, self.head, spec.vocab_size, spec.logit_softcap)

    def turns(self, positions: int) -> dict[str, tuple[Floats, Floats]]:
        """By `LayerSpec.rope`: cos and sin, each [positions, head_dim / 2]."""
        spec = self.spec
        return {
            name: turns(rope, spec.head_dim, positions, self._factors[name])
            for name, rope in ropes_of(spec).items()
        }
