"""Why each request went where it went: the newest decisions, told when asked."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import msgspec

from headrace.gateway.fleet import Placement
from headrace.gateway.prompt import Prompt
from headrace.gateway.sse import Usage

MIN_MISS_TOKENS = 128  # predicted; below, a miss is noise of the estimate


class _Kept(msgspec.Struct):
    prompt: tuple[str, int, int, str]  # model, prompt and output tokens, why they are not known
    tries: list[tuple[float, Placement]]  # seconds since its arrival
    usage: Usage | None = None
    status: int = 0  # 0 = not ended
    took_s: float = 0.0


class Decisions:
    """Request id -> what was decided. Bounded; a used id is replaced."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    def decided(self, request_id: str, after_s: float, prompt: Prompt, placed: Placement) -> None:
        """A worker was chosen."""
        if not self._most:
            return
        kept = self._kept.get(request_id)
        if kept is None or kept.status:
            kept = self._kept[request_id] = _Kept(_facts(prompt), [])
            self._kept.move_to_end(request_id)
            while len(self._kept) > self._most:
                self._kept.popitem(last=False)
        kept.tries.append((after_s, placed))

    def used(self, request_id: str, usage: Usage) -> None:
        """The worker said what it found and made."""
        if kept := self._kept.get(request_id):
            kept.usage = usage

    def ended(self, request_id: str, status: int, took_s: float) -> None:
        """The request is over."""
        if kept := self._kept.get(request_id):
            kept.status, kept.took_s = status, took_s

    def tell(self, request_id: str) -> dict[str, Any] | None:
        """Everything about one request; None = not kept (any more)."""
        kept = self._kept.get(request_id)
        if kept is None:
            return None
        model, prompt_tokens, output_tokens, untokenised = kept.prompt
        usage = kept.usage
        return {
            "id": request_id,
            "model": model,
            "status": kept.status or None,
            "took_s": kept.took_s if kept.status else None,
            "prompt_tokens_estimated": prompt_tokens,
            "output_tokens_most": output_tokens,
            "untokenised": untokenised or None,
            "attempts": [_attempt(after_s, placed) for after_s, placed in kept.tries],
            "worker_said": None if usage is None else _told(usage),
            "cached_tokens": _compared(kept.tries[-1][1], usage),
        }


def _facts(prompt: Prompt) -> tuple[str, int, int, str]:
    return prompt.model, prompt.prompt_tokens, prompt.output_tokens, prompt.untokenised


def _attempt(after_s: float, placed: Placement) -> dict[str, Any]:
    choice = placed.choice
    columns = (placed.view.workers, choice.scores, placed.cached_tokens, placed.states)
    rows = zip(*columns, strict=True)
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
                "predicted_cached_tokens": cached,
                "index": state,
            }
            for worker, score, cached, state in rows
        ],
    }


def _compared(placed: Placement, usage: Usage | None) -> dict[str, Any]:
    """What was predicted of the last attempt's worker beside what it found."""
    at = placed.choice.index
    predicted, found = placed.cached_tokens[at], usage.cached_tokens if usage is not None else -1
    return {
        "index": placed.states[at],
        "predicted": predicted,
        "confirmed": found if found >= 0 else None,
        "silent_miss": found == 0 and predicted >= MIN_MISS_TOKENS,
    }


def _told(usage: Usage) -> dict[str, int | None]:
    counts = {field: getattr(usage, field) for field in usage.__struct_fields__}
    return {field: count if count >= 0 else None for field, count in counts.items()}
