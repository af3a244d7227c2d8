"""Log-probabilities of given tokens, their ranks, and the most likely tokens beside them.

Log-softmax of the model's logits as they are. The vocabulary is read once and not sorted: each
group of neighbours names its largest, and one program a row finds the row's from those
(`candidates`). Reference: `sampling.reference`.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels import pdl
from headrace.kernels.candidates import candidates_of
from headrace.kernels.launch import launch
from headrace.kernels.truncation import KEEP_ALL
from headrace.kernels.weights import COLUMNS, NEG_INF, ordered, unordered

MOST: int = 20  # the most likely tokens of a row that can be asked for
ENTRY: int = 2 + 2 * MOST  # int32 of a result: logprob bits, rank, ids, bits of their logprobs
_TOP: int = 32  # the power of two that holds them
_GROUP: int = 64  # neighbours that name their largest
_HELD: int = 128  # candidates that are sorted
_ROOM: int = 1024  # candidates of a row
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
    GROUP: tl.constexpr,
    LIST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (chunks, asks). Of every chunk, each [asks, chunks]: its largest logit and the sum of
    exp(z - that), float32; how many logits are larger than the target's. With LIST tops [asks,
    chunks, CHUNK // GROUP] int32: keys of the largest of each group of neighbours.
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
    if LIST:
        top = tl.max(tl.reshape(z, (CHUNK // GROUP, GROUP)), 1)
        peak = tl.max(top, 0)
        group = at.to(tl.int64) * (CHUNK // GROUP) + tl.arange(0, CHUNK // GROUP)
        tl.store(tops + group, ordered(top))
    else:
        peak = tl.max(z, 0)
    base = tl.where(peak > NEG_INF, peak, 0.0)
    tl.store(peaks + at, peak)
    tl.store(sums + at, tl.sum(tl.exp(z - base), 0))
    tl.store(above + at, tl.sum((z > own).to(tl.int32), 0))


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
    keys_at,
    ids_at,
    entries,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
    GROUP: tl.constexpr,
    HELD: tl.constexpr,
    ROOM: tl.constexpr,
    TOP: tl.constexpr,
    MOST: tl.constexpr,
    LIST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (asks,). entries [asks, 2 + 2 MOST] int32; tops is written over; keys_at, ids_at
    [asks, ROOM] int32.
    """
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
        long_ask = ask.to(tl.int64)
        keys_at += long_ask * ROOM
        ids_at += long_ask * ROOM
        most = tl.full((), MOST if MOST < VOCAB else VOCAB, tl.int32)
        _, n = candidates_of(
            row, tops + long_ask * GROUPS, keys_at, ids_at,
            tl.full((), KEEP_ALL, tl.int32), ordered(peak), most,
            VOCAB, GROUPS, GROUPS_PADDED, GROUP, HELD, ROOM,
        )  # fmt: skip
        i = tl.arange(0, HELD)
        keys = tl.load(keys_at + i, mask=i < n, other=0).to(tl.int64) << 32
        keys += VOCAB - tl.load(ids_at + i, mask=i < n, other=0)  # among equals the lowest id
        best = tl.topk(tl.where(i < n, keys, _NOTHING), TOP)
        place = tl.arange(0, TOP)
        z = unordered((best >> 32).to(tl.int32)).to(tl.float64) - total
        ids = VOCAB - (best & 0xFFFFFFFF).to(tl.int32)
        tl.store(mine + 2 + place, ids, mask=place < MOST)
        bits = z.to(tl.float32).to(tl.int32, bitcast=True)
        tl.store(mine + 2 + MOST + place, bits, mask=place < MOST)


@dataclasses.dataclass(frozen=True)
class LogprobScratch:
    """Device memory for up to `asks` rows of `vocab` logits; 18 KB an ask at 152064."""

    vocab: int
    chunk: int
    group: int
    peaks: Tensor  # [asks, chunks] float32
    sums: Tensor  # [asks, chunks] float32
    above: Tensor  # [asks, chunks] int32
    tops: Tensor  # [asks, chunks * chunk / group] int32
    keys: Tensor  # [asks, room] int32, as ids
    ids: Tensor

    @classmethod
    def allocate(
        cls,
        asks: int,
        vocab: int,
        device: torch.device,
        *,
        chunk: int = 4096,
        group: int = _GROUP,
        room: int = _ROOM,
    ) -> LogprobScratch:
        """chunk, group: powers of two."""
        chunks, group = triton.cdiv(vocab, chunk), min(group, chunk)
        assert room >= _HELD, f"{_HELD} candidates are sorted, there is room for {room}"

        def empty(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            vocab,
            chunk,
            group,
            empty(asks, chunks, dtype=torch.float32),
            empty(asks, chunks, dtype=torch.float32),
            empty(asks, chunks, dtype=torch.int32),
            empty(asks, chunks * (chunk // group), dtype=torch.int32),
            empty(asks, room, dtype=torch.int32),
            empty(asks, room, dtype=torch.int32),
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
        VOCAB=vocab, CHUNKS=chunks, CHUNK=scratch.chunk, GROUP=scratch.group, LIST=listed,
        num_warps=8, **options,
    )  # fmt: skip
    launch(row_logprobs_kernel, (asks,),
        logits, rows, targets, which, *parts, scratch.keys, scratch.ids, entries,
        VOCAB=vocab, CHUNKS=chunks, CHUNKS_PADDED=triton.next_power_of_2(chunks),
        GROUPS=scratch.tops.shape[1], GROUPS_PADDED=triton.next_power_of_2(scratch.tops.shape[1]),
        GROUP=scratch.group, HELD=_HELD, ROOM=scratch.keys.shape[1],
        TOP=_TOP, MOST=MOST, LIST=listed, num_warps=8, maxnreg=128, **options,
    )  # fmt: skip
