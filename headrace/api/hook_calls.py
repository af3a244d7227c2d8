"""What waits for a hook: bounded in time, counted, and no nonsense taken for an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from headrace.api.service import Service
from headrace.errors import HookUnavailable

Said = TypeVar("Said")


async def heard(service: Service, kind: str, work: Awaitable[Said]) -> Said:
    """What a hook of this kind says, within the setting `hook_timeout_s`.

    Raises HookUnavailable; whatever else the hook raises goes on as it is.
    """
    limit_s = service.settings.hook_timeout_s
    try:
        async with asyncio.timeout(limit_s) as wait:
            return await work
    except HookUnavailable:
        service.metrics.count_hook(kind, "unavailable")
        raise
    except TimeoutError:
        if not wait.expired():
            raise  # the hook's own fault
        service.metrics.count_hook(kind, "unavailable")
        raise HookUnavailable(f"a {kind} hook said nothing for {limit_s:g} s") from None
