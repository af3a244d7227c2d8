"""Prompts for prefix lint."""

from __future__ import annotations

import random
import uuid
from typing import Any

HERE = {"host": "127.0.0.1:8080"}
Body = dict[str, Any]


def words(size: int, seed: int) -> str:
    """That many characters of sentences which no other seed has."""
    drawn, out = random.Random(seed), ""
    while len(out) < size:
        out += " ".join(f"{drawn.getrandbits(24):06x}" for _ in range(8)) + ". "
    return out[:size]


STAYS = words(3000, 1)


def chat(system: str, question: str = "", **more: Any) -> Body:
    asked = {"role": "user", "content": question or "What now?"}
    return {"model": "m", "messages": [{"role": "system", "content": system}, asked], **more}


def an_id(seed: int) -> str:
    return str(uuid.UUID(int=random.Random(seed).getrandbits(128)))
