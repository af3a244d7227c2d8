"""Attention over the paged KV cache, for a batch of decode and prefill rows.

`StepAttention` is made once a step and used by every layer. `attend_reference` says the same in
plain loops; `tests/backend/test_attention.py` compares them.

Flash attention on the CPU: https://arxiv.org/abs/2205.14135 (torch's own kernel).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.backends.cpu.kv_store import KvStore

_GROUP_LINES = 1 << 17  # K lines (of head_dim) that one gather may hold, unless one row has more
_PAD_RATIO = 2  # the longest row of a group has at most this many times the tokens of the shortest


class _Singles(msgspec.Struct, frozen=True):
    """Rows with one new token each, of similar length, padded to the longest.

    tokens [n] indices into the step's tokens; lines [n * kv_heads * longest]; mask
    [n, 1, 1, longest], added to the scores.
    """

    tokens: Tensor
    lines: Tensor
    mask: Tensor


class _Chunk(msgspec.Struct, frozen=True):
    """One row with several new tokens: step tokens [first, first + count).

    lines [kv_heads * total] of cached and new tokens, and mask [count, total], added to the
    scores; both None where nothing is cached: the step's own k and v are the whole sequence.
    """

    first: int
    count: int
    lines: Tensor | None
    mask: Tensor | None


class Scratch:
    """Two buffers that gathers write into; they grow to the largest gather seen."""

    def __init__(self, head_dim: int, dtype: torch.dtype) -> None:
        self._k = torch.empty(0, head_dim, dtype=dtype)
        self._v = torch.empty(0, head_dim, dtype=dtype)

    def gather(self, store: KvStore, layer: int, lines: Tensor) -> tuple[Tensor, Tensor]:
        """K and V at `lines` [n] -> two [n, head_dim], valid until the next call."""
        n = lines.numel()
        if n > self._k.shape[0]:
            self._k, self._v = (torch.empty(n, t.shape[1], dtype=t.dtype) for t in (self._k,) * 2)
        k_lines, v_lines = store.lines(layer)
        k = torch.index_select(k_lines, 0, lines, out=self._k[:n])
        return k, torch.index_select(v_lines, 0, lines, out=self._v[:n])


class StepAttention:
    """Writes and reads of one step.

    tables [rows, width] block ids of the forward rows; row i computes positions
    [starts[i], starts[i] + counts[i]); rows in `unwritten` find their KV in the cache already.
    """

    def __init__(
        self,
        store: KvStore,
        scratch: Scratch,
        tables: Tensor,
        starts: Sequence[int],
        counts: Sequence[int],
        unwritten: Sequence[int],
    ) -> None:
        self.store, self._scratch = store, scratch
        firsts = [0]
        for count in counts:
            firsts.append(firsts[-1] + count)
        self._tokens = firsts.pop()
        counts_t, starts_t = torch.tensor(counts), torch.tensor(starts)
        owner = torch.repeat_interleave(torch.arange(len(counts)), counts_t)
        self.positions = torch.arange(self._tokens) - torch.tensor(firsts)[owner] + starts_t[owner]
        self._written = _written(owner, unwritten)  # token indices, or None for all of them
        kept = slice(None) if self._written is None else self._written
        index = store.line_index(tables[owner[kept]], self.positions[kept][:, None])
        self._write_index = index.reshape(-1)
        singles = [i for i, count in enumerate(counts) if count == 1]
        self._singles = [
            self._plan_singles(tables, starts, firsts, group)
            for group in _groups(singles, starts, store.kv_heads)
        ]
        self._chunks = [
            self._plan_chunk(tables[i : i + 1], starts[i], count, firsts[i])
            for i, count in enumerate(counts)
            if count > 1
        ]

    def _plan_singles(
        self, tables: Tensor, starts: Sequence[int], firsts: Sequence[int], group: list[int]
    ) -> _Singles:
        lengths = torch.tensor([starts[i] + 1 for i in group])
        positions = torch.arange(int(lengths.max())).expand(len(group), -1)
        padding = positions >= lengths[:, None]
        lines = self.store.line_index(tables[group], positions.masked_fill(padding, 0))
        lines.masked_fill_(padding[:, None], self.store.zero_line)
        mask = torch.zeros(padding.shape, dtype=self.store.k[0].dtype)
        mask.masked_fill_(padding, -torch.inf)
        tokens = torch.tensor([firsts[i] for i in group])
        return _Singles(tokens, lines.reshape(-1), mask[:, None, None])

    def _plan_chunk(self, table: Tensor, start: int, count: int, first: int) -> _Chunk:
        if start == 0:
            return _Chunk(first, count, None, None)
        positions = torch.arange(start + count)[None]
        lines = self.store.line_index(table, positions).reshape(-1)
        hidden = positions > torch.arange(start, start + count)[:, None]
        mask = torch.zeros(hidden.shape, dtype=self.store.k[0].dtype)
        return _Chunk(first, count, lines, mask.masked_fill_(hidden, -torch.inf))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, heads, d], k and v [T, kv_heads, d] -> [T, heads * d]. Writes k and v first."""
        self.write(layer, k, v)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for group in self._singles:
            self._attend_singles(layer, group, q, out)
        for chunk in self._chunks:
            self._attend_chunk(layer, chunk, q, k, v, out)
        return out.view(q.shape[0], -1)

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """k and v [T, kv_heads, d] to the cache, but for rows in `unwritten`."""
        if self._written is None:
            self.store.write(layer, self._write_index, k, v)
        elif self._written.numel():
            self.store.write(layer, self._write_index, k[self._written], v[self._written])

    def _attend_singles(self, layer: int, group: _Singles, q: Tensor, out: Tensor) -> None:
        n, kv_heads, d = group.tokens.numel(), self.store.kv_heads, q.shape[-1]
        k, v = self._scratch.gather(self.store, layer, group.lines)
        # The query heads that share a KV head stand where queries of one head would.
        y = F.scaled_dot_product_attention(
            q[group.tokens].view(n, kv_heads, -1, d),
            k.view(n, kv_heads, -1, d),
            v.view(n, kv_heads, -1, d),
            attn_mask=group.mask,
        )
        out[group.tokens] = y.reshape(n, -1, d)

    def _attend_chunk(
        self, layer: int, chunk: _Chunk, q: Tensor, k: Tensor, v: Tensor, out: Tensor
    ) -> None:
        kv_heads, d = self.store.kv_heads, q.shape[-1]
        own = slice(chunk.first, chunk.first + chunk.count)
        if chunk.lines is None:
            keys, values = k[own].transpose(0, 1), v[own].transpose(0, 1)
        else:
            keys, values = (
                t.view(kv_heads, -1, d)
                for t in self._scratch.gather(self.store, layer, chunk.lines)
            )
        queries = q[own].view(chunk.count, kv_heads, -1, d).permute(1, 2, 0, 3)
        shape = (kv_heads, queries.shape[1], keys.shape[1], d)  # a view: nothing is repeated
        y = F.scaled_dot_product_attention(
            queries,
            keys[:, None].expand(shape),
            values[:, None].expand(shape),
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None,
        )
        out[own] = y.permute(2, 0, 1, 3).reshape(chunk.count, -1, d)


