"""Which experts a token goes to, with what weight: the router of a mixture of experts.

Scores of the logits [E] (softmax or sigmoid), perhaps a correction that counts for the choice only,
perhaps a choice of groups first, the best K, perhaps renormalised, times a factor:
Mixtral https://arxiv.org/abs/2401.04088, DeepSeek-V2 https://arxiv.org/abs/2405.04434, V3
https://arxiv.org/abs/2412.19437. Experts that every token goes to (shared ones) come after the K.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels import pdl
from headrace.kernels.launch import launch
from headrace.kernels.shapes import cdiv, check_output, power_of_two

NOWHERE = -1  # the expert of a padding token


@dataclasses.dataclass(frozen=True, slots=True)
class Routing:
    """How a model routes. experts: that are chosen from; top: how many of them a token gets;
    shared: more experts, each token's, with weight 1: ids experts, experts + 1, ...

    groups > 0: experts lie in that many groups of equal size, and only those of the best
    `top_groups` can be chosen; a group's score is its best expert's, or with `group_pairs` the sum
    of its two best. The weights are the scores, divided by their sum where `renormalise`, times
    `scale`.
    """

    experts: int
    top: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    renormalise: bool = True
    scale: float = 1.0
    groups: int = 0
    top_groups: int = 0
    group_pairs: bool = False
    shared: int = 0

    def __post_init__(self) -> None:
        assert 0 < self.top <= self.experts, f"{self.top} of {self.experts} experts"
        if self.groups:
            assert self.experts % self.groups == 0, "groups of equal size"
            assert 0 < self.top_groups <= self.groups, f"{self.top_groups} of {self.groups} groups"
            room = self.top_groups * (self.experts // self.groups)
            assert self.top <= room, f"{self.top} experts from groups that hold {room}"

    @property
    def each(self) -> int:
        """Experts of one token."""
        return self.top + self.shared

    @property
    def total(self) -> int:
        """Experts there are."""
        return self.experts + self.shared


@triton.jit
def _in_best_groups(
    score,  # [BT, EP], -inf beyond E
    expert,  # [EP]
    E: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    PAIRS: tl.constexpr,
    BT: tl.constexpr,
    EP: tl.constexpr,
    GP: tl.constexpr,  # GROUPS, or the next power of two
):
    """`score`, -inf outside the best groups; of groups alike the first."""
    group = expert // (E // GROUPS)
    g = tl.arange(0, GP)
    of_groups = tl.full((BT, GP), -float("inf"), tl.float32)
    for i in tl.static_range(GROUPS):
        own = tl.where((group == i)[None, :], score, -float("inf"))
        best, at = tl.max(own, axis=1, return_indices=True)
        if PAIRS:
            own = tl.where(expert[None, :] == at[:, None], -float("inf"), own)
            best += tl.max(own, axis=1)
        of_groups = tl.where(g[None, :] == i, best[:, None], of_groups)
    kept = tl.full((BT, EP), -float("inf"), tl.float32)
    for _ in tl.static_range(TOP_GROUPS):
        _, at = tl.max(of_groups, axis=1, return_indices=True)
        kept = tl.where(group[None, :] == at[:, None], score, kept)
        of_groups = tl.where(g[None, :] == at[:, None], -float("inf"), of_groups)
    return kept


@triton.jit
def living(rows, spare, token, tokens, PADDED: tl.constexpr):
    """Which of `token` [BT] are tokens of the step, and no padding."""
    live = token < tokens
    if PADDED:
        live = live & (tl.load(rows + token, mask=live, other=spare) != spare)
    return live


@triton.jit
def choose(
    z,  # [BT, EP] logits
    correction,
    live,  # [BT]
    E: tl.constexpr,
    TOP: tl.constexpr,
    SHARED: tl.constexpr,
    SIGMOID: tl.constexpr,
    CORRECTED: tl.constexpr,
    RENORMALISE: tl.constexpr,
    SCALE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    PAIRS: tl.constexpr,
    BT: tl.constexpr,
    EP: tl.constexpr,
    KP: tl.constexpr,
    GP: tl.constexpr,
):
    """-> experts [BT, KP] int32 (-1: none), weights [BT, KP] float32, of which TOP + SHARED count;
    which of a token's choices an expert is [BT, EP] int32 (-1: none), shared ones left out.

    Every id is inside whatever the logits are."""
    expert = tl.arange(0, EP)
    inside = live[:, None] & (expert < E)[None, :]
    # NaN too becomes a number: a token that nobody asks about must go somewhere all the same.
    z = tl.where(inside & (z > -1e30), z, -1e30)
    z = tl.where((expert < E)[None, :], z, -float("inf"))
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-tl.maximum(z, -80.0)))
    else:
        score = tl.exp(z - tl.max(z, axis=1)[:, None])
        score = score / tl.sum(score, axis=1)[:, None]
    wanted = score
    if CORRECTED:
        wanted += tl.load(correction + expert, mask=expert < E, other=0.0).to(tl.float32)[None, :]
    wanted = tl.where((expert < E)[None, :], wanted, -float("inf"))
    if GROUPS > 0:
        wanted = _in_best_groups(wanted, expert, E, GROUPS, TOP_GROUPS, PAIRS, BT, EP, GP)
    k = tl.arange(0, KP)
    ids = tl.zeros((BT, KP), tl.int32) + (E - TOP + k)[None, :]  # of shared ones
    weights = tl.full((BT, KP), 1.0, tl.float32)
    places = tl.full((BT, EP), -1, tl.int32)
    total = tl.zeros((BT,), tl.float32)
    for i in tl.static_range(TOP):
        most, best = tl.max(wanted, axis=1, return_indices=True)
        best = tl.minimum(best, E - 1)
        chosen = expert[None, :] == best[:, None]
        if CORRECTED or GROUPS > 0:
            weight = tl.sum(tl.where(chosen, score, 0.0), axis=1)
        else:
            weight = most  # nothing but the score is wanted
        wanted = tl.where(chosen, -float("inf"), wanted)
        total += weight
        ids = tl.where(k[None, :] == i, best[:, None], ids)
        weights = tl.where(k[None, :] == i, weight[:, None], weights)
        places = tl.where(chosen & live[:, None], i, places)
    factor = tl.full((BT,), SCALE, tl.float32)
    if RENORMALISE:
        factor = factor / (total + 1e-20)
    weights = tl.where((k < TOP)[None, :], weights * factor[:, None], weights)
    counts = live[:, None] & (k < TOP + SHARED)[None, :]
    return tl.where(counts, ids, -1), tl.where(counts, weights, 0.0), places


@triton.jit
def load_logits(logits, there, token, E: tl.constexpr, EP: tl.constexpr):
    """-> [BT, EP] float32, -inf where there is none."""
    expert = tl.arange(0, EP)
    at = token.to(tl.int64)[:, None] * E + expert[None, :]
    inside = there[:, None] & (expert < E)[None, :]
    return tl.load(logits + at, mask=inside, other=-float("inf")).to(tl.float32)


@triton.jit(do_not_specialize=["tokens", "spare"], do_not_specialize_on_alignment=["rows"])
def route_kernel(
    logits,
    correction,
    rows,
    experts,
    weights,
    tokens,
    spare,
    E: tl.constexpr,
    TOP: tl.constexpr,
    SHARED: tl.constexpr,
    SIGMOID: tl.constexpr,
    CORRECTED: tl.constexpr,
    RENORMALISE: tl.constexpr,
    SCALE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    PAIRS: tl.constexpr,
    PADDED: tl.constexpr,
    BT: tl.constexpr,
    EP: tl.constexpr,
    KP: tl.constexpr,
    GP: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (groups of BT tokens,)."""
    pdl.release(PDL)
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    pdl.wait(PDL)
    live = living(rows, spare, token, tokens, PADDED)
    z = load_logits(logits, token < tokens, token, E, EP)  # of padding too, beside `rows`
    ids, factors, _ = choose(
        z, correction, live,
        E, TOP, SHARED, SIGMOID, CORRECTED, RENORMALISE, SCALE,
        GROUPS, TOP_GROUPS, PAIRS, BT, EP, KP, GP,
    )  # fmt: skip
    k = tl.arange(0, KP)
    at = token.to(tl.int64)[:, None] * (TOP + SHARED) + k[None, :]
    mask = (token < tokens)[:, None] & (k < TOP + SHARED)[None, :]
    tl.store(experts + at, ids, mask=mask)
    tl.store(weights + at, factors, mask=mask)


