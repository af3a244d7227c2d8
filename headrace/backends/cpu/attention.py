"""Attention over the paged KV cache, for a batch of decode and prefill rows.

`StepAttention` is made once a step and used by every layer. `attend_reference` says the same in
plain loops; `tests/backend/test_attention.py` compares them.

Flash attention on the CPU: https://arxiv.org/abs/2205.14135 (torch's own kernel).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.backends.cpu.kv_store import KvStore

_GROUP_LINES = 1 << 17  # K lines (of head_dim) that one gather may hold, unless one row has more
_PAD_RATIO = 2  # the longest row of a group has at most this many times the tokens of the shortest


class Pattern(NamedTuple):
    """How one layer's queries see keys; see `models.spec`. scale 0 = head_dim ** -0.5."""

    window: int = 0
    scale: float = 0.0
    softcap: float = 0.0
    slopes: tuple[float, ...] = ()
    sinks: Tensor | None = None  # [heads]

    @property
    def plain(self) -> bool:
        """torch's fused attention computes it."""
        return not self.softcap and not self.slopes and self.sinks is None


class _Singles(msgspec.Struct, frozen=True):
    """Rows with one new token each, of similar length, padded to the longest.

    tokens [n] indices into the step's tokens; lines [n * kv_heads * longest]; mask
    [n, 1, 1, longest] or, with slopes, [n, kv_heads, group, longest], added to the scores.
    """

    tokens: Tensor
    lines: Tensor
    mask: Tensor


class _Chunk(msgspec.Struct, frozen=True):
    """One row with several new tokens: step tokens [first, first + count).

    lines [kv_heads * total] of cached and new tokens; None where nothing is cached: the step's own
    k and v are the whole sequence. mask [count, total] or, with slopes, [kv_heads, group, count,
    total], added to the scores; None = causal, nothing else is hidden.
    """

    first: int
    count: int
    lines: Tensor | None
    mask: Tensor | None


