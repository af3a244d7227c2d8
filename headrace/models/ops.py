"""What a decoder asks of its backend in one step. Shapes: T = tokens of the step, row after row.

The fusions are part of the contract: a backend may do each in one kernel. The step's ids,
positions and block tables belong to the object that implements it.

Implementations: `backends.cpu.ops.TorchOps` (plain torch), `backends.cpu.native.Recorder` (writes
down what the C++ kernels replay, over numpy arrays) and `backends.cuda.ops.CudaOps`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.models.altup import AltUpBlock
    from headrace.models.latent import LatentAttention
    from headrace.models.layers import Attention, Embedding, GivenAttention, Linear, Mlp, Norm
    from headrace.models.routed import RoutedMlp


class Ops(Protocol):
    """One step's arithmetic. A returned tensor is valid until the next call of the same method.

    Which tokens' logits are wanted belongs to the object too; T is n after `narrow`.

    `x` is the residual stream; methods that add to it may do so in place and return it.
    What a backend does not compute of what these arguments can say it refuses when a model is
    loaded (`models.features`), so its methods may assert that it is not there.
    """

    def embed(self, embedding: Embedding, positions: Embedding | None) -> Tensor:
        """The step's tokens -> x [T, hidden]; `positions`: rows to add, by position."""

    def rows(self, table: Embedding) -> Tensor:
        """The step's tokens -> their rows of a `partial` table, times its scale, [T, width]. Comes
        after `embed`."""

    def qkv(self, attention: Attention, x: Tensor, norm: Norm, linear: Linear) -> Tensor:
        """Norm, q, k and v, their clipping, norms of q and k, rotary -> q [T, heads, d]. k and v
        go to the KV cache; a layer that reads another's has q alone."""

    def narrow(self, x: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, width], q of `qkv` -> x [n, width], q: from here on the step is the n tokens
        whose logits are wanted, in that order, or all T where that is as cheap. Comes once, after
        the `qkv` of the last layer: of the other tokens only its K and V are ever read. n may be 0;
        then nothing more is asked."""

    def attend(self, attention: Attention, q: Tensor) -> Tensor:
        """Each token over its sequence up to itself -> [T, heads * d]."""

    def add_linear(self, x: Tensor, y: Tensor, linear: Linear, post: Norm | None) -> Tensor:
        """x + post(linear(y)), [T, hidden]."""

    def add_mlp(self, x: Tensor, norm: Norm, mlp: Mlp, post: Norm | None) -> Tensor:
        """x + post(mlp(norm(x))), [T, hidden]."""

    def latent(self, attention: LatentAttention, x: Tensor, norm: Norm, linear: Linear) -> Tensor:
        """Norm, `linear` and, where there is one, the second matrix of q, rotary -> q
        [T, heads, plain + rope]. The token's line goes to the KV cache. In the place of `qkv`."""

    def attend_latent(self, attention: LatentAttention, q: Tensor) -> Tensor:
        """Each token over its sequence up to itself -> [T, heads * value]."""

    def tokens(self) -> tuple[Tensor, Tensor]:
        """Ids and positions of the step's tokens, each [T] int64, for layers that are not ours."""

    def attend_given(self, attention: GivenAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, heads, d], k and v [T, kv_heads, d], turned already: k and v go to the KV cache,
        and each token attends over its sequence up to itself -> [T, heads * d]. In the place of
        `qkv` and `attend`."""

    def add_experts(self, layer: int, x: Tensor, norm: Norm, mlp: RoutedMlp) -> Tensor:
        """x + mlp(norm(x)), [T, hidden]; what each expert of the layer gets is counted."""

    def spread(self, weights: Sequence[Tensor], x: Tensor) -> Tensor:
        """x [T, hidden] and its product with each of S - 1 matrices [hidden, hidden], made as large
        as x -> streams [T, S, hidden]."""

    def gather(self, weights: Sequence[Tensor], every: Tensor) -> Tensor:
        """The mean of the first of [T, S, hidden] and of the others' products with a matrix each,
        made as large as the first -> x [T, hidden]."""

    def predict(self, block: AltUpBlock, every: Tensor) -> tuple[Tensor, Tensor]:
        """What the active stream says of all of them [T, S, hidden], before the layer -> the
        streams, and the active one in memory of its own, [T, hidden]."""

    def residual(self, block: AltUpBlock, x: Tensor) -> Tensor:
        """(norm(x) + the learned residual of norm(x)) / sqrt(2), [T, hidden]."""

    def correct(self, block: AltUpBlock, every: Tensor, x: Tensor, inputs: Tensor) -> Tensor:
        """The streams of `predict` by x [T, hidden], what the layer made of the active one; and
        inputs [T, layer_width], its vectors of the tokens, into all but the first."""

    def head(self, x: Tensor, norm: Norm, weight: Tensor, softcap: float) -> Tensor:
        """x [n, hidden] of chosen tokens, weight [vocab, hidden] -> logits [n, vocab], each
        softcap * tanh(logit / softcap) unless that is 0."""