def constants(
    routing: Routing, correction: Tensor | None, rows: Tensor | None
) -> dict[str, object]:
    """Of `choose`, for a model."""
    return {
        "E": routing.experts,
        "TOP": routing.top,
        "SHARED": routing.shared,
        "SIGMOID": routing.scoring == "sigmoid",
        "CORRECTED": correction is not None,
        "RENORMALISE": routing.renormalise,
        "SCALE": routing.scale,
        "GROUPS": routing.groups,
        "TOP_GROUPS": routing.top_groups,
        "PAIRS": routing.group_pairs,
        "PADDED": rows is not None,
        "EP": power_of_two(routing.experts),
        "KP": power_of_two(routing.each),
        "GP": power_of_two(max(1, routing.groups)),
    }


def check_logits(
    logits: Tensor, routing: Routing, correction: Tensor | None, rows: Tensor | None
) -> None:
    """What a router gives, one line a token."""
    check_output(logits, (logits.shape[0], routing.experts))
    if correction is not None:
        check_output(correction, (routing.experts,))
    if rows is not None:
        assert rows.shape == logits.shape[:1], "a row a token"
        assert rows.dtype == torch.int32, "rows are int32"


def route(
    logits: Tensor,
    routing: Routing,
    *,
    correction: Tensor | None = None,
    rows: Tensor | None = None,
    spare: int = -1,
    experts: Tensor,
    weights: Tensor,
    with_pdl: bool = False,
) -> None:
    """logits [T, E] -> experts [T, each] int32, weights [T, each] float32, best first.

    correction [E]: added to the scores for the choice. rows [T] int32: tokens of the row `spare`
    are padding and go NOWHERE, with weight 0.
    """
    tokens = logits.shape[0]
    check_logits(logits, routing, correction, rows)
    check_output(experts, (tokens, routing.each))
    check_output(weights, (tokens, routing.each))
    if tokens == 0:
        return
    group = 1 if tokens <= 1024 else 4
    launch(route_kernel, (cdiv(tokens, group),),
        logits, logits if correction is None else correction, experts if rows is None else rows,
        experts, weights, tokens, spare,
        **constants(routing, correction, rows), BT=group,
        num_warps=group, **pdl.options(with_pdl),
    )  # fmt: skip


