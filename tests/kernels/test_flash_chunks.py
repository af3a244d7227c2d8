"""Prompt chunks by FlashAttention 3: what it is called with, what is left to our kernel, and what
it is asked for in vain.

Without the package a stand-in takes the operator's place: the same arguments, in plain torch.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headrace.backends.cuda import chunk_choice, flash_chunks
from headrace.backends.cuda.chunk_choice import ChunkChoice
from headrace.backends.cuda.flash_chunks import LEAST_ROWS, FlashChunks, unsupported
from headrace.backends.cuda.flash_table import FlashTable
from headrace.errors import ConfigError
from headrace.kernels.attention import attend_reference
from headrace.kernels.columns import StepColumns
from headrace.kernels.dense_prefill import Span
from headrace.kernels.gather_keys import (
    BEHIND,
    TILE,
    Places,
    gather_keys,
    gather_keys_reference,
    room_of,
)
from tests.kernels.attention_cache import paged
from tests.kernels.conftest import assert_close
from tests.kernels.test_step_attention import DEVICE, Step, spec_of

CALLS: list[dict[str, Any]] = []  # what the stand-in was called with


def fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    out: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    is_causal: bool,
    num_splits: int,
) -> None:
    """FlashAttention 3's operator, as far as it is used. Loads keys by whole tiles, as it does."""
    assert (is_causal, num_splits) == (True, 1)
    assert all(x.dtype == torch.int32 for x in (cu_seqlens_q, cu_seqlens_k, seqused_k))
    assert q.shape == out.shape
    assert q.stride(2) == k.stride(2) == v.stride(2) == out.stride(2) == 1
    queries, begins, used = (x.tolist() for x in (cu_seqlens_q, cu_seqlens_k, seqused_k))
    assert queries[-1] <= q.shape[0]
    assert begins[-1] <= k.shape[0]
    counts = [queries[i + 1] - queries[i] for i in range(len(used))]
    assert max_seqlen_q >= max(counts)
    assert max_seqlen_k >= max(used)
    some = sum(count > 0 for count in counts)
    assert not any(counts[some:]), "unused ones are the last"
    CALLS.append({"counts": counts[:some], "lengths": used[:some], "scale": softmax_scale})
    CALLS[-1]["most"] = max_seqlen_q, max_seqlen_k
    for i, length in enumerate(used[:some]):
        keys, values = (x[begins[i] : begins[i + 1]].transpose(0, 1) for x in (k, v))
        assert keys.shape[1] >= length + BEHIND, "a tile of keys ends behind its sequence"
        assert not values[:, length:].any(), "what is masked is multiplied by zero all the same"
        mine = slice(queries[i], queries[i + 1])
        keys, values = keys[:, :length], values[:, :length]
        start = length - counts[i]
        out[mine] = attend_reference(q[mine], keys, values, start, scale=softmax_scale)


def with_flash(step: Step, **more: Any) -> FlashChunks:
    """Its buffer full of NaN."""
    spec, attention = step.spec, step.attention
    shape = (spec.heads, spec.kv_heads, spec.head_dim, attention.scale, step.dtype, DEVICE)
    chunks = FlashChunks(step.tokens, *shape, **more)
    chunks._buffer.k.fill_(torch.nan)
    chunks._buffer.v.fill_(torch.nan)
    attention.choice.dense, attention.choice.library = None, chunks
    CALLS.clear()
    return chunks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("d", [16, 80])
