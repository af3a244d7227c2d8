"""Log-probabilities of given tokens, their ranks, and the most likely tokens beside them.

Log-softmax of the model's logits as they are. The vocabulary is read once and not sorted: each
chunk names its largest, and the largest of those are the row's. Reference: `sampling.reference`.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels import pdl
from headrace.kernels.launch import launch
from headrace.kernels.weights import COLUMNS, NEG_INF, ordered, unordered

MOST: int = 20  # the most likely tokens of a row that can be asked for
ENTRY: int = 2 + 2 * MOST  # int32 of a result: logprob bits, rank, ids, bits of their logprobs
_TOP: int = 32  # the power of two that holds them
_NOTHING = tl.constexpr(-(2**63 - 1))  # below the key of -inf


@triton.jit(do_not_specialize_on_alignment=(*COLUMNS, "rows", "which", "targets"))
def chunk_logprobs_kernel(
    logits,
    rows,
    targets,
    which,
    peaks,
    sums,
    above,
    tops,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    TOP: tl.constexpr,
    LIST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (chunks, asks). Of every chunk, each [asks, chunks]: its largest logit and the sum of
    exp(z - that), float32; how many logits are larger than the target's. With LIST its TOP largest,
    as int64 keys [asks, chunks, TOP]: a larger logit has the larger key, among equals a lower id.
    """
    pdl.release(PDL)
    pdl.wait(PDL)
    chunk, ask = tl.program_id(0), tl.program_id(1)
    at = ask * CHUNKS + chunk
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = ids < VOCAB
    row = logits + tl.load(rows + ask).to(tl.int64) * VOCAB
    target = tl.maximum(tl.load(targets + tl.load(which + ask)), 0)  # < 0: the draw failed
    own = tl.load(row + target).to(tl.float32)
    z = tl.load(row + ids, mask=inside, other=NEG_INF).to(tl.float32)
    peak = tl.max(z, 0)
    base = tl.where(peak > NEG_INF, peak, 0.0)
    tl.store(peaks + at, peak)
    tl.store(sums + at, tl.sum(tl.exp(z - base), 0))
    tl.store(above + at, tl.sum((z > own).to(tl.int32), 0))
    if LIST:
        keys = (ordered(z).to(tl.int64) << 32) + (VOCAB - ids)
        keys = tl.topk(tl.where(inside, keys, _NOTHING), TOP)
        tl.store(tops + at.to(tl.int64) * TOP + tl.arange(0, TOP), keys)


