"""Memory of one step's activations, taken once: a step allocates nothing, so it cannot run out."""

from __future__ import annotations

import torch

from headrace.backends.cuda.dense_chunks import PADDING
from headrace.backends.cuda.mixture import Mixture
from headrace.models.spec import ModelSpec

MLP_TOKENS = 4096  # that pass through gate, up and down at once: more gain nothing


class Buffers:
    """For steps of at most `tokens` tokens, of which at most `draws` yield logits. `gate_up` and
    `inner` hold MLP_TOKENS of them.

    Graphs of smaller steps use the first rows of the same tensors. Zero at first: the padding of a
    graph goes through every layer on whatever stands there, and no number of it is read.
    """

    def __init__(
        self, spec: ModelSpec, tokens: int, draws: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        q_dim = out_dim = spec.head_dim
        both = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
        latent = spec.latent
        if latent is not None:
            q_dim, out_dim = latent.plain_dim + latent.rope_dim, latent.value_dim
            both = (latent.q_rank or spec.heads * q_dim) + latent.kv_rank + latent.rope_dim
        q_width = spec.heads * q_dim

        def rows(count: int, width: int) -> torch.Tensor:
            return torch.zeros((count, width), dtype=dtype, device=device)

        self.x = rows(tokens, spec.hidden)
        self.ids: torch.Tensor | None = None
        if spec.altup is not None:  # ids of the step's tokens, and what each has for every layer
            self.ids = torch.zeros(tokens, dtype=torch.int32, device=device)
            self.rows = rows(tokens, spec.layers * spec.altup.layer_width)
        self.normed = rows(tokens, spec.hidden)
        self.scale = torch.zeros(tokens, dtype=torch.float32, device=device)  # a norm's, a token
        self.qkv = rows(tokens, both)
        if latent is not None and latent.q_rank:
            self.q_low, self.q_high = rows(tokens, latent.q_rank), rows(tokens, q_width)
        q = rows(PADDING + tokens + PADDING, q_width)[PADDING : PADDING + tokens]
        self.q = q.view(tokens, spec.heads, q_dim)
        attended = rows(tokens, spec.heads * out_dim)
        self.attended = attended.view(tokens, spec.heads, out_dim)
        ffn = max(layer.ffn or spec.ffn for layer in spec.every_layer())
        self.gate_up = rows(min(tokens, MLP_TOKENS), (1 + spec.gated) * ffn)
        self.inner = rows(min(tokens, MLP_TOKENS), ffn)
        self.chosen = rows(draws, spec.hidden)  # the stream of tokens whose logits are wanted
        self.chosen_q = rows(draws, q_width).view(draws, spec.heads, q_dim)
        self.logits = rows(draws, spec.vocab_size)
        self.mixture = None if spec.experts is None else Mixture(spec, tokens, dtype, device)

    @property
    def size_bytes(self) -> int:
        """All of it."""
        tensors = [t for t in vars(self).values() if isinstance(t, torch.Tensor)]
        mixture = 0 if self.mixture is None else self.mixture.size_bytes
        return mixture + sum(t.numel() * t.element_size() for t in tensors)
