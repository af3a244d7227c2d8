"""The decoder on the C++ kernels: its forward is recorded once and replayed by every step.

A step is one call into the library: the recorded ops over the step's columns, on the one pool.
Activations between ops are float32; `exact` keeps them so before products, else they are int8
with a scale for each 32 columns.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.backends.cpu.batch import AGAIN_BYTES, Batch, Logits, Peaks
from headrace.backends.cpu.kv_memory import Array, KvMemory
from headrace.models.outline import Attention, Embedding, GatedMlp, Linear, Outline, RMSNorm
from headrace.native import library as abi
from headrace.native.library import Op, Step
from headrace.native.memory import zeros
from headrace.native.pool import Pool
from headrace.native.weights import PLAIN_TYPES, PackedMatrix

_FIRST_ROOM = 256  # tokens; grows to the largest step seen

_TYPES = {"best": np.int64, "finite": np.int32}  # of an op's tensors that are not float32
_ACTS = {"silu": 0, "gelu_tanh": abi.GELU}

Turns = Mapping[str, tuple[Array, Array]]  # LayerSpec.rope -> cos and sin, [positions, d/2]
Weights = Mapping[str, Sequence[PackedMatrix]]  # parameter name -> matrices, in order of rows


class Buffers:
    """What flows between ops, for steps of up to `tokens` tokens and `rows` chosen rows."""

    def __init__(self, pool: Pool, model: Outline, tokens: int, rows: int) -> None:
        spec, self.tokens, self.rows = model.spec, tokens, rows
        heads = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
        self.x = zeros((tokens, spec.hidden), np.float32)
        self.qkv = zeros((tokens, heads), np.float32)
        self.y = zeros((tokens, spec.heads * spec.head_dim), np.float32)
        self.gated = zeros((tokens, spec.ffn), np.float32)
        self.added = zeros((tokens, spec.hidden), np.float32)  # what is normed before it joins x
        self.chosen = zeros((rows, spec.hidden), np.float32)  # of x, from `narrow` on
        self.chosen_y = zeros((rows, spec.heads * spec.head_dim), np.float32)
        self.logits = zeros((rows, spec.vocab_rows), np.float32)
        self.best = zeros((rows,), np.int64)
        self.finite = zeros((rows,), np.int32)
        widest = max(spec.hidden, spec.ffn, spec.heads * spec.head_dim)
        blocks = -(-max(tokens, rows) // abi.TILE) * -(-widest // abi.BLOCK)
        block_bytes = max(pool.library.fast_block_bytes, pool.library.exact_block_bytes)
        self.acts = zeros((blocks * block_bytes,), np.uint8)


class Recorder:
    """Implements `models.ops.Ops`, as far as an outline asks, by writing down what is asked. Arrays
    it returns are buffers that a replay fills.

    whole: the last layer is that of all tokens, not of the chosen ones."""

    def __init__(
        self,
        weights: Weights,
        memory: KvMemory,
        buffers: Buffers,
        turns: Turns,
        *,
        exact: bool,
        whole: bool = False,
    ) -> None:
        self.ops: list[Op] = []
        self._whole = whole
        self._keep: list[Any] = []  # what the ops point at
        self._memory, self._buffers, self._exact, self._turns = memory, buffers, exact, turns
        self._weights = weights
        self._rows = 0  # OF_HEAD from `narrow` on: a flag of every op

    def embed(self, embedding: Embedding, positions: None) -> Array:
        """See `Ops`."""
        matrices = self._weights[embedding.name]
        out = self._buffers.x
        self._add(abi.EMBED, matrices, {"out": out}, scale=embedding.scale)
        return out

    def qkv(self, attention: Attention, x: Array, norm: RMSNorm, linear: Linear) -> Array:
        """See `Ops`; q stays beside k and v: [T, heads + 2 kv_heads, d]."""
        b = self._buffers
        self._product(x, norm, linear, b.qkv)
        group, cache = self._cache(attention.layer)
        tensors = {"out": b.qkv, **cache}
        tensors["cosines"], tensors["sines"] = self._turns[attention.rope]
        epsilon = 0.0
        if attention.q_norm is not None and attention.k_norm is not None:
            tensors |= {"weight": attention.q_norm.weight, "k_norm": attention.k_norm.weight}
            epsilon = attention.q_norm.eps
        self._add(abi.ROTATE, (), tensors, scale=attention.scale, epsilon=epsilon)
        self.ops[-1].group = group
        return b.qkv

    def narrow(self, x: Array, q: Array) -> tuple[Array, Array]:
        """See `Ops`; q stays where it is."""
        if self._whole:
            return x, q
        self._rows = abi.OF_HEAD
        return self._gather(x, self._buffers.chosen), q

    def _gather(self, x: Array, out: Array) -> Array:
        self._add(abi.GATHER, (), {"x": x, "out": out}, width=x.shape[1])
        return out

    def attend(self, attention: Attention, q: Array) -> Array:
        """See `Ops`."""
        y = self._buffers.y
        group, cache = self._cache(attention.reads)
        self._add(abi.ATTEND, (), {"x": q, "out": y, **cache}, softcap=attention.softcap)
        self.ops[-1].window, self.ops[-1].group = attention.window, group
        return self._gather(y, self._buffers.chosen_y) if self._rows else y

    def add_linear(self, x: Array, y: Array, linear: Linear, post: RMSNorm | None) -> Array:
        """See `Ops`; in place."""
        return self._join(x, y, linear, post)

    def add_mlp(self, x: Array, norm: RMSNorm, mlp: GatedMlp, post: RMSNorm | None) -> Array:
        """See `Ops`; in place."""
        gated = self._buffers.gated
        self._product(x, norm, mlp.gate_up, gated, kind=abi.GATED, flags=_ACTS[mlp.act])
        return self._join(x, gated, mlp.down, post)

    def _join(self, x: Array, y: Array, linear: Linear, post: RMSNorm | None) -> Array:
        """x + post(linear(y)), in place."""
        if post is None:
            self._product(y, None, linear, x, flags=abi.ADD)
            return x
        added, width = self._buffers.added, x.shape[1]
        self._product(y, None, linear, added)
        tensors = {"x": added, "out": x, "weight": post.weight}
        self._add(abi.ADD_NORMED, (), tensors, width=width, epsilon=post.eps)
        return x

    def head(self, x: Array, norm: RMSNorm, name: str, vocab: int, softcap: float) -> Array:
        """See `Ops`, of the first `vocab` rows of the matrix `name`; x of all tokens too: the step
        says which rows are chosen."""
        if not self._rows:
            self._rows = abi.OF_HEAD
            x = self._gather(x, self._buffers.chosen)
        out = self._buffers.logits
        assert vocab <= out.shape[1], "padding rows of the vocabulary are cut off later"
        matrices = self._weights[name]
        how = self._kind_of_acts(matrices)
        self._quantise(x, norm, how)
        self._add(abi.LINEAR, matrices, {"out": out}, flags=how, width=out.shape[1], acts=True)
        self.ops[-1].softcap = softcap
        found = {"x": out, "best": self._buffers.best, "finite": self._buffers.finite}
        self._add(abi.PEAKS, (), found, width=vocab)
        self.ops[-1].stride = out.shape[1]
        return out

    def _product(
        self,
        x: Array,
        norm: RMSNorm | None,
        linear: Linear,
        out: Array,
        *,
        kind: int = abi.LINEAR,
        flags: int = 0,
    ) -> None:
        """out (+)= norm(x) W^T + b."""
        matrices = self._weights[linear.name]
        how = self._kind_of_acts(matrices)
        self._quantise(x, norm, how)
        tensors = {"out": out}
        if linear.bias is not None:
            tensors["bias"] = linear.bias
        self._add(kind, matrices, tensors, flags=how | flags, width=out.shape[1], acts=True)

    def _cache(self, layer: int) -> tuple[int, dict[str, Array]]:
        """The KV group of a layer, and its arrays."""
        memory = self._memory
        group, at = memory.places[layer]
        found = {"k": memory.k[at], "v": memory.v[at]}
        if memory.k_scales:
            found |= {"k_scales": memory.k_scales[at], "v_scales": memory.v_scales[at]}
        return group, found

    def _kind_of_acts(self, matrices: Sequence[PackedMatrix]) -> int:
        plain = any(matrix.ggml_type in PLAIN_TYPES for matrix in matrices)
        return abi.EXACT if self._exact or plain else 0

    def _quantise(self, x: Array, norm: RMSNorm | None, flags: int) -> None:
        tensors, epsilon = {"x": x}, 0.0
        if norm is not None:
            tensors["weight"], epsilon = norm.weight, norm.eps
        width = x.shape[1]
        self._add(abi.QUANTISE, (), tensors, flags=flags, width=width, epsilon=epsilon, acts=True)

    def _add(
        self,
        kind: int,
        matrices: Sequence[PackedMatrix],
        tensors: Mapping[str, Array],
        *,
        flags: int = 0,
        width: int = 0,
        epsilon: float = 0.0,
        scale: float = 0.0,
        softcap: float = 0.0,
        acts: bool = False,
    ) -> None:
        for name, tensor in tensors.items():
            assert tensor.flags.c_contiguous, name
            assert tensor.dtype == _TYPES.get(name, np.float32) or name in ("k", "v"), name
        op = Op(
            kind=kind,
            flags=flags | self._rows,
            width=width,
            epsilon=epsilon,
            scale=scale,
            softcap=softcap,
            part_count=len(matrices),
        )
        for name, tensor in tensors.items():
            setattr(op, name, tensor.ctypes.data)
        if acts:
            op.acts = self._buffers.acts.ctypes.data
        if matrices:
            op.parts = abi.pointers([matrix.c for matrix in matrices])
        self._keep.append((matrices, tensors, op.parts))
        self.ops.append(op)


class Whole(NamedTuple):
    """Ops of a step after which every token's logits can be had, by `head` alone."""

    recorder: Recorder  # keeps alive what the ops point at
    ops: ctypes.Array[Op]
    head: ctypes.Array[Op]


