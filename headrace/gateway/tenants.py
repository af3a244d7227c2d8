"""Who may come in: keys as digests, their tenants, and the tiers that say how much."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from headrace.errors import ConfigError, Forbidden, Unauthorized
from headrace.gateway.limits import Account, Limits

HASHED = "sha256:"
Natural = Annotated[int, Meta(ge=0)]


class KeySpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One key as the operator writes it: itself, or `sha256:` and its digest in hexadecimal."""

    key: str
    tenant: str = ""  # keys of one tenant share its limits; "" = the key is its own
    tier: str = ""
    admin: bool = False  # may see /gateway/* and /metrics


class TierSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How much a tenant gets. 0 = no limit."""

    requests_per_min: Natural = 0
    tokens_per_min: Natural = 0
    parallel: Natural = 0
    priority: int = 0  # lower = more urgent
    queue_s: Annotated[float, Meta(ge=0)] = 30.0  # longest wait for a free worker; 0 = none


class Tenant:
    """One tenant, its tier and what it has taken."""

    def __init__(self, name: str, tier: TierSpec, tier_name: str) -> None:
        self.name, self.tier, self.tier_name = name, tier, tier_name
        self.account = Account(
            Limits(
                requests_per_min=tier.requests_per_min,
                tokens_per_min=tier.tokens_per_min,
                parallel=tier.parallel,
            )
        )


class Doorkeeper:
    """Without keys everybody may come in, as one tenant of the tier "default" (or no limits)."""

    def __init__(self, keys: Sequence[KeySpec], tiers: Mapping[str, TierSpec]) -> None:
        """Raises ConfigError for a tier that is not there, or a tenant of two tiers."""
        self.keyed = bool(keys)
        self.limited = any(
            tier.requests_per_min or tier.tokens_per_min or tier.parallel for tier in tiers.values()
        )
        self._anybody = Tenant("", tiers.get("default", TierSpec()), "default")
        self._seen: dict[bytes, tuple[Tenant, bool]] = {}  # known keys that came: no digest twice
        self._known: dict[bytes, tuple[bytes, Tenant, bool]] = {}
        tenants: dict[str, Tenant] = {}
        self.tenants: Mapping[str, Tenant] = tenants if keys else {"": self._anybody}
        for spec in keys:
            digest = _digest_of(spec.key)
            if spec.tier and spec.tier not in tiers:
                raise ConfigError(f"a key names the tier {spec.tier!r}, which is not there")
            tier = tiers.get(spec.tier or "default", TierSpec())
            name = spec.tenant or HASHED + digest.hex()[:16]
            tenant = tenants.setdefault(name, Tenant(name, tier, spec.tier or "default"))
            if tenant.tier != tier:
                raise ConfigError(f"tenant {name!r} has keys of two tiers")
            if digest in self._known:
                raise ConfigError(f"a key of {name!r} is there twice")
            self._known[digest] = (digest, tenant, spec.admin)

    def admit(self, headers: Mapping[bytes, bytes]) -> Tenant:
        """Who asks. Raises Unauthorized."""
        return self._find(headers)[0]

    def admit_admin(self, headers: Mapping[bytes, bytes]) -> None:
        """Raises Unauthorized or Forbidden."""
        if not self._find(headers)[1]:
            raise Forbidden("this needs the key of an admin")

    def _find(self, headers: Mapping[bytes, bytes]) -> tuple[Tenant, bool]:
        if not self.keyed:
            return self._anybody, True
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        shown = [key.strip()] if scheme.lower() == b"bearer" else []
        if b"x-api-key" in headers:
            shown.append(headers[b"x-api-key"].strip())
        for one in shown:
            seen = self._seen.get(one)
            if seen is not None:
                return seen
            digest = hashlib.sha256(one).digest()
            kept, tenant, admin = self._known.get(digest, (b"", self._anybody, False))
            if hmac.compare_digest(kept, digest):
                self._seen[one] = (tenant, admin)
                return tenant, admin
        raise Unauthorized("a known API key is needed: Authorization: Bearer KEY")


def _digest_of(key: str) -> bytes:
    if not key.startswith(HASHED):
        if not key or not key.isascii() or not key.isprintable() or key.strip() != key:
            raise ConfigError("a key is printable ASCII without blanks around it", param="keys")
        return hashlib.sha256(key.encode()).digest()
    digits = key.removeprefix(HASHED)
    if not re.fullmatch("[0-9a-fA-F]{64}", digits):
        raise ConfigError("a key sha256:... has 64 hexadecimal digits", param="keys")
    return bytes.fromhex(digits)
