"""A step of decode rows, a padded dense chunk and a paged one, against plain torch."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.backends.cuda.attention import Attention
from headrace.backends.cuda.dense_chunks import PADDING, DenseChunks, unsupported
from headrace.kernels.attention import attend_reference, cached
from headrace.kernels.attention_configs import decode_config
from headrace.kernels.columns import StepColumns
from headrace.kernels.dense_prefill import Attend, cudnn
from headrace.kernels.tuned import Decoding
from headrace.messages import StepPlan
from headrace.models.layers import Attention as LayerAttention
from headrace.models.spec import LayerSpec, ModelSpec, Rope
from tests.kernels.attention_cache import Paged, paged
from tests.kernels.conftest import CUDA, assert_close
from tests.kernels.test_dense_prefill import on_the_cpu

DEVICE = torch.device("cuda" if CUDA else "cpu")


def spec_of(heads: int, kv_heads: int, d: int, **more: Any) -> ModelSpec:
    return ModelSpec(
        architecture="LlamaForCausalLM",
        layers=1,
        hidden=heads * d,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=d,
        ffn=16,
        vocab_rows=16,
        vocab_size=16,
        rope=Rope(10000.0),
        norm_eps=1e-5,
        tied=True,
        qkv_bias=False,
        max_positions=16384,
        **more,
    )


class Step:
    """Spans (start, count) of a step's rows over a random cache; single tokens first."""

    def __init__(self, spans: list[tuple[int, int]], spec: ModelSpec, dtype: torch.dtype) -> None:
        self.spans, self.spec, self.dtype = spans, spec, dtype
        self.starts, self.counts = [s for s, _ in spans], [c for _, c in spans]
        generator = torch.Generator().manual_seed(8)
        lengths = [start + count for start, count in spans]
        self.cache: Paged = paged(
            lengths,
            kv_heads=spec.kv_heads,
            page=16,
            d=spec.head_dim,
            dtype=dtype,
            device=DEVICE,
            generator=generator,
        )
        rows = [i for i, count in enumerate(self.counts) for _ in range(count)]
        positions = [start + j for start, count in spans for j in range(count)]
        columns = torch.tensor([rows, positions, [1] * len(rows)], dtype=torch.int32).to(DEVICE)
        self.columns = StepColumns(columns[0], columns[1], columns[2], self.cache.tables)
        self.tokens = len(rows)
        memory = torch.full((self.tokens + 2 * PADDING, spec.heads, spec.head_dim), torch.nan)
        own = slice(PADDING, PADDING + self.tokens)  # before and behind it: NaN
        memory[own].normal_(generator=generator)
        self.q = memory.to(DEVICE, dtype)[own]
        self.layer = LayerAttention(spec, 0, dtype).to(DEVICE)
        if self.layer.sinks is not None:
            self.layer.sinks.normal_()
        decoding = Decoding(decode_config(dtype, spec.head_dim), 4)
        self.attention = Attention(
            spec, 4, self.tokens, len(spans), dtype, DEVICE, decoding=lambda tokens: decoding
        )

    def dense(self, sizes: tuple[int, ...], attend: Attend) -> DenseChunks:
        """With NaN in its memory."""
        spec = self.spec
        shape = (spec.heads, spec.kv_heads, spec.head_dim)
        dense = DenseChunks(sizes, *shape, self.attention.scale, self.dtype, DEVICE, attend)
        dense._buffer.k.fill_(torch.nan)
        dense._buffer.v.fill_(torch.nan)
        self.attention.choice.dense = dense
        return dense

    def run(self) -> int:
        """Computes and compares; how many chunks were dense."""
        ids: list[list[int] | None] = [[0] * count for count in self.counts]
        n, rows = len(ids), list(range(len(ids)))
        plan = StepPlan(
            1, [], [], [], [[]], rows, self.starts, self.counts, ids, [0] * n, [], [], []
        )
        step = self.attention.mixed([self.columns], plan)
        out = torch.full(self.q.shape, torch.nan, dtype=self.dtype, device=DEVICE)
        found = step.attend(self.layer, self.q, self.cache.k, self.cache.v, out, 0)
        assert_close(found, self.reference(), self.dtype)
        assert found.is_contiguous()
        self.copied = found is out
        return len(step._dense)

    def reference(self) -> Tensor:
        parts, first = [], 0
        for row, (start, count) in enumerate(self.spans):
            table, q = self.cache.tables[row], self.q[first : first + count]
            keys, values = (cached(x, table, start + count) for x in (self.cache.k, self.cache.v))
            layer = self.layer
            parts += [
                attend_reference(
                    q,
                    keys,
                    values,
                    start,
                    scale=layer.scale,
                    window=layer.window,
                    softcap=layer.softcap,
                    sinks=layer.sinks,
                )
            ]
            first += count
        return torch.cat(parts)


def test_windows_sinks_and_scores_of_a_layer() -> None:
    kinds = (LayerSpec(window=9, scale=0.3),)
    spec = spec_of(4, 2, 16, kinds=kinds, sinks=True, softcap=5.0)
    step = Step([(17, 1), (0, 1), (20, 11), (0, 3)], spec, torch.float32)
    assert step.run() == 0, "no library computes it"
    assert "windows" in step.attention.prepare(step.cache.k, step.cache.v, step.cache.tables).reason


