"""The feed-forward layers of a mixture of experts on a GPU: memory, and which kernel does what."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headrace.kernels.compressed import Compressed, compress
from headrace.kernels.compressed_experts import MOST_TILE_ROWS, compressed_down, compressed_gate_up
from headrace.kernels.dispatch import Dispatch, DispatchScratch, route_and_dispatch
from headrace.kernels.experts import (
    combine,
    default_configs,
    default_tile_rows,
    expert_down,
    expert_gate_up,
)
from headrace.kernels.linear import linear
from headrace.kernels.product import MAX_TOKENS, Config, Workspace
from headrace.kernels.route_few import FEW_TOKENS, route_few
from headrace.kernels.router import Routing
from headrace.models.loads import ExpertLoads
from headrace.models.routed import RoutedMlp
from headrace.models.spec import CLAMP, Experts, ModelSpec

MIXTURE_TOKENS = 8192  # that pass through a mixture at once: more gain nothing
# The router's matrix is small: split, so that more than a few multiprocessors read it.
_ROUTER = Config(block_n=16, block_k=128, warps=4, stages=4, split_k=4)


def routing_of(experts: Experts) -> Routing:
    """As the kernels have it."""
    return Routing(
        experts=experts.count,
        top=experts.chosen,
        # The softmax of the chosen logits is that of all, divided by the sum of the chosen.
        scoring="sigmoid" if experts.scores == "sigmoid" else "softmax",
        renormalise=experts.normed or experts.scores == "chosen",
        scale=experts.scaling,
        groups=experts.groups if experts.groups > 1 else 0,
        top_groups=experts.chosen_groups if experts.groups > 1 else 0,
        group_pairs=experts.group_score == "two",
        shared=experts.shared,
    )


class ExpertCopies(NamedTuple):
    """The matrices of a layer's experts once more, compressed."""

    gate_up: Compressed
    down: Compressed

    @property
    def size_bytes(self) -> int:
        """Of both."""
        return self.gate_up.size_bytes + self.down.size_bytes


def copies_of(mlp: RoutedMlp) -> ExpertCopies | None:
    """None: too many of its numbers would escape (see `kernels.compressed`). Waits for the device.
    Needs: bfloat16 matrices that are `compressible`."""
    total, ffn, hidden = mlp.spec.total, mlp.spec.ffn, mlp.gate_up.shape[1]
    gate_up = compress(mlp.gate_up.view(total, 2 * ffn, hidden), paired=True)
    if gate_up is None:
        return None
    down = compress(mlp.down.view(total, hidden, ffn))
    return None if down is None else ExpertCopies(gate_up, down)


