"""Why each request went where it went: the newest decisions, told when asked.

Every request has a record of its own. Clients may give several the same id, so a record also has a
key, `ID~...`, which no other has in any process of the gateway; an id stands for the newest of its
requests.
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

import msgspec

from headrace.gateway.fleet import Placement
from headrace.gateway.prompt import Prompt
from headrace.gateway.sse import Usage
from headrace.gateway.terms import Decided, terms_of
from headrace.gateway.view import Knobs

MIN_MISS_TOKENS = 128  # predicted; below, a miss is noise of the estimate

MOST_SAME = 50  # of an id, named beside the newest
MOST_CANDIDATES = 2**18  # of all decisions: about 64 MiB, however many workers there are


class _Placed(NamedTuple):
    """One attempt, as `Decisions.decided` hears of it."""

    number: int
    request_id: str
    after_s: float
    tenant: str
    prompt: Prompt
    placement: Placement
    at_s: float  # wall clock


class _Kept(msgspec.Struct):
    number: int  # of the request, in this process
    id: str
    prompt: tuple[str, int, int, str]  # model, prompt and output tokens, why they are not known
    tenant: str
    at_s: float  # wall clock, of the first attempt
    tries: list[tuple[float, Placement]]  # seconds since its arrival
    usage: Usage | None = None
    status: int = 0  # 0 = not ended
    took_s: float = 0.0
    silent: bool = False  # a cached prefix was predicted, none was found


class Decisions:
    """Number of a request in this process -> what was decided. Bounded."""

    def __init__(self, most: int, policy: str, knobs: Knobs) -> None:
        """policy and knobs: what scores were made by."""
        self._most, self._policy, self._knobs = most, policy, knobs
        self._process = secrets.token_hex(4)  # in keys
        self._all: OrderedDict[int, _Kept] = OrderedDict()
        self._by_id: dict[str, list[_Kept]] = {}  # of `_all`, the newest last
        self._candidates = 0  # of `_all`
        self._new: list[_Placed] = []  # not filed yet

    @property
    def _kept(self) -> OrderedDict[int, _Kept]:
        """All of them. Those that are new are filed now: of many requests that come together, none
        waits until the ones before it are.
        """
        if self._new:
            new, self._new = self._new, []
            for one in new:
                self._file(one)
        return self._all

    def decided(
        self,
        number: int,
        request_id: str,
        after_s: float,
        tenant: str,
        prompt: Prompt,
        placed: Placement,
    ) -> None:
        """A worker was chosen, so many seconds after the request came."""
        if self._most:
            made = number, request_id, after_s, tenant, prompt, placed, time.time()
            self._new.append(_Placed(*made))

    def _file(self, one: _Placed) -> None:
        kept = self._all.get(one.number)
        if kept is None:
            kept = _Kept(one.number, one.request_id, _facts(one.prompt), one.tenant, one.at_s, [])
            self._all[one.number] = kept
            self._by_id.setdefault(one.request_id, []).append(kept)
        kept.tries.append((one.after_s, one.placement))
        self._candidates += len(one.placement.view.workers)
        while len(self._all) > self._most or (
            self._candidates > MOST_CANDIDATES and len(self._all) > 1
        ):
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        kept = self._all.popitem(last=False)[1]
        self._candidates -= sum(len(placed.view.workers) for _, placed in kept.tries)
        same = self._by_id[kept.id]
        same.pop(0)  # the oldest of all is the oldest of its id
        if not same:
            del self._by_id[kept.id]

    def used(self, number: int, usage: Usage) -> None:
        """The worker said what it found and made."""
        if kept := self._kept.get(number):
            kept.usage = usage
            kept.silent = _is_silent(kept.tries[-1][1], usage)

    def ended(self, number: int, status: int, took_s: float) -> None:
        """The request is over."""
        if kept := self._kept.get(number):
            kept.status, kept.took_s = status, took_s

    def newest(self, limit: int, *, silent: bool = False) -> list[dict[str, Any]]:
        """A line about each of the newest, newest first. silent: misses that were silent alone."""
        rows: list[dict[str, Any]] = []
        for kept in reversed(self._kept.values()):
            if len(rows) >= limit:
                break
            if silent and not kept.silent:
                continue
            placed = kept.tries[-1][1]
            rows.append(
                {
                    **self._about(kept),
                    "worker": placed.worker.name,
                    "reason": placed.choice.reason,
                    "attempts": len(kept.tries),
                    "cached_tokens": _compared(placed, kept),
                }
            )
        return rows

    def tell(self, name: str) -> dict[str, Any] | None:
        """Everything about one request, by its key, or about the newest with that id; and which
        others have the id. None = not kept (any more)."""
        if (kept := self._find(name)) is None:
            return None
        usage, sizes = kept.usage, kept.prompt
        same = islice(reversed(self._by_id[kept.id]), MOST_SAME + 1)
        others = [one for one in same if one is not kept]
        return {
            **self._about(kept),
            "output_tokens_most": sizes[2],
            "untokenised": sizes[3] or None,
            "policy": self._policy,
            "attempts": [
                self._attempt(after_s, sizes[1], placed) for after_s, placed in kept.tries
            ],
            "worker_said": None if usage is None else _told(usage),
            "cached_tokens": _compared(kept.tries[-1][1], kept),
            "same_id": [{"key": self._key(o), "at_s": o.at_s} for o in others[:MOST_SAME]],
        }

    def _find(self, name: str) -> _Kept | None:
        """By key or id."""
        every = self._kept
        _, tilde, rest = name.partition("~")
        if not tilde:
            return self._by_id[name][-1] if name in self._by_id else None
        try:
            kept = every.get(int(rest.removeprefix(self._process), 16))
        except ValueError:
            return None
        return kept if kept is not None and self._key(kept) == name else None

    def _key(self, kept: _Kept) -> str:
        return f"{kept.id}~{self._process}{kept.number:x}"

    def _about(self, kept: _Kept) -> dict[str, Any]:
        model, prompt_tokens, *_ = kept.prompt
        return {
            "id": kept.id,
            "key": self._key(kept),
            "at_s": kept.at_s,
            "tenant": kept.tenant,
            "model": model,
            "status": kept.status or None,
            "took_s": kept.took_s if kept.status else None,
            "prompt_tokens_estimated": prompt_tokens,
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


def one_of(said: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What several processes tell of one id or key, as one: the newest, and the others' keys."""
    ordered = sorted(said, key=lambda one: -one["at_s"])
    same = [{"key": one["key"], "at_s": one["at_s"]} for one in ordered[1:]]
    same += [other for one in ordered for other in one["same_id"]]
    same.sort(key=lambda other: -other["at_s"])
    return {**ordered[0], "same_id": same[:MOST_SAME]}
