"""Prefix lint: prompts of a tenant that could share more of their beginning than they do.

A few of the newest prompts of each kind that a tenant sends are kept. A prompt whose answer has
come is compared with the one that it shares the longest beginning with: what both have behind the
place where they part would have been found in a cache, had what differs stood behind it. What the
engine did find is no loss, whatever the comparison says.

It is bounded: bytes kept, bytes looked at of a prompt, and time. A tenant's request earns EARN_S of
looking, a look is paid with what it took; so its share of a request's cost is fixed, and how many
prompts are looked at is what varies.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from headrace.gateway.divergence import (
    LONG_BYTES,
    Cut,
    Divergence,
    Kind,
    common,
    cut,
    diverge,
    ends_of,
    place_of,
)
from headrace.gateway.prompt import PARTS, Prompt
from headrace.gateway.sse import Usage

EARN_S = 1.5e-6  # of a request
CREDIT_S = 0.01  # what a tenant may spend before its requests have earned it
LOOK_BYTES = 32 * 1024  # of a prompt's beginning
MIN_TEXT_BYTES = 1024  # a shorter prompt has nothing to lose
MIN_LOST_BYTES, MIN_LOST_SHARE = 512, 0.1  # of a prompt; less is chance
MIN_LOST_TOKENS = 64  # that the engine did not find either
MAX_FAMILIES = 8  # of a tenant: prompts that have something in common
MAX_SAMPLES = 4  # of a family, the newest; the longest shared beginning counts
MAX_FINDINGS = 16  # of a tenant
PROBES, MIN_HITS, MIN_PROBE_BYTES = 16, 2, 24  # segments by which a prompt finds its family


class Finding(msgspec.Struct):
    """A place where prompts of one tenant part though they go on alike, summed up."""

    model: str
    place: str  # index 0 as it is, others as [*]
    kind: Kind
    seen: int = 0
    lost_tokens: int = 0
    first_s: float = 0.0  # wall clock
    last_s: float = 0.0
    # Of the newest one:
    path: str = ""
    characters: int = 0  # before the place, in the string that the path names
    shared_tokens: int = 0  # before it, in the whole prompt
    request: str = ""
    excerpt: str = ""
    other: str = ""


class _Family:
    __slots__ = ("model", "samples", "tenant")

    def __init__(self, tenant: _Tenant, model: str) -> None:
        self.tenant, self.model = tenant, model
        self.samples: list[Cut] = []

    @property
    def memory_bytes(self) -> int:
        return sum(sample.memory_bytes for sample in self.samples)


class _Tenant:
    """What is known of one tenant. Tokens are of prompts that were looked at."""

    def __init__(self) -> None:
        self.credit_s = CREDIT_S
        self.families: list[_Family] = []
        self.findings: dict[tuple[str, str, str], Finding] = {}
        self.requests = self.looked = self.prompt_tokens = self.lost_tokens = 0


class Lint:
    """`see` for every answered request; `look` where it says so."""

    def __init__(
        self,
        max_bytes: int,
        *,
        excerpts: bool,
        found: Callable[[str, int, str, int], None],
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """found: is told of each prompt that was looked at: tenant, its tokens, kind ("" = nothing
        is lost), tokens lost. clock: of the time that looking takes."""
        self._max_bytes, self.excerpts, self._found, self._clock = max_bytes, excerpts, found, clock
        self._tenants: dict[str, _Tenant] = {}
        self._families: OrderedDict[_Family, None] = OrderedDict()  # the least used first
        self.used_bytes = 0

    def see(self, name: str, prompt: Prompt) -> bool:
        """A request of a tenant was answered. Whether its prompt should be looked at."""
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant()
        tenant.requests += 1
        credit_s = tenant.credit_s + EARN_S
        tenant.credit_s = credit_s if credit_s < CREDIT_S else CREDIT_S
        return credit_s > 0.0 and (prompt.text_bytes or _ids_bytes(prompt)) >= MIN_TEXT_BYTES

    def look(self, name: str, request_id: str, prompt: Prompt, usage: Usage) -> None:
        """Compare a prompt with those before it."""
        began_s = self._clock()
        tenant = self._tenants[name]
        text = b"".join(prompt.parts)
        new = cut(text[:LOOK_BYTES])
        tokens = usage.prompt_tokens if usage.prompt_tokens > 0 else prompt.prompt_tokens
        tenant.looked += 1
        tenant.prompt_tokens += tokens
        family = self._family(tenant, prompt.model, new)
        shared, nearest = _nearest(new, family.samples)
        kind, lost_tokens = "", 0
        if nearest is not None and (parting := diverge(new, nearest, shared)) is not None:
            tokens_per_byte = tokens / len(text)
            lost_tokens = _lost_tokens(parting, new, tokens_per_byte, tokens, usage)
            if lost_tokens:
                kind = parting.kind
                tenant.lost_tokens += lost_tokens
                self._note(tenant, request_id, prompt, parting, lost_tokens, tokens_per_byte)
        self._keep(family, new, nearest, shared)
        self._found(name, tokens, kind, lost_tokens)
        tenant.credit_s -= self._clock() - began_s

    def tell(self) -> dict[str, Any]:
        """Tenants with what was found, those that lose most first."""
        rows: list[dict[str, Any]] = [
            {
                "name": name,
                "requests": tenant.requests,
                "looked": tenant.looked,
                "prompt_tokens": tenant.prompt_tokens,
                "lost_tokens": tenant.lost_tokens,
                "findings": [msgspec.to_builtins(one) for one in _by_loss(tenant.findings)],
            }
            for name, tenant in self._tenants.items()
        ]
        rows.sort(key=lambda row: (-row["lost_tokens"], row["name"]))
        return {"excerpts": self.excerpts, "used_bytes": self.used_bytes, "tenants": rows}

    # ------------------------------------------------------------ samples

    def _family(self, tenant: _Tenant, model: str, new: Cut) -> _Family:
        """Those that it has most in common with; a new one if it has nothing with any."""
        long = [segment for segment in new.segments if len(segment) >= MIN_PROBE_BYTES]
        probes = long[:: max(1, len(long) // PROBES)]
        probes += [end for s in probes if len(s) >= LONG_BYTES for end in ends_of(s)]
        best, most = None, MIN_HITS - 1
        for family in tenant.families:
            if family.model == model:
                held = family.samples[-1].all
                hits = sum(probe in held for probe in probes)
                if hits > most:
                    best, most = family, hits
        if best is not None:
            self._families.move_to_end(best)
            return best
        if len(tenant.families) >= MAX_FAMILIES:
            self._forget(next(one for one in self._families if one.tenant is tenant))
        made = _Family(tenant, model)
        tenant.families.append(made)
        self._families[made] = None
        return made

    def _keep(self, family: _Family, new: Cut, nearest: Cut | None, shared: int) -> None:
        """`new` among the samples: in place of the one that it goes on from, or of the oldest."""
        before = family.memory_bytes
        if nearest is not None and shared >= len(nearest.segments) - 1:
            family.samples.remove(nearest)
        elif len(family.samples) >= MAX_SAMPLES:
            del family.samples[0]
        family.samples.append(new)
        self.used_bytes += family.memory_bytes - before
        while self.used_bytes > self._max_bytes:
            self._forget(next(iter(self._families)))

    def _forget(self, family: _Family) -> None:
        del self._families[family]
        family.tenant.families.remove(family)
        self.used_bytes -= family.memory_bytes

    # ------------------------------------------------------------ findings

    def _note(
        self,
        tenant: _Tenant,
        request_id: str,
        prompt: Prompt,
        parting: Divergence,
        lost_tokens: int,
        tokens_per_byte: float,
    ) -> None:
        path, characters = _where(prompt.parts, parting.at)
        place = _general(path)
        key = (prompt.model, place, parting.kind)
        finding = tenant.findings.get(key)
        now_s = time.time()
        if finding is None:
            if len(tenant.findings) >= MAX_FINDINGS:
                least = min(tenant.findings, key=lambda one: tenant.findings[one].lost_tokens)
                del tenant.findings[least]
            finding = tenant.findings[key] = Finding(*key, first_s=now_s)
        finding.seen += 1
        finding.lost_tokens += lost_tokens
        finding.last_s, finding.request = now_s, request_id
        finding.path, finding.characters = path, characters
        finding.shared_tokens = int(parting.at * tokens_per_byte)
        if self.excerpts:
            finding.excerpt = parting.excerpt.decode(errors="replace")
            finding.other = parting.other.decode(errors="replace")


def _ids_bytes(prompt: Prompt) -> int:
    """Of a prompt that came as token ids, as it was written; 0 = it did not."""
    return 0 if prompt.ids is None else sum(map(len, prompt.parts))


def _nearest(new: Cut, samples: Sequence[Cut]) -> tuple[int, Cut | None]:
    """The sample that shares the longest beginning, the newest of several, and its segments."""
    longest, nearest = -1, None
    for sample in reversed(samples):
        shared = common(new.segments, sample.segments)
        if shared > longest:
            longest, nearest = shared, sample
    return longest, nearest


def _lost_tokens(
    parting: Divergence, new: Cut, tokens_per_byte: float, tokens: int, usage: Usage
) -> int:
    """Tokens of `tokens` that a stable order would have found in a cache and the engine had to
    compute; 0 = too few to speak of."""
    lost_bytes = parting.behind_bytes
    if lost_bytes < MIN_LOST_BYTES or lost_bytes < MIN_LOST_SHARE * new.size_bytes:
        return 0
    lost_tokens = int(lost_bytes * tokens_per_byte)
    if usage.cached_tokens >= 0:
        lost_tokens = min(lost_tokens, tokens - usage.cached_tokens)
    return lost_tokens if lost_tokens >= MIN_LOST_TOKENS else 0


def _where(parts: Sequence[msgspec.Raw], at: int) -> tuple[str, int]:
    """The path to a place in the parts behind one another, and characters in its string."""
    for name, part in zip(PARTS, parts, strict=True):
        raw = bytes(part)
        if at < len(raw):
            path, characters = place_of(raw, at)
            return name + path, characters
        at -= len(raw)
    return PARTS[-1], 0


def _general(path: str) -> str:
    """The same place in prompts of other lengths."""
    head, *rest = path.split("[")
    steps = [step if step.startswith("0]") else "*" + step[step.index("]") :] for step in rest]
    return "[".join([head, *steps])


def _by_loss(findings: dict[tuple[str, str, str], Finding]) -> list[Finding]:
    return sorted(findings.values(), key=lambda one: -one.lost_tokens)
