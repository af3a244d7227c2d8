"""Logits to tokens on the device, as `sampling.pipeline` says (it is this file's reference):
temperature, top_k, top_p, min_p, then one inverse CDF a row with a counter-based uniform number.

Nothing here waits for the device, sorts a vocabulary or depends on a value on the host, so a call
can be captured in a CUDA graph. Launches: 2 for "greedy" and "plain", 3 for "few", 7 for "full", 16
for "typical".

What is promised: a row's token depends on that row alone, bit by bit: not on the number of draws,
nor on the kind of the call. It equals the pipeline's unless u, or the edge of top-p or min-p,
lies within 1e-6 (of the row's total) of a boundary between two tokens: weights are float32
exponentials, added up exactly in fixed point (`weights`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
from torch import Tensor

from headrace.kernels import pdl
from headrace.kernels.chunk_peaks import chunk_peaks_kernel
from headrace.kernels.draw import draw_kernel
from headrace.kernels.draw_params import FEW, KINDS, WIDTH, Kind
from headrace.kernels.few import few_kernel
from headrace.kernels.launch import launch
from headrace.kernels.settle import centre_kernel, settle_kernel
from headrace.kernels.truncation import bracket_kernel, edge_kernel, gather_kernel, kept_kernel
from headrace.kernels.typical import (
    PIVOTS,
    bounds_kernel,
    collect_kernel,
    narrow_kernel,
    near_kernel,
    typical_kernel,
)

CHUNK = 4096  # logits a program: 38 programs for one row of 152064
SAMPLE = 1024  # logits that say where an edge should lie
CANDIDATES = 32768  # a flat row's bracket holds 11 % of its vocabulary
GROUP = 64  # neighbours of which rows of few tokens know the largest
HELD = 1024  # tokens that a program of theirs holds at once
_LOW_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}


@dataclasses.dataclass(frozen=True)
class Scratch:
    """Device memory that a call works in, for up to `draws` rows of `vocab` logits.

    One for each stream; results depend on `chunk` and `vocab`, never on `draws`.
    """

    vocab: int
    draws: int
    chunk: int
    sample: int
    peaks: Tensor  # [draws, chunks] float32
    firsts: Tensor  # [draws, chunks] int32
    masses: Tensor  # [draws, chunks] int64
    equals: Tensor  # [draws, chunks] int32
    brackets: Tensor  # [draws, 2] int32
    counts: Tensor  # [draws, 2] int32
    above_mass: Tensor  # [draws] int64
    edges: Tensor  # [draws] int32
    rooms: Tensor  # [draws] int32
    candidates: Tensor  # [draws, room] int32
    kept_mass: Tensor  # [draws, chunks] int64; from here on for "typical"
    moments: Tensor  # [3, draws, chunks] float64
    spans: Tensor  # [draws, 3] int32
    centres: Tensor  # [draws, 2] float32
    pivots: Tensor  # [draws, 8] float32
    bounds: Tensor  # [draws, 2] float32
    near: Tensor  # [draws, chunks, 8] float32
    below_mass: Tensor  # [draws, chunks] int64
    limits: Tensor  # [draws] int32
    lefts: Tensor  # [draws] int64
    on_mass: Tensor  # [draws, chunks] int64
    tops: Tensor  # [draws, chunks * chunk / group] int32; from here on for "few"
    few_moments: Tensor  # [3, draws, chunks] float64
    few_keys: Tensor  # [draws, few_room] int32
    few_ids: Tensor  # [draws, few_room] int32
    done: Tensor  # [draws] int32
    group: int
    held: int

    @classmethod
    def allocate(
        cls,
        draws: int,
        vocab: int,
        device: torch.device,
        *,
        chunk: int = CHUNK,
        sample: int = SAMPLE,
        candidates: int = CANDIDATES,
        group: int = GROUP,
        held: int = HELD,
        few_room: int = 4 * HELD,
    ) -> Scratch:
        """Sizes are powers of two. 0.18 MB a draw, most of it candidates."""
        assert FEW <= held <= few_room, f"{FEW} tokens can stay, {held} are held of {few_room}"
        assert vocab < 2**22, "2^22 weights of 2^40 are what an int64 holds"
        chunks, group = triton.cdiv(vocab, chunk), min(group, chunk)

        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            vocab,
            draws,
            chunk,
            sample,
            empty(draws, chunks, dtype=torch.float32),
            empty(draws, chunks),
            empty(draws, chunks, dtype=torch.int64),
            empty(draws, chunks),
            empty(draws, 2),
            empty(draws, 2),
            empty(draws, dtype=torch.int64),
            empty(draws),
            empty(draws),
            empty(draws, min(candidates, triton.next_power_of_2(vocab))),
            empty(draws, chunks, dtype=torch.int64),
            empty(3, draws, chunks, dtype=torch.float64),
            empty(draws, 3),
            empty(draws, 2, dtype=torch.float32),
            empty(draws, PIVOTS.value, dtype=torch.float32),
            empty(draws, 2, dtype=torch.float32),
            empty(draws, chunks, PIVOTS.value, dtype=torch.float32),
            empty(draws, chunks, dtype=torch.int64),
            empty(draws),
            empty(draws, dtype=torch.int64),
            empty(draws, chunks, dtype=torch.int64),
            empty(draws, chunks * (chunk // group)),
            empty(3, draws, chunks, dtype=torch.float64),
            empty(draws, few_room),
            empty(draws, few_room),
            empty(draws),
            group,
            held,
        )


def sample(
    logits: Tensor,
    sources: Tensor,
    params: Tensor,
    positions: Tensor,
    draw_tokens: Tensor,
    draw_rows: Tensor,
    last: Tensor,
    tokens: Tensor,
    *,
    kind: Kind,
    scratch: Scratch,
    edits: Tensor | None = None,
    with_pdl: bool = False,
) -> None:
    """One token a draw, written to tokens[j] and to last[draw_rows[j]].

    logits [R, vocab] bfloat16, float16 or float32, contiguous. int32: sources [D], params [rows, 8]
    (see `draw_params.pack`), positions [T], draw_tokens [D], draw_rows [D], last [rows], tokens
    [D]. Draw j reads row sources[j] of the logits, the parameters of row draw_rows[j] and the
    position positions[draw_tokens[j]] + 1.
    A row with NaN or +inf: tokens[j] = -1; one without a finite logit: -2. Then last = 0.
    kind: "greedy" if every row is, "plain" if no row truncates, "few" if those that do have a top_k
    of 1 to FEW, else "full", or "typical" if others use typical_p; a wider kind gives the same
    tokens. Rows of edited logits pass `edits` [rows, EDIT_WIDTH] for typical_p, and for top_n_sigma
    of rows of few tokens. "typical" needs it and float32 logits, a row for each draw, and writes to
    them.
    """
    draws, vocab = tokens.shape[0], logits.shape[1]
    assert kind in KINDS, f"kind {kind!r}"
    assert draws == sources.shape[0] == draw_rows.shape[0] == draw_tokens.shape[0], (
        "an entry a draw"
    )
    _check(logits, params, draws, scratch)
    if not draws:
        return
    chunks = scratch.peaks.shape[1]
    common: dict[str, Any] = {"VOCAB": vocab, "CHUNKS": chunks, **pdl.options(with_pdl)}
    weigh, typical = kind != "greedy", kind == "typical"
    truncate = typical or kind == "full"
    listed = truncate or kind == "few"
    changes = params if edits is None else edits
    few: dict[str, Any] = {"GROUP": scratch.group, "EDITED": edits is not None and listed, **common}
    launch(chunk_peaks_kernel, (chunks, draws),
        logits, sources, params, draw_rows, scratch.peaks, scratch.firsts, scratch.masses,
        scratch.tops, changes, scratch.few_moments,
        CHUNK=scratch.chunk, WEIGH=weigh, LIST=listed, num_warps=8, **few,
    )  # fmt: skip
    if listed:
        groups = scratch.tops.shape[1]
        launch(few_kernel, (draws,),
            logits, sources, params, changes, positions, draw_tokens, draw_rows, last, tokens,
            scratch.peaks, scratch.masses, scratch.tops, scratch.few_moments,
            scratch.few_keys, scratch.few_ids, scratch.done,
            CHUNKS_PADDED=triton.next_power_of_2(chunks),
            GROUPS=groups, GROUPS_PADDED=triton.next_power_of_2(groups),
            HELD=scratch.held, ROOM=scratch.few_keys.shape[1], num_warps=8, maxnreg=128, **few,
        )  # fmt: skip
    if truncate:
        _truncate((logits, sources, params, draw_rows, scratch.peaks), draws, scratch, common)
    if typical:
        assert edits is not None, "typical_p stands in `edits`"
        inputs = (logits, params, edits, draw_rows, scratch.peaks)
        _keep_typical(inputs, draws, scratch, common)
    launch(draw_kernel, (draws,),
        logits, sources, params, positions, draw_tokens, draw_rows, last, tokens,
        scratch.peaks, scratch.firsts, scratch.masses,
        scratch.equals, scratch.edges, scratch.rooms,
        changes, scratch.on_mass, scratch.centres, scratch.limits, scratch.lefts, scratch.done,
        CHUNKS_PADDED=triton.next_power_of_2(chunks), CHUNK=scratch.chunk,
        WEIGH=weigh, TRUNCATE=truncate, TYPICAL=typical,
        num_warps=8 if weigh else 1, **common,
    )  # fmt: skip


def _check(logits: Tensor, params: Tensor, draws: int, scratch: Scratch) -> None:
    vocab = logits.shape[1]
    assert vocab == scratch.vocab, f"scratch is for {scratch.vocab} logits a row, not {vocab}"
    assert draws <= scratch.draws, f"scratch is for {scratch.draws} draws, not {draws}"
    assert logits.is_contiguous(), "logits must be contiguous"
    assert params.shape[1] == WIDTH, "params is [rows, 8]"
    assert params.is_contiguous(), "params must be contiguous"


def _truncate(inputs: tuple[Tensor, ...], draws: int, at: Scratch, common: dict[str, Any]) -> None:
    """Edges, rooms, equals, and the weights of the tokens that stay, into the scratch."""
    chunks = at.peaks.shape[1]
    padded = triton.next_power_of_2(chunks)
    low = _LOW_BITS[inputs[0].dtype]
    room = at.candidates.shape[1]
    bracket = (at.brackets, at.counts, at.above_mass)
    launch(bracket_kernel, (draws,),
        *inputs, at.masses, at.done, *bracket,
        CHUNKS_PADDED=padded, SAMPLE=at.sample, LOW=low, num_warps=8, **common,
    )  # fmt: skip
    launch(gather_kernel, (chunks, draws),
        *inputs, *bracket, at.candidates,
        CHUNKS_PADDED=padded, CHUNK=at.chunk, ROOM=room, LOW=low, num_warps=8, **common,
    )  # fmt: skip
    launch(edge_kernel, (draws,),
        *inputs, at.masses, at.done, *bracket, at.candidates, at.edges, at.rooms,
        CHUNKS_PADDED=padded, ROOM=room, LOW=low, num_warps=16, **common,
    )  # fmt: skip
    launch(kept_kernel, (chunks, draws),
        *inputs, at.masses, at.equals, at.edges, at.counts,
        CHUNK=at.chunk, num_warps=8, **common,
    )  # fmt: skip


def _keep_typical(
    inputs: tuple[Tensor, ...], draws: int, at: Scratch, common: dict[str, Any]
) -> None:
    """Of what `_truncate` left, which tokens are typical."""
    assert inputs[0].dtype == torch.float32, "typical_p needs float32 logits"
    assert inputs[0].shape[0] >= draws, "typical_p needs a row of logits for each draw"
    chunks = at.peaks.shape[1]
    room = at.candidates.shape[1]
    padded = triton.next_power_of_2(chunks)
    apart = {key: value for key, value in common.items() if key not in ("VOCAB", "CHUNKS")}
    common = {"CHUNKS_PADDED": padded, **common}
    spread: dict[str, Any] = {"CHUNK": at.chunk, "num_warps": 16, **common}
    launch(settle_kernel, (chunks, draws),
        *inputs, at.equals, at.edges, at.rooms, at.counts, at.candidates,
        at.kept_mass, at.moments, at.spans, ROOM=room, maxnreg=64, **spread,
    )  # fmt: skip
    launch(centre_kernel, (draws,),
        *inputs[1:], at.moments, at.centres, at.pivots, at.bounds,
        CHUNKS=chunks, CHUNKS_PADDED=padded, num_warps=1, **apart,
    )  # fmt: skip
    known = (at.edges, at.counts, at.centres)
    for _ in range(2):
        launch(narrow_kernel, (chunks, draws),
            *inputs, *known, at.pivots, at.near, ROOM=room, **spread,
        )  # fmt: skip
        launch(bounds_kernel, (draws,),
            *inputs[1:], at.edges, at.counts, at.kept_mass, at.pivots, at.near, at.bounds,
            CHUNKS=chunks, CHUNKS_PADDED=padded, ROOM=room, num_warps=2, **apart,
        )  # fmt: skip
    launch(collect_kernel, (chunks, draws),
        *inputs, *known, at.bounds, at.candidates, at.spans, at.below_mass,
        ROOM=room, maxnreg=64, **spread,
    )  # fmt: skip
    launch(typical_kernel, (draws,),
        *inputs, at.edges, at.counts, at.kept_mass, at.centres,
        at.candidates.view(torch.float32), at.spans, at.below_mass,
        at.limits, at.lefts, ROOM=room, num_warps=16, **common,
    )  # fmt: skip
    launch(near_kernel, (chunks, draws),
        *inputs, at.equals, at.edges, at.rooms, at.centres, at.limits, at.masses, at.on_mass,
        **spread,
    )  # fmt: skip