def _written(owner: Tensor, unwritten: Sequence[int]) -> Tensor | None:
    if not unwritten:
        return None
    return torch.isin(owner, torch.tensor(list(unwritten)), invert=True).nonzero()[:, 0]


def _groups(rows: list[int], starts: Sequence[int], kv_heads: int) -> list[list[int]]:
    """Rows of similar length together, longest first, so that padding stays below a half."""
    groups: list[list[int]] = []
    longest = 0
    for row in sorted(rows, key=lambda i: -starts[i]):
        length = starts[row] + 1
        full = bool(groups) and (len(groups[-1]) + 1) * longest * kv_heads > _GROUP_LINES
        if not groups or full or length * _PAD_RATIO < longest:
            groups.append([])
            longest = length
        groups[-1].append(row)
    return groups


def attend_reference(
    store: KvStore,
    layer: int,
    tables: Tensor,
    starts: Sequence[int],
    counts: Sequence[int],
    q: Tensor,
) -> Tensor:
    """The same, token by token, head by head, in float64, with K and V already in the cache.

    q [T, heads, d] -> [T, heads * d] float64.
    """
    heads, d = q.shape[1], q.shape[2]
    out = torch.empty(q.shape, dtype=torch.float64)
    token = 0
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        for position in range(start, start + count):
            for head in range(heads):
                kv_head = head // (heads // store.kv_heads)
                spots = [
                    (int(tables[row, p // store.block_size]), kv_head, p % store.block_size)
                    for p in range(position + 1)
                ]
                keys = torch.stack([store.k[layer][spot] for spot in spots]).double()
                values = torch.stack([store.v[layer][spot] for spot in spots]).double()
                weights = torch.softmax(keys @ q[token, head].double() / d**0.5, dim=0)
                out[token, head] = weights @ values
            token += 1
    return out.view(q.shape[0], -1)