@pytest.mark.skipif(
    CUDA, reason="torch's attention of the CPU stands for cuDNN where there is none"
)
def test_only_prepared_sizes_go_dense() -> None:
    step = Step([(17, 1), (0, 1), (0, 46), (20, 11), (0, 30)], spec_of(4, 2, 16), torch.float32)
    dense = step.dense((48, 32), on_the_cpu)
    assert step.run() == 0, "nothing is prepared"
    dense.prepare(step.cache.k, step.cache.v, step.cache.tables)
    assert step.run() == 2
    assert step.attention.choice.dense is dense


@pytest.mark.skipif(
    CUDA, reason="torch's attention of the CPU stands for cuDNN where there is none"
)
def test_a_chunk_with_little_before_it_goes_dense_too() -> None:
    step = Step([(3, 1), (6, 40), (0, 3)], spec_of(4, 2, 16), torch.float32)
    dense = step.dense((48,), on_the_cpu)
    dense.prepare(step.cache.k, step.cache.v, step.cache.tables)
    assert step.run() == 1


@pytest.mark.skipif(
    CUDA, reason="torch's attention of the CPU stands for cuDNN where there is none"
)
@pytest.mark.parametrize(
    ("spans", "copied"),
    [
        ([(0, 46)], False),
        ([(0, 44), (7, 2), (3, 2)], False),  # of others there is a row too
        ([(3, 44)], False),
        ([(3, 44), (9, 2)], True),  # no row is left for the last
        ([(0, 1), (0, 44)], True),  # nor before the first
        ([(1, 1), (1, 44)], False),
        ([(0, 46), (0, 46)], True),
    ],
)
def test_what_covers_the_step_is_not_copied(spans: list[tuple[int, int]], copied: bool) -> None:
    step = Step(spans, spec_of(4, 2, 16), torch.float32)
    dense = step.dense((48,), token_major)
    dense.prepare(step.cache.k, step.cache.v, step.cache.tables)
    assert step.run() >= 1
    assert step.copied == copied


def token_major(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Lays its output out as cuDNN does: like q."""
    y, lse = on_the_cpu(q, k, v, causal, scale)
    return y.transpose(1, 2).contiguous().transpose(1, 2), lse


def test_which_size_fits() -> None:
    step = Step([(0, 3)], spec_of(2, 1, 16), torch.float32)
    dense = step.dense((4096, 8192), lambda q, k, v, causal, scale: (q, q))
    dense.prepare(step.cache.k, step.cache.v, step.cache.tables)
    assert dense.fitting(0, 8192, 0) == 8192
    assert dense.fitting(0, 7500, 0) == 8192
    assert dense.fitting(192, 7808, 0) == 8192, "queries before it stand for what it has"
    assert dense.fitting(6000, 2000, 6000) == 0, "most of the square would be its context"
    assert dense.fitting(1200, 6800, 0) == 0, "there is no memory for so many queries before it"
    assert dense.fitting(1200, 6800, 200) == 8192
    assert dense.fitting(0, 5000, 0) == 0, "most of the work would be padding"
    assert dense.fitting(0, 4096, 0) == 4096
    assert dense.fitting(0, 8193, 0) == 0
    seen: list[int] = []
    other = threading.Thread(target=lambda: seen.append(dense.fitting(0, 8192, 0)))
    other.start()
    other.join()
    assert seen == [0], "cuDNN's plans are of another thread"


def test_who_has_no_dense_chunks_says_why() -> None:
    assert "float32" in unsupported(torch.float32, 128, DEVICE)
    assert "head_dim 256" in unsupported(torch.bfloat16, 256, DEVICE)
    step = Step([(3, 1), (0, 9)], spec_of(2, 1, 16), torch.float32)
    cache = step.cache
    assert "float32" in step.attention.prepare(cache.k, cache.v, cache.tables).reason
    assert step.run() == 0


@pytest.mark.skipif(not CUDA, reason="no GPU: cuDNN's attention runs on the card")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("d", [64, 128])
def test_mixed_step_on_the_card(d: int, dtype: torch.dtype) -> None:
    spans = [(700, 1), (0, 1), (0, 2000), (500, 300), (0, 1024), (0, 960)]
    step = Step(spans, spec_of(10, 2, d), dtype)
    dense = step.dense((2048, 1024), cudnn)
    cache = step.cache
    dense.prepare(cache.k, cache.v, cache.tables)
    assert step.run() == 3
    assert step.run() == 3, "again, over memory that the first run left"


@pytest.mark.skipif(not CUDA, reason="no GPU: cuDNN's attention runs on the card")
def test_cudnn_lays_its_output_out_token_by_token() -> None:
    step = Step([(0, 2000), (700, 40)], spec_of(10, 2, 128), torch.bfloat16)
    dense = step.dense((2048,), cudnn)
    dense.prepare(step.cache.k, step.cache.v, step.cache.tables)
    assert step.run() == 1
    assert not step.copied