class Mixture:
    """What the routed layers of one model share, for at most `tokens` tokens at once."""

    def __init__(
        self, spec: ModelSpec, tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        assert spec.experts is not None, "a mixture without experts"
        self.routing, tokens = routing_of(spec.experts), min(tokens, MIXTURE_TOKENS)
        self.tokens, items = tokens, tokens * self.routing.each
        self._scratch = DispatchScratch(tokens, self.routing, device)
        self._inner = torch.zeros((items, spec.experts.ffn), dtype=dtype, device=device)
        self._y = torch.zeros((items, spec.hidden), dtype=dtype, device=device)
        self._logits = torch.zeros((tokens, self.routing.experts), device=device)
        assert self._logits.dtype == torch.float32, "torch's default dtype was changed"
        self.loads = ExpertLoads(spec, device)
        self._mirror: Mirror | None = None
        self.copies: dict[int, ExpertCopies] = {}  # by layer: see `runner.expert_copies`

    @property
    def size_bytes(self) -> int:
        """All of it but the copies."""
        held = (self._inner, self._y, self._logits)
        return sum(t.numel() * t.element_size() for t in held) + self._scratch.size_bytes

    def add(
        self,
        layer: int,
        x: Tensor,
        normed: Tensor,
        mlp: RoutedMlp,
        rows: Tensor,
        spare: int,
        workspace: Workspace,
        *,
        with_pdl: bool,
    ) -> Tensor:
        """x [T, hidden] += mlp(normed), T at most `tokens`; rows [T]: those of row `spare` are
        padding, which no expert sees."""
        tokens, routing = x.shape[0], self.routing
        tile_rows = default_tile_rows(tokens, routing)
        plan = self._scratch.of(tokens, tile_rows)
        tally = None if self.loads.tally is None else self.loads.tally[layer]
        common: dict[str, Any] = {
            "correction": mlp.correction, "rows": rows, "spare": spare, "tally": tally,
            "with_pdl": with_pdl,
        }  # fmt: skip
        if tokens <= FEW_TOKENS:
            weight, bias = mlp.router.weight, mlp.router.bias
            route_few(normed, weight, routing, plan, bias=bias, workspace=workspace, **common)
        else:
            logits = self._route(normed, mlp, workspace, with_pdl=with_pdl)
            route_and_dispatch(logits, routing, plan, **common)
        y = self._say(layer, normed, mlp, plan, with_pdl=with_pdl)
        return combine(y, plan, residual=x, out=x, with_pdl=with_pdl)

    def _say(
        self, layer: int, x: Tensor, mlp: RoutedMlp, plan: Dispatch, *, with_pdl: bool
    ) -> Tensor:
        """x [T, hidden] -> what each token's experts say, [T * each, hidden]."""
        total, items, hidden = self.routing.total, x.shape[0] * plan.each, x.shape[1]
        ffn, inner, y = mlp.spec.ffn, self._inner[:items], self._y[:items]
        up: dict[str, Any] = {
            "bias": None if mlp.gate_up_bias is None else mlp.gate_up_bias.view(total, 2 * ffn),
            "limit": CLAMP if mlp.act == "clamped" else 0.0, "out": inner, "with_pdl": with_pdl,
        }  # fmt: skip
        down: dict[str, Any] = {
            "bias": None if mlp.down_bias is None else mlp.down_bias.view(total, hidden),
            "out": y, "with_pdl": with_pdl,
        }  # fmt: skip
        copies = self.copies.get(layer)
        if copies is not None and plan.tokens > 1 and plan.tile_rows <= MOST_TILE_ROWS:
            compressed_gate_up(x, copies.gate_up, plan, **up)
            return compressed_down(inner, copies.down, plan, **down)
        of_up, of_down = default_configs(plan.tile_rows)
        gate_up_weight = mlp.gate_up.view(total, 2 * ffn, hidden)
        expert_gate_up(x, gate_up_weight, plan, config=of_up, **up)
        return expert_down(inner, mlp.down.view(total, hidden, ffn), plan, config=of_down, **down)

    def _route(
        self, normed: Tensor, mlp: RoutedMlp, workspace: Workspace, *, with_pdl: bool
    ) -> Tensor:
        """-> logits [T, experts] float32."""
        router, logits = mlp.router, self._logits[: normed.shape[0]]
        if normed.shape[0] <= MAX_TOKENS:
            return linear(
                normed, router.weight, bias=router.bias, out=logits, config=_ROUTER,
                workspace=workspace, with_pdl=with_pdl,
            )  # fmt: skip
        if normed.dtype == torch.float32 or not normed.is_cuda:
            torch.mm(normed.float(), router.weight.float().t(), out=logits)
        else:
            torch.mm(normed, router.weight.t(), out_dtype=torch.float32, out=logits)
        if router.bias is not None:
            logits += router.bias.float()
        return logits

    def counters(self) -> Mapping[str, int]:
        """See `loads.ExpertLoads`, as they were a call or two ago: nobody waits for the device."""
        if self.loads.tally is None or not self.loads.tally.is_cuda:
            return self.loads.counters()
        if self._mirror is None:
            pinned = torch.zeros_like(self.loads.tally, device="cpu").pin_memory()
            shown = self.loads.of(pinned.clone())
            self._mirror = Mirror(pinned, shown, None)
        return self._mirror.counters(self.loads.tally)


@dataclasses.dataclass
class Mirror:
    """Counts on their way to the host: a copy is shown once it is there, then the next begins."""

    pinned: Tensor
    shown: ExpertLoads
    copied: torch.cuda.Event | None

    def counters(self, tally: Tensor) -> Mapping[str, int]:
        """The last that arrived."""
        assert self.shown.tally is not None, "made of a tally"
        if self.copied is None or self.copied.query():
            self.shown.tally.copy_(self.pinned)
            self.pinned.copy_(tally, non_blocking=True)
            self.copied = torch.cuda.Event()
            self.copied.record()
        return self.shown.counters()