def test_gather_keys(dtype: torch.dtype, d: int) -> None:
    lengths = [7, 130, 64, 1]
    cache = paged(
        lengths,
        kv_heads=3,
        page=8,
        d=d,
        dtype=dtype,
        device=DEVICE,
        generator=torch.Generator().manual_seed(5),
    )
    rows = [1, 3, 0]
    own = [lengths[row] for row in rows]
    places = Places.of(rows, own)
    end = int(places.begins[-1])
    out_k, out_v = torch.full((2, 3, end + 5, d), torch.nan, dtype=dtype, device=DEVICE)
    tiles = torch.from_numpy(places.tiles).to(DEVICE)
    gather_keys(cache.k, cache.v, cache.tables, tiles, out_k, out_v)
    for out, source in ((out_k, cache.k), (out_v, cache.v)):
        assert torch.equal(out[:, :end], gather_keys_reference(source, cache.tables, rows, own))
        assert out[:, end:].isnan().all(), "past all of them"


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=9))
def test_places_follow_one_another(lengths: list[int]) -> None:
    places = Places.of(range(len(lengths)), lengths)
    rooms = [room_of(length) for length in lengths]
    assert places.begins.tolist() == [sum(rooms[:i]) for i in range(len(rooms) + 1)]
    assert places.tiles[:, 2].tolist() == list(range(0, sum(rooms), TILE))
    for row, length in enumerate(lengths):
        own = places.tiles[places.tiles[:, 0] == row]
        assert own[:, 1].tolist() == list(range(0, rooms[row], TILE))
        assert set(own[:, 3].tolist()) == {length}


def test_what_it_is_called_with_in_a_mixed_step() -> None:
    least = LEAST_ROWS // 32
    spans = [(33, 1), (20, least), (5, least - 1), (0, 40), (30, least), (0, 1)]
    step = Step(spans, spec_of(32, 1, 16), torch.float32)
    chunks = with_flash(step, fwd=fwd)
    assert step.run() == 0
    assert not CALLS, "nothing is ready: our kernel does all"
    cache = step.cache
    chosen = step.attention.prepare(cache.k, cache.v, cache.tables)
    assert chosen.value == "flash"
    assert f"at least {least} tokens" in chosen.reason
    assert chunks.ready
    for _ in range(6):  # more often than there are slots
        CALLS.clear()
        step.run()
        counts = [call["counts"] for call in CALLS]
        assert counts == [[least], [40, least]], "what is left parts the tokens of two calls"
        assert [call["lengths"] for call in CALLS] == [[20 + least], [40, 30 + least]]
        assert [call["most"] for call in CALLS] == [(least, 20 + least), (40, 30 + least)]
        assert {call["scale"] for call in CALLS} == {16**-0.5}


def test_chunks_of_a_graph() -> None:
    """One table for steps of any chunks, and for none; single tokens leave what they like where
    chunks begin."""
    for spans in ([(7, 1), (20, 9), (3, 4)], [(0, 16)], [(2, 1), (8, 1), (64, 3)]):
        step = Step(spans, spec_of(2, 1, 16), torch.float32)
        library = with_flash(step, fwd=fwd, buffer_bytes=2 * 16 * 4 * 2 * room_of(70))
        table = step.attention.library_table(4)
        assert table is not None
        before = table.ready
        library.prepare(step.cache.k, step.cache.v, step.cache.tables)
        assert (before, table.ready) == (False, True)
        CALLS.clear()
        columns = step.columns
        planned = table.planned(step.tokens, columns.tables)
        out = torch.full_like(step.q, 7.0)
        planned.attend(step.q, step.cache.k, step.cache.v, out)
        assert (out == 7).all(), "nothing is loaded"
        singles = sum(count == 1 for _, count in spans)
        firsts = [sum(count for _, count in spans[:i]) for i in range(len(spans))]
        chunks = [
            Span(i, start, count, firsts[i])
            for i, (start, count) in enumerate(spans)
            if i >= singles
        ]
        table.load(chunks)
        alone = StepColumns(columns.rows, columns.positions, columns.writes, columns.tables)
        made = step.attention.chunked([alone], step.tokens, None, planned)
        found = made.attend(step.layer, step.q, step.cache.k, step.cache.v, out, 0)
        assert_close(found, step.reference(), step.dtype)
        assert CALLS[-1]["counts"] == [span.count for span in chunks]
        table.clear()
        made.attend(step.layer, step.q, step.cache.k, step.cache.v, out, 0)
        assert CALLS[-1]["counts"] == []