class NativeForward:
    """See `batch.Forward`. `positions`: how many a sequence may reach; `rows`: most chosen.

    Takes the pool: `close` ends it.
    """

    def __init__(
        self,
        model: Outline,
        weights: Weights,
        memory: KvMemory,
        pool: Pool,
        *,
        positions: int,
        rows: int,
        exact: bool,
    ) -> None:
        self._model, self._weights, self.memory, self.pool = model, weights, memory, pool
        self._exact = exact
        self._positions, self._turns = positions, model.turns(positions)
        self._kv_type = abi.KV_TYPES[memory.dtype]
        self._record(_FIRST_ROOM, rows)

    def _record(self, tokens: int, rows: int) -> None:
        buffers = Buffers(self.pool, self._model, tokens, rows)
        recorder = Recorder(self._weights, self.memory, buffers, self._turns, exact=self._exact)
        self._model.logits(self._model.forward(recorder), recorder)
        self._buffers, self._recorder = buffers, recorder
        self._columns = np.zeros((5, max(tokens, rows)), np.int32)
        self._step = self._empty_step()
        self._ops = (Op * len(recorder.ops))(*recorder.ops)
        self._whole: Whole | None = None  # recorded when it is first asked for
        self._last: Batch | None = None  # the whole batch whose residual stream is in the buffers

    def _record_whole(self) -> Whole:
        recorder = Recorder(
            self._weights, self.memory, self._buffers, self._turns, exact=self._exact, whole=True
        )
        hidden = self._model.forward(recorder)
        body = len(recorder.ops)
        self._model.logits(hidden, recorder)
        ops, head = recorder.ops, recorder.ops[body:]
        return Whole(recorder, (Op * len(ops))(*ops), (Op * len(head))(*head))

    @property
    def ops(self) -> Sequence[Op]:
        """What a step runs, in order."""
        return self._recorder.ops

    def logits(self, batch: Batch) -> Logits | None:
        """See `batch.Forward`."""
        tokens, rows = batch.ids.size, len(batch.chosen)
        if batch.whole:  # a product of few rows would be the reading of its weight
            rows = max(rows, min(tokens, AGAIN_BYTES // (4 * self._model.spec.vocab_rows)))
        self.reserve(tokens, rows)
        if batch.whole:
            self._whole = self._whole or self._record_whole()
        self.run(batch, self._whole.ops if self._whole and batch.whole else self._ops)
        self._last = batch if batch.whole else None
        if not batch.chosen:
            return None
        return self._buffers.logits[: len(batch.chosen), : self._model.spec.vocab_size]

    def reserve(self, tokens: int, rows: int) -> None:
        """Make room for steps of so many tokens and chosen rows; `ops` may be new afterwards."""
        room = self._buffers
        if tokens > room.tokens or rows > room.rows:
            self._record(max(tokens, 2 * room.tokens), max(rows, room.rows))

    def run(
        self, batch: Batch, ops: ctypes.Array[Op], head_rows: npt.NDArray[np.int64] | None = None
    ) -> None:
        """Run ops over the columns of a batch that fits.

        head_rows: tokens that the output layer takes, ascending; None: those that are chosen.
        """
        tokens, tables, step = batch.ids.size, batch.tables, self._step
        chosen = batch.last_tokens() if head_rows is None else head_rows
        ids, heads, rows, positions, writes = self._columns
        assert tables.flags.c_contiguous, "tables are read in place"
        assert tables.dtype == np.int64, "block ids are int64"
        ids[:tokens] = batch.ids
        heads[: len(chosen)] = chosen
        writes[:tokens] = 1
        if len(batch.rows) == tokens:  # a token each, as while all decode
            rows[:tokens], positions[:tokens] = batch.rows, batch.starts
            writes[batch.unwritten] = 0
            furthest = max(batch.starts)
        else:
            counts = np.array(batch.counts)
            owners = np.repeat(np.arange(counts.size), counts)
            firsts = np.cumsum(counts) - counts
            rows[:tokens] = np.array(batch.rows)[owners]
            positions[:tokens] = np.arange(tokens) + (np.array(batch.starts) - firsts)[owners]
            writes[:tokens][np.isin(owners, batch.unwritten)] = 0
            furthest = int(positions[:tokens].max())
        assert furthest < self._positions, "a position past the rotary table"
        step.tokens, step.head_count = tokens, len(chosen)
        step.tables = tables.ctypes.data
        groups, step.table_rows, step.table_width = tables.shape
        assert groups == self.memory.groups, "a table for each KV group"
        self.pool.run(ops, step)

    def _empty_step(self) -> Step:
        """All of a step that is the same for all of them; its columns are those of `_columns`."""
        spec, names = self._model.spec, ("ids", "head_rows", "rows", "positions", "writes")
        columns = zip(names, self._columns, strict=True)
        return Step(
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            block_size=self.memory.block_size,
            kv_type=self._kv_type,
            **{name: column.ctypes.data for name, column in columns},
        )

    def peaks(self, logits: Logits) -> Peaks:
        """See `batch.Forward`; the step found them."""
        n = logits.shape[0]
        return Peaks(self._buffers.best[:n], self._buffers.finite[:n] != 0)

    @property
    def most_again(self) -> int:
        """See `batch.Forward`; as many rows of logits as there is room for."""
        return self._buffers.rows

    def again(self, tokens: Sequence[int]) -> Logits:
        """See `batch.Forward`. The residual stream of the last step still stands in its buffer."""
        assert self._last is not None, "again() follows logits() of a whole batch"
        assert self._whole is not None, "a whole batch is recorded"
        assert len(tokens) <= self._buffers.rows, f"{len(tokens)} tokens, room for fewer"
        self.run(self._last, self._whole.head, np.array(tokens, np.int64))
        return self._buffers.logits[: len(tokens), : self._model.spec.vocab_size]

    def states(self, first: int, count: int) -> Logits:
        """See `batch.Forward`. The residual stream is float32 here, whatever the weights are."""
        assert self._last is not None, "states() follows logits() of a whole batch"
        x, (weight, eps) = self._buffers.x[first : first + count], self._model.norm
        scale = np.sqrt(np.square(x).mean(-1, keepdims=True) + np.float32(eps))
        normed: Logits = x / scale * weight
        return normed

    def scores(self, states: Logits) -> Logits:
        """See `batch.Forward`; the head is never packed."""
        weight = self._model.classifier
        assert weight is not None, "a model without a classification head"
        # Not a product of matrices: numpy's library for those has threads of its own.
        scored: Logits = (weight * states[..., None, :]).sum(-1)
        return scored

    def counters(self) -> Mapping[str, int]:
        """Nothing: no mixture of experts runs here."""
        return {}

    def close(self) -> None:
        """End the pool; drop weights and buffers."""
        self.pool.close()
        del self._model, self._weights, self.memory, self._buffers, self._recorder, self._ops
        del self._whole, self._last, self._columns, self._step
