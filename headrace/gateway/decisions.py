"""Why each request went where it went: the newest decisions, told when asked."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Any

import msgspec

from headrace.gateway.fleet import Placement
from headrace.gateway.prompt import Prompt
from headrace.gateway.sse import Usage
from headrace.gateway.terms import Decided, terms_of
from headrace.gateway.view import Knobs

MIN_MISS_TOKENS = 128  # predicted; below, a miss is noise of the estimate

MOST_CANDIDATES = 2**18  # of all decisions: about 64 MiB, however many workers there are


class _Kept(msgspec.Struct):
    prompt: tuple[str, int, int, str]  # model, prompt and output tokens, why they are not known
    tenant: str
    at_s: float  # wall clock, of the first attempt
    tries: list[tuple[float, Placement]]  # seconds since its arrival
    usage: Usage | None = None
    status: int = 0  # 0 = not ended
    took_s: float = 0.0
    silent: bool = False  # a cached prefix was predicted, none was found


class Decisions:
    """Request id -> what was decided. Bounded; a used id is replaced."""

    def __init__(self, most: int, policy: str, knobs: Knobs) -> None:
        """policy and knobs: what scores were made by."""
        self._most, self._policy, self._knobs = most, policy, knobs
        self._all: OrderedDict[str, _Kept] = OrderedDict()
        self._candidates = 0  # of `_all`
        self._new: list[tuple[str, float, str, Prompt, Placement, float]] = []  # not in `_all` yet

    @property
    def _kept(self) -> OrderedDict[str, _Kept]:
        """All of them. Those that are new are filed now: of many requests that come together, none
        waits until the ones before it are.
        """
        if self._new:
            new, self._new = self._new, []
            for decision in new:
                self._file(*decision)
        return self._all

    def decided(
        self, request_id: str, after_s: float, tenant: str, prompt: Prompt, placed: Placement
    ) -> None:
        """A worker was chosen."""
        if self._most:
            self._new.append((request_id, after_s, tenant, prompt, placed, time.time()))

    def _file(
        self,
        request_id: str,
        after_s: float,
        tenant: str,
        prompt: Prompt,
        placed: Placement,
        at_s: float,
    ) -> None:
        kept = self._all.get(request_id)
        if kept is None or kept.status:
            if kept is not None:
                self._forget(kept)
            kept = self._all[request_id] = _Kept(_facts(prompt), tenant, at_s, [])
            self._all.move_to_end(request_id)
        kept.tries.append((after_s, placed))
        self._candidates += len(placed.view.workers)
        while len(self._all) > self._most or (
            self._candidates > MOST_CANDIDATES and len(self._all) > 1
        ):
            self._forget(self._all.popitem(last=False)[1])

    def _forget(self, kept: _Kept) -> None:
        self._candidates -= sum(len(placed.view.workers) for _, placed in kept.tries)

    def used(self, request_id: str, usage: Usage) -> None:
        """The worker said what it found and made."""
        if kept := self._kept.get(request_id):
            kept.usage = usage
            kept.silent = _is_silent(kept.tries[-1][1], usage)

    def ended(self, request_id: str, status: int, took_s: float) -> None:
        """The request is over."""
        if kept := self._kept.get(request_id):
            kept.status, kept.took_s = status, took_s

    def newest(self, limit: int, *, silent: bool = False) -> list[dict[str, Any]]:
        """A line about each of the newest, newest first. silent: misses that were silent alone."""
        rows: list[dict[str, Any]] = []
        for request_id, kept in reversed(self._kept.items()):
            if len(rows) >= limit:
                break
            if silent and not kept.silent:
                continue
            placed = kept.tries[-1][1]
            rows.append(
                {
                    **_about(request_id, kept),
                    "worker": placed.worker.name,
                    "reason": placed.choice.reason,
                    "attempts": len(kept.tries),
                    "cached_tokens": _compared(placed, kept),
                }
            )
        return rows

    def tell(self, request_id: str) -> dict[str, Any] | None:
        """Everything about one request; None = not kept (any more)."""
        kept = self._kept.get(request_id)
        if kept is None:
            return None
        usage, sizes = kept.usage, kept.prompt
        return {
            **_about(request_id, kept),
            "output_tokens_most": sizes[2],
            "untokenised": sizes[3] or None,
            "policy": self._policy,
            "attempts": [
                self._attempt(after_s, sizes[1], placed) for after_s, placed in kept.tries
            ],
            "worker_said": None if usage is None else _told(usage),
            "cached_tokens": _compared(kept.tries[-1][1], kept),
        }

    def _attempt(self, after_s: float, prompt_tokens: int, placed: Placement) -> dict[str, Any]:
        choice, cached = placed.choice, placed.cached_tokens
        made = Decided(placed.view, choice, prompt_tokens, cached)
        columns = (placed.view.workers, choice.scores, cached, placed.states)
        return {
            "after_s": round(after_s, 6),
            "worker": placed.worker.name,
            "reason": choice.reason,
            "cold": choice.cold,
            "replicates": choice.replicates,
            "old_names": [
                {"name": name, "why": why, "age_s": round(age_s, 3)}
                for name, why, age_s in placed.old_names
            ],
            "candidates": [
                {
                    **msgspec.to_builtins(worker),
                    "score": score if abs(score) != float("inf") else None,
                    "terms": [
                        {**msgspec.to_builtins(term), "adds": term.adds}
                        for term in terms_of(self._policy, made, at, self._knobs)
                    ],
                    "predicted_cached_tokens": held,
                    "index": state,
                }
                for at, (worker, score, held, state) in enumerate(zip(*columns, strict=True))
            ],
            "left_out": [{"worker": name, "why": why} for name, why in placed.left_out],
        }


def _facts(prompt: Prompt) -> tuple[str, int, int, str]:
    return prompt.model, prompt.prompt_tokens, prompt.output_tokens, prompt.untokenised


def _about(request_id: str, kept: _Kept) -> dict[str, Any]:
    model, prompt_tokens, *_ = kept.prompt
    return {
        "id": request_id,
        "at_s": kept.at_s,
        "tenant": kept.tenant,
        "model": model,
        "status": kept.status or None,
        "took_s": kept.took_s if kept.status else None,
        "prompt_tokens_estimated": prompt_tokens,
    }


def _is_silent(placed: Placement, usage: Usage) -> bool:
    return not usage.cached_tokens and placed.cached_tokens[placed.choice.index] >= MIN_MISS_TOKENS


def _compared(placed: Placement, kept: _Kept) -> dict[str, Any]:
    """What was predicted of the last attempt's worker beside what it found."""
    at, usage = placed.choice.index, kept.usage
    found = usage.cached_tokens if usage is not None else -1
    return {
        "index": placed.states[at],
        "predicted": placed.cached_tokens[at],
        "confirmed": found if found >= 0 else None,
        "silent_miss": kept.silent,
    }


def _told(usage: Usage) -> dict[str, int | None]:
    counts = {field: getattr(usage, field) for field in usage.__struct_fields__}
    return {field: count if count >= 0 else None for field, count in counts.items()}