@given(st.lists(st.integers(1, 400), min_size=1, max_size=9))
def test_what_fits_a_graph(lengths: list[int]) -> None:
    shape = (4, 1, 16, 0.25, torch.float32, torch.device("cpu"))
    library = FlashChunks(64, *shape, fwd=fwd, buffer_bytes=2 * 16 * 4 * 1024)
    table = FlashTable(library, 4, torch.device("cpu"))
    fits = len(lengths) <= 4 and sum(map(room_of, lengths)) <= 1024
    assert table.fits([length - 1 for length in lengths], [1] * len(lengths)) == fits
    if fits:
        table.load([Span(i, length - 1, 1, i) for i, length in enumerate(lengths)])
        (call,) = table.planned(64, torch.zeros(4, 64, dtype=torch.int32))._calls
        assert call.lengths.tolist() == lengths + [0] * (4 - len(lengths))
        assert int(call.queries[-1]) == len(lengths)
        assert (call.tiles[:, 0] >= 0).sum() * TILE == sum(map(room_of, lengths))


def test_what_does_not_fit_the_buffer() -> None:
    least = LEAST_ROWS // 32
    spans = [(0, least), (600, least), (10, least), (0, least + 1), (0, least + 2), (0, least + 3)]
    step = Step([(3, 1), *spans], spec_of(32, 1, 16), torch.float32)
    room = room_of(step.tokens)
    assert 600 + least > room - BEHIND
    chunks = with_flash(step, fwd=fwd, buffer_bytes=1)
    assert chunks.room == room, "a step's own tokens fit"
    chunks.prepare(step.cache.k, step.cache.v, step.cache.tables)
    CALLS.clear()
    step.run()
    taken = [count for call in CALLS for count in call["counts"]]
    assert len(CALLS) > 2, "they do not fit at once"
    assert all(sum(map(room_of, call["lengths"])) <= room for call in CALLS)
    assert taken == [least, least, least + 1, least + 2, least + 3], "all but the longest sequence"


@given(
    st.lists(st.tuples(st.integers(0, 900), st.integers(1, 60)), min_size=1, max_size=30),
    st.integers(1, 3),
)
def test_each_chunk_goes_to_one(chunks: list[tuple[int, int]], rooms: int) -> None:
    tokens = sum(count for _, count in chunks)
    size = rooms * 2 * 16 * 4 * room_of(300)
    shape = (32, 1, 16, 0.25, torch.float32, torch.device("cpu"))
    library = FlashChunks(tokens, *shape, fwd=fwd, buffer_bytes=size)
    library.ready = True
    firsts = [sum(count for _, count in chunks[:i]) for i in range(len(chunks))]
    spans = [Span(i, s, c, f) for i, ((s, c), f) in enumerate(zip(chunks, firsts, strict=True))]
    planned, left = library.plan(spans, torch.zeros(len(chunks), 64, dtype=torch.int32))
    calls = [] if planned is None else planned._calls
    seen = [t for span in left for t in range(span.first, span.first + span.count)]
    filled = 0
    for call in calls:
        seen += range(call.tokens.start, call.tokens.stop)
        assert call.queries[-1] == call.tokens.stop - call.tokens.start
        assert call.begins[-1] <= library.room
        filled += int(call.begins[-1])
    assert sorted(seen) == list(range(tokens))
    assert filled <= 4 * library.room
    assert left == [span for span in spans if span in left], "in order"


def test_single_tokens_alone_are_no_business_of_it() -> None:
    step = Step([(33, 1), (7, 1)], spec_of(2, 1, 16), torch.float32)
    with_flash(step, fwd=fwd).prepare(step.cache.k, step.cache.v, step.cache.tables)
    CALLS.clear()
    step.run()
    assert not CALLS


def test_a_kernel_that_fails_is_an_error_of_the_setting() -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no kernel image")

    step = Step([(0, 3)], spec_of(2, 1, 16), torch.float32)
    chunks = with_flash(step, fwd=fail)
    with pytest.raises(ConfigError, match=r"set it to cudnn.*no kernel image") as raised:
        chunks.prepare(step.cache.k, step.cache.v, step.cache.tables)
    assert raised.value.param == "prefill_attention"
    assert not chunks.ready