class _Plan(NamedTuple):
    """What the layers of one kind read."""

    singles: list[_Singles]
    chunks: list[_Chunk]


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

    tables [KV groups, rows, width] block ids of the forward rows; row i computes positions
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
        self._owners, self._spots = owner[kept], self.positions[kept][:, None]  # of those
        self._write_index: dict[int, Tensor] = {}  # KV group -> lines, from the first write on
        self._tables, self._starts, self._counts, self._firsts = tables, starts, counts, firsts
        self._plans: dict[tuple[object, ...], _Plan] = {}

    def _plan(self, pattern: Pattern, group: int, *, own: bool) -> _Plan:
        """group: of the KV cache. own: the step's k and v are at hand."""
        key = (pattern.window, pattern.slopes, pattern.plain, group, own)
        if key not in self._plans:
            singles = [i for i, count in enumerate(self._counts) if count == 1]
            alike = _groups(singles, self._starts, self.store.kv_heads)
            chunks = [i for i, count in enumerate(self._counts) if count > 1]
            self._plans[key] = _Plan(
                [self._plan_singles(rows, pattern, self._tables[group]) for rows in alike],
                [self._plan_chunk(i, pattern, self._tables[group], own=own) for i in chunks],
            )
        return self._plans[key]

    def _plan_singles(self, rows: list[int], pattern: Pattern, tables: Tensor) -> _Singles:
        ends = torch.tensor([self._starts[i] + 1 for i in rows])[:, None]
        lows = (ends - pattern.window).clamp(min=0) if pattern.window else torch.zeros_like(ends)
        positions = torch.arange(int((ends - lows).max())) + lows
        padding = positions >= ends
        lines = self.store.line_index(tables[rows], positions.masked_fill(padding, 0))
        lines.masked_fill_(padding[:, None], self.store.zero_line)
        mask = self._mask(padding, pattern)[:, None, None]
        if pattern.slopes:
            mask = mask + self._bias((positions - ends + 1)[:, None, None], pattern.slopes)
        tokens = torch.tensor([self._firsts[i] for i in rows])
        return _Singles(tokens, lines.reshape(-1), mask)

    def _plan_chunk(self, row: int, pattern: Pattern, tables: Tensor, *, own: bool) -> _Chunk:
        start, count, first = self._starts[row], self._counts[row], self._firsts[row]
        low = max(0, start + 1 - pattern.window) if pattern.window else 0
        windowed = 0 < pattern.window < start + count
        if own and start == 0 and pattern.plain and not windowed:
            return _Chunk(first, count, None, None)
        keys, queries = torch.arange(low, start + count)[None], torch.arange(start, start + count)
        lines = None
        if not own or start:
            lines = self.store.line_index(tables[row : row + 1], keys).reshape(-1)
        distance = keys - queries[:, None]
        hidden = distance > 0
        if pattern.window:
            hidden |= distance <= -pattern.window
        mask = self._mask(hidden, pattern)
        if pattern.slopes:
            mask = mask + self._bias(distance, pattern.slopes)
        return _Chunk(first, count, lines, mask)

    def _mask(self, hidden: Tensor, pattern: Pattern) -> Tensor:
        """0 where not hidden; in the type that scores have."""
        dtype = self.store.k[0].dtype if pattern.plain else torch.float32
        return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)

    def _bias(self, distance: Tensor, slopes: tuple[float, ...]) -> Tensor:
        """distance [..., queries, keys], 0 or less -> [..., kv_heads, group, queries, keys], with
        the query axis left out where there is none: singles have [n, 1, 1, keys]."""
        table = torch.tensor(slopes).view(self.store.kv_heads, -1, 1)
        if distance.ndim == 4:
            return distance * table
        return distance * table[..., None]

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        pattern: Pattern = Pattern(),  # noqa: B008 - a tuple
    ) -> Tensor:
        """q [T, heads, d], k and v [T, kv_heads, d] -> [T, heads * d]. Writes k and v first; None
        where those of `layer` are in the cache."""
        if k is not None and v is not None:
            self.write(layer, k, v)
        plan = self._plan(pattern, self.store.group(layer), own=k is not None)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for group in plan.singles:
            self._attend_singles(layer, group, pattern, q, out)
        for chunk in plan.chunks:
            self._attend_chunk(layer, chunk, pattern, q, k, v, out)
        return out.view(q.shape[0], -1)

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """k and v [T, kv_heads, d] to the cache, but for rows in `unwritten`."""
        if self._written is not None:
            if not self._written.numel():
                return
            k, v = k[self._written], v[self._written]
        group = self.store.group(layer)
        if group not in self._write_index:
            index = self.store.line_index(self._tables[group][self._owners], self._spots)
            self._write_index[group] = index.reshape(-1)
        self.store.write(layer, self._write_index[group], k, v)

    def _attend_singles(
        self, layer: int, group: _Singles, pattern: Pattern, q: Tensor, out: Tensor
    ) -> None:
        n, kv_heads, d = group.tokens.numel(), self.store.kv_heads, q.shape[-1]
        k, v = self._scratch.gather(self.store, layer, group.lines)
        # The query heads that share a KV head stand where queries of one head would.
        queries = q[group.tokens].view(n, kv_heads, -1, d)
        keys, values = k.view(n, kv_heads, -1, d), v.view(n, kv_heads, -1, d)
        if pattern.plain:
            y = F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=group.mask, scale=pattern.scale or None
            )
        else:
            sinks = None if pattern.sinks is None else pattern.sinks.view(1, kv_heads, -1, 1)
            y = _attend(queries, keys, values, group.mask, pattern, sinks)
        out[group.tokens] = y.reshape(n, -1, d)

    def _attend_chunk(
        self,
        layer: int,
        chunk: _Chunk,
        pattern: Pattern,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        out: Tensor,
    ) -> None:
        kv_heads, d = self.store.kv_heads, q.shape[-1]
        own = slice(chunk.first, chunk.first + chunk.count)
        if chunk.lines is None:
            assert k is not None, "a plan without lines is for k and v at hand"
            assert v is not None, "a plan without lines is for k and v at hand"
            keys, values = k[own].transpose(0, 1), v[own].transpose(0, 1)
        else:
            keys, values = (
                t.view(kv_heads, -1, d)
                for t in self._scratch.gather(self.store, layer, chunk.lines)
            )
        queries = q[own].view(chunk.count, kv_heads, -1, d).permute(1, 2, 0, 3)
        shape = (kv_heads, queries.shape[1], keys.shape[1], d)  # a view: nothing is repeated
        keys, values = keys[:, None].expand(shape), values[:, None].expand(shape)
        if pattern.plain:
            y = F.scaled_dot_product_attention(
                queries,
                keys,
                values,
                attn_mask=chunk.mask,
                is_causal=chunk.mask is None,
                scale=pattern.scale or None,
            )
        else:
            assert chunk.mask is not None, "only fused attention knows what causal is"
            sinks = None if pattern.sinks is None else pattern.sinks.view(kv_heads, -1, 1, 1)
            y = _attend(queries, keys, values, chunk.mask, pattern, sinks)
        out[own] = y.permute(2, 0, 1, 3).reshape(chunk.count, -1, d)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, pattern: Pattern, sinks: Tensor | None
) -> Tensor:
    """q [..., queries, d], k and v [..., keys, d] -> [..., queries, d]; scores are float32.

    sinks: one score for each query, of a key that has no value; broadcast to [..., queries, 1].
    """
    scores = (q.float() @ k.float().transpose(-1, -2)) * (pattern.scale or q.shape[-1] ** -0.5)
    if pattern.softcap:
        scores = pattern.softcap * torch.tanh(scores / pattern.softcap)
    scores = scores + mask
    if sinks is not None:
        scores = torch.cat((scores, sinks.float().expand(*scores.shape[:-1], 1)), -1)
    weights = torch.softmax(scores, -1)[..., : k.shape[-2]]
    return (weights @ v.float()).to(q.dtype)


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
    pattern: Pattern = Pattern(),  # noqa: B008 - a tuple
) -> Tensor:
    """The same, token by token, head by head, in float64, with K and V already in the cache.

    One KV group: tables [rows, width]. q [T, heads, d] -> [T, heads * d] float64.
    """
    heads, d = q.shape[1], q.shape[2]
    out = torch.empty(q.shape, dtype=torch.float64)
    token = 0
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        for position in range(start, start + count):
            seen = [p for p in range(position + 1) if _sees(pattern, position - p)]
            for head in range(heads):
                kv_head = head // (heads // store.kv_heads)
                spots = [
                    (int(tables[row, p // store.block_size]), kv_head, p % store.block_size)
                    for p in seen
                ]
                keys = torch.stack([store.k[layer][spot] for spot in spots]).double()
                values = torch.stack([store.v[layer][spot] for spot in spots]).double()
                scores = keys @ q[token, head].double() * (pattern.scale or d**-0.5)
                weights = _weights(scores, position - torch.tensor(seen), head, pattern)
                out[token, head] = weights @ values
            token += 1
    return out.view(q.shape[0], -1)


def _sees(pattern: Pattern, distance: int) -> bool:
    return not pattern.window or distance < pattern.window


def _weights(scores: Tensor, distance: Tensor, head: int, pattern: Pattern) -> Tensor:
    """One head's softmax of scores [keys] over keys so many tokens back."""
    if pattern.softcap:
        scores = pattern.softcap * torch.tanh(scores / pattern.softcap)
    if pattern.slopes:
        scores = scores - pattern.slopes[head] * distance
    parts = torch.exp(scores)
    sink = torch.tensor(0.0) if pattern.sinks is None else torch.exp(pattern.sinks[head].double())
    return parts / (parts.sum() + sink)