def route_reference(
    logits: Tensor,
    routing: Routing,
    correction: Tensor | None = None,
    rows: Tensor | None = None,
    spare: int = -1,
) -> tuple[Tensor, Tensor]:
    """The same in float64: experts [T, each] int64, weights [T, each]."""
    z = logits.double()
    tokens = z.shape[0]
    scores = z.softmax(-1) if routing.scoring == "softmax" else z.sigmoid()
    wanted = scores if correction is None else scores + correction.double()
    if routing.groups:
        grouped = wanted.view(tokens, routing.groups, -1)
        best = grouped.topk(2 if routing.group_pairs else 1, dim=-1).values.sum(-1)
        kept = best.topk(routing.top_groups, dim=-1).indices
        outside = torch.ones_like(best, dtype=torch.bool).scatter_(1, kept, False)
        wanted = grouped.masked_fill(outside[:, :, None], -torch.inf).view(tokens, -1)
    ids = wanted.topk(routing.top, dim=-1).indices
    weights = scores.gather(1, ids)
    if routing.renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    shared = torch.arange(routing.experts, routing.total, device=z.device).expand(tokens, -1)
    ids = torch.cat((ids, shared), -1)
    weights = torch.cat((weights * routing.scale, torch.ones_like(shared, dtype=z.dtype)), -1)
    if rows is not None:
        padding = (rows == spare)[:, None]
        ids, weights = ids.masked_fill(padding, NOWHERE), weights.masked_fill(padding, 0.0)
    return ids, weights