def test_what_cannot_be_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, bf16 = torch.device("cuda"), torch.bfloat16
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert not unsupported(bf16, 128, cuda, find=lambda name: name)
    assert "-m pip install" in unsupported(bf16, 128, cuda, find=lambda name: None)
    assert "float16: set dtype" in unsupported(torch.float16, 128, cuda)
    assert "head_dim 32" in unsupported(bf16, 32, cuda)
    assert "no CUDA device" in unsupported(bf16, 128, torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert "compute capability 9.0" in unsupported(bf16, 128, cuda, find=lambda name: name)


def test_a_package_that_does_not_import_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fa3_fwd._C", None)
    with pytest.raises(ConfigError, match="cannot be imported") as raised:
        flash_chunks.load()
    assert raised.value.param == "prefill_attention"


def test_auto_takes_it_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(2, 1, 16)
    monkeypatch.setattr(chunk_choice, "find_spec", lambda name: name == "fa3_fwd" or None)

    def choose() -> ChunkChoice:
        return ChunkChoice("auto", spec, 64, torch.float32, DEVICE)

    cache = Step([(0, 9)], spec, torch.float32).cache
    found = choose().prepare(cache.k, cache.v, cache.tables)
    assert found.value == "triton"
    assert "not FlashAttention 3, which is installed: it has no kernel" in found.reason
    monkeypatch.setattr(flash_chunks, "unsupported", lambda *args: "")
    monkeypatch.setitem(sys.modules, "fa3_fwd._C", None)
    found = choose().prepare(cache.k, cache.v, cache.tables)
    assert "cannot be imported" in found.reason
    monkeypatch.setattr(flash_chunks, "load", lambda: fwd)
    assert choose().prepare(cache.k, cache.v, cache.tables).value == "flash"


def missing_on_the_card(d: int = 128) -> str:
    return unsupported(torch.bfloat16, d, DEVICE)


@pytest.mark.skipif(
    bool(missing_on_the_card()), reason=f"FlashAttention 3: {missing_on_the_card()}"
)
@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(10, 2, 128), (8, 8, 64), (8, 1, 256)])
def test_mixed_step_on_the_card(heads: int, kv_heads: int, d: int) -> None:
    spans = [(700, 1), (0, 1), (0, 2000), (500, 600), (1000, 17), (0, 960), (3000, 515), (90, 1)]
    step = Step(spans, spec_of(heads, kv_heads, d), torch.bfloat16)
    step.run()  # our kernel
    chunks = with_flash(step)
    cache = step.cache
    chunks.prepare(cache.k, cache.v, cache.tables)
    for _ in range(6):
        step.run()


@pytest.mark.skipif(
    bool(missing_on_the_card()), reason=f"FlashAttention 3: {missing_on_the_card()}"
)
def test_a_graph_on_the_card() -> None:
    spans = [(700, 1), (0, 300), (500, 600), (1000, 17), (3000, 100), (9, 3)]
    step = Step(spans, spec_of(10, 2, 128), torch.bfloat16)
    library, cache = with_flash(step), step.cache
    library.prepare(cache.k, cache.v, cache.tables)
    table = step.attention.library_table(64)
    assert table is not None
    planned = table.planned(step.tokens, cache.tables)
    out = torch.full_like(step.q, torch.nan)
    planned.attend(step.q, cache.k, cache.v, out)
    torch.cuda.synchronize()
    assert out.isnan().all(), "nothing is loaded"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        planned.attend(step.q, cache.k, cache.v, out)
    firsts = [sum(count for _, count in spans[:i]) for i in range(len(spans))]
    chunks = [Span(i, *spans[i], firsts[i]) for i in range(1, len(spans))]
    expected = step.reference()
    for own in (chunks, chunks[1:3], chunks[4:], chunks[:1]):
        table.load(own)
        out.fill_(torch.nan)
        graph.replay()
        begin, end = own[0].first, own[-1].first + own[-1].count
        assert_close(out[begin:end], expected[begin:end], step.dtype)
        assert out[:begin].isnan().all(), "tokens of no chunk are left as they are"
        assert out[end:].isnan().all(), "tokens of no chunk are left as they are"
