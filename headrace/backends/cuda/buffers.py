"""Memory of one step's activations, taken once: a step allocates nothing, so it cannot run out."""

from __future__ import annotations

import torch

from headrace.backends.cuda.dense_chunks import PADDING
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
        q_width = spec.heads * spec.head_dim
        kv_width = spec.kv_heads * spec.head_dim

        def rows(count: int, width: int) -> torch.Tensor:
            return torch.zeros((count, width), dtype=dtype, device=device)

        self.x = rows(tokens, spec.hidden)
        self.normed = rows(tokens, spec.hidden)
        self.scale = torch.zeros(tokens, dtype=torch.float32, device=device)  # a norm's, a token
        self.qkv = rows(tokens, q_width + 2 * kv_width)
        q = rows(PADDING + tokens + PADDING, q_width)[PADDING : PADDING + tokens]
        self.q = q.view(tokens, spec.heads, spec.head_dim)
        self.attended = rows(tokens, q_width).view(tokens, spec.heads, spec.head_dim)
        self.gate_up = rows(min(tokens, MLP_TOKENS), 2 * spec.ffn)
        self.inner = rows(min(tokens, MLP_TOKENS), spec.ffn)
        self.chosen = rows(draws, spec.hidden)  # the stream of tokens whose logits are wanted
        self.chosen_q = rows(draws, q_width).view(draws, spec.heads, spec.head_dim)
        self.logits = rows(draws, spec.vocab_size)

    @property
    def size_bytes(self) -> int:
        """All of it."""
        tensors = [t for t in vars(self).values() if isinstance(t, torch.Tensor)]
        return sum(t.numel() * t.element_size() for t in tensors)
