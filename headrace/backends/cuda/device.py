"""Facts about one GPU."""

from __future__ import annotations

import msgspec
import torch

from headrace.errors import ConfigError


class Card(msgspec.Struct, frozen=True):
    """What the sizes and choices of a backend depend on. `index`: torch's number of the device."""

    name: str
    index: int
    multiprocessors: int
    capability: tuple[int, int]
    uuid: str = ""  # as NVML knows it, without what it puts before it


def find_card() -> Card:
    """The current device. Raises ConfigError where torch sees none."""
    if not torch.cuda.is_available():
        raise ConfigError("backend = cuda: torch sees no CUDA device", param="backend")
    index = torch.cuda.current_device()
    facts = torch.cuda.get_device_properties(index)
    return Card(
        name=facts.name,
        index=index,
        multiprocessors=facts.multi_processor_count,
        capability=(facts.major, facts.minor),
        uuid=str(facts.uuid),
    )


def native_bfloat16(card: Card) -> bool:
    """Compute capability 8.0 and later multiply bfloat16."""
    return card.capability >= (8, 0)
