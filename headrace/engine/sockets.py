"""The engine's sockets in the runtime folder, by name."""

from __future__ import annotations

INBOX = "engine.ipc"  # ROUTER: what HTTP processes ask, and what they are told
PULSE = "pulse.ipc"  # PUB: that the engine lives