@triton.jit(do_not_specialize_on_alignment=(*COLUMNS, "rows", "which", "targets", "entries"))
def row_logprobs_kernel(
    logits,
    rows,
    targets,
    which,
    peaks,
    sums,
    above,
    tops,
    entries,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr,
    TOP: tl.constexpr,
    MOST: tl.constexpr,
    LIST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (asks,). entries [asks, 2 + 2 MOST] int32."""
    pdl.release(PDL)
    pdl.wait(PDL)
    ask = tl.program_id(0)
    chunk = tl.arange(0, CHUNKS_PADDED)
    real = chunk < CHUNKS
    at = ask * CHUNKS + chunk
    chunk_peak = tl.load(peaks + at, mask=real, other=NEG_INF)
    peak = tl.max(chunk_peak, 0)
    share = tl.load(sums + at, mask=real, other=0.0).to(tl.float64)
    share *= tl.exp(tl.where(chunk_peak > NEG_INF, chunk_peak - peak, 0.0).to(tl.float64))
    total = peak.to(tl.float64) + tl.log(tl.sum(tl.where(chunk_peak > NEG_INF, share, 0.0), 0))
    row = logits + tl.load(rows + ask).to(tl.int64) * VOCAB
    target = tl.maximum(tl.load(targets + tl.load(which + ask)), 0)
    own = tl.load(row + target).to(tl.float32).to(tl.float64) - total
    mine = entries + ask * (2 + 2 * MOST)
    tl.store(mine, own.to(tl.float32).to(tl.int32, bitcast=True))
    tl.store(mine + 1, 1 + tl.sum(tl.load(above + at, mask=real, other=0), 0))
    if LIST:
        each = tl.arange(0, CHUNKS_PADDED * TOP)
        known = each < CHUNKS * TOP
        keys = tl.load(tops + ask.to(tl.int64) * CHUNKS * TOP + each, mask=known, other=_NOTHING)
        best = tl.topk(keys, TOP)
        place = tl.arange(0, TOP)
        z = unordered((best >> 32).to(tl.int32)).to(tl.float64) - total
        ids = VOCAB - (best & 0xFFFFFFFF).to(tl.int32)
        tl.store(mine + 2 + place, ids, mask=place < MOST)
        bits = z.to(tl.float32).to(tl.int32, bitcast=True)
        tl.store(mine + 2 + MOST + place, bits, mask=place < MOST)


@dataclasses.dataclass(frozen=True)
class LogprobScratch:
    """Device memory for up to `asks` rows of `vocab` logits; 10 KB an ask at 152064."""

    vocab: int
    chunk: int
    peaks: Tensor  # [asks, chunks] float32
    sums: Tensor  # [asks, chunks] float32
    above: Tensor  # [asks, chunks] int32
    tops: Tensor  # [asks, chunks, 32] int64

    @classmethod
    def allocate(
        cls, asks: int, vocab: int, device: torch.device, *, chunk: int = 4096
    ) -> LogprobScratch:
        """chunk: a power of two, at least 32."""
        chunks = triton.cdiv(vocab, chunk)
        assert chunk >= _TOP, f"a chunk of {chunk} does not hold {_TOP}"

        def empty(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            vocab,
            chunk,
            empty(asks, chunks, dtype=torch.float32),
            empty(asks, chunks, dtype=torch.float32),
            empty(asks, chunks, dtype=torch.int32),
            empty(asks, chunks, _TOP, dtype=torch.int64),
        )


def logprobs(
    logits: Tensor,
    rows: Tensor,
    targets: Tensor,
    which: Tensor,
    entries: Tensor,
    *,
    listed: bool,
    scratch: LogprobScratch,
    with_pdl: bool = False,
) -> None:
    """entries[i] for token targets[which[i]] under row rows[i] of the logits; see `unpack`.

    logits [R, vocab] of any float type, contiguous; rows, which [n] and targets [m] int32, a
    negative target stands for 0; entries [n, ENTRY] int32. listed: the MOST most likely tokens too;
    else what entries hold of them stays as it was.
    """
    asks, vocab = rows.shape[0], logits.shape[1]
    assert logits.is_contiguous(), "logits must be contiguous"
    assert vocab == scratch.vocab, f"scratch is for {scratch.vocab} logits a row, not {vocab}"
    assert asks <= scratch.peaks.shape[0], f"scratch is for {scratch.peaks.shape[0]} asks"
    assert entries.shape == (asks, ENTRY), f"entries are [{asks}, {ENTRY}]"
    assert entries.is_contiguous(), "entries must be contiguous"
    if not asks:
        return
    chunks = scratch.peaks.shape[1]
    parts = (scratch.peaks, scratch.sums, scratch.above, scratch.tops)
    options = pdl.options(with_pdl)
    launch(chunk_logprobs_kernel, (chunks, asks),
        logits, rows, targets, which, *parts,
        VOCAB=vocab, CHUNKS=chunks, CHUNK=scratch.chunk, TOP=_TOP, LIST=listed,
        num_warps=8, **options,
    )  # fmt: skip
    launch(row_logprobs_kernel, (asks,),
        logits, rows, targets, which, *parts, entries,
        VOCAB=vocab, CHUNKS=chunks, CHUNKS_PADDED=triton.next_power_of_2(chunks),
        TOP=_TOP, MOST=MOST, LIST=listed, num_warps=8, **options,
    )  # fmt: skip
