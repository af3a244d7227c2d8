"""What a decoder asks of its backend and in which order, and what an attention is: all of a decoder
but its tensors. `layers` has a decoder of torch's tensors, `outline` one without any."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from typing import Any, Generic, TypeVar

from headrace.models.rope import alibi_slopes
from headrace.models.spec import ModelSpec

X = TypeVar("X", bound=Sized)  # the residual stream, in whatever the backend computes with


class AttentionFacts:
    """The attention of one layer, beside its matrices and norms.

    layer: whose K and V a step writes. reads: whose are read; another layer's only where this one
    has none of its own. The other fields are those of the spec.
    """

    def learn(self, spec: ModelSpec, index: int) -> None:
        """Set all of it for layer `index`."""
        kind = spec.layer(index)
        self.layer = index
        self.reads = kind.kv_from if kind.kv_from >= 0 else index
        self.heads, self.kv_heads, self.head_dim = spec.heads, spec.kv_heads, spec.head_dim
        self.window, self.rope, self.softcap = kind.window, kind.rope, spec.softcap
        self.scale = kind.scale or spec.head_dim**-0.5
        self.clip = spec.qkv_clip
        self.slopes = alibi_slopes(spec.heads, spec.alibi) if spec.alibi else ()
        self.v_eps = spec.norm_eps if spec.v_norm else 0.0  # 0 = v is not normed

    @property
    def own(self) -> bool:
        """Whether the layer has K and V of its own."""
        return self.reads == self.layer


class BlockOrder(Generic[X]):
    """One decoder layer: `ops` is a `models.ops.Ops` that takes the parts of this layer."""

    attention: Any
    attn_norm: Any
    qkv: Any
    out: Any
    ffn_norm: Any
    ffn: Any
    post_attn_norm: Any
    post_ffn_norm: Any

    def forward(self, x: X, ops: Any, *, last: bool = False) -> X:
        """x [T, hidden] -> [T, hidden]; of the last layer [n, hidden], see `Ops.narrow`."""
        q = self.project(x, ops)
        if last:
            x, q = ops.narrow(x, q)
            if not len(x):  # K and V are written, and nobody waits for more
                return x
        return self.feed(self.attend(x, q, ops), ops)

    def project(self, x: X, ops: Any) -> X:
        """The layer's queries; what the cache keeps of its tokens is written."""
        q: X = ops.qkv(self.attention, x, self.attn_norm, self.qkv)
        return q

    def attend(self, x: X, q: X, ops: Any) -> X:
        """x with what the layer's attention adds."""
        added: X = ops.add_linear(x, ops.attend(self.attention, q), self.out, self.post_attn_norm)
        return added

    def feed(self, x: X, ops: Any) -> X:
        """x with what the layer's feed-forward adds."""
        added: X = ops.add_mlp(x, self.ffn_norm, self.ffn, self.post_ffn_norm)
        return added


class DecoderOrder:
    """All layers, one after another."""

    embed: Any
    positions: Any
    blocks: Any  # in their order

    def forward(self, ops: Any) -> Any:
        """One step -> [n, hidden] of the tokens that `Ops.narrow` leaves, before the last norm."""
        return self.through(self.blocks, ops)

    def through(self, blocks: Iterable[Any], ops: Any) -> Any:
        """The same with those blocks in the place of all."""
        x = ops.embed(self.embed, self.positions)
        *others, last = blocks
        for block in others:
            x = block.forward(x, ops)
        return last.forward(x, ops, last=True)
