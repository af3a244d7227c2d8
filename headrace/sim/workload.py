"""What a simulated fleet is asked: requests as chains of block ids, from a trace or generated."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec

from headrace.bench.trace import BLOCK_TOKENS, TraceLine, read_trace
from headrace.errors import ConfigError


class Request(msgspec.Struct, frozen=True):
    """One request. Two with the same first n ids share their first n * block_tokens tokens."""

    arrival_s: float
    prompt_tokens: int  # at least 1
    output_tokens: int  # at least 1
    chain: tuple[int, ...]  # an id for each full block of the prompt
    session: str = ""


class Workload(msgspec.Struct, frozen=True):
    """Requests in order of arrival; at least one."""

    name: str
    requests: tuple[Request, ...]
    block_tokens: int = BLOCK_TOKENS

    @property
    def duration_s(self) -> float:
        """From the start to the last arrival."""
        return self.requests[-1].arrival_s

    @property
    def prompt_tokens(self) -> int:
        """Of all requests."""
        return sum(request.prompt_tokens for request in self.requests)

    def ideal_tokens(self) -> int:
        """Prompt tokens that one endless cache would hold when they are asked for."""
        seen: set[int] = set()
        hits = 0
        for request in self.requests:
            usable = min(len(request.chain), (request.prompt_tokens - 1) // self.block_tokens)
            for n, block in enumerate(request.chain):
                if n == usable or block not in seen:
                    break
                hits += 1
            seen.update(request.chain)
        return hits * self.block_tokens

    def working_set_blocks(self) -> int:
        """Blocks that are asked for more than once: what a cache of the fleet is good for."""
        counts = Counter(block for request in self.requests for block in request.chain)
        return sum(1 for n in counts.values() if n > 1)

    def largest_blocks(self) -> int:
        """Blocks of the request that needs most, prompt and output."""
        most = max(request.prompt_tokens + request.output_tokens for request in self.requests)
        return -(-most // self.block_tokens)

    def faster(self, speed: float) -> Workload:
        """The same requests, arriving `speed` times as fast."""
        asked = tuple(
            msgspec.structs.replace(request, arrival_s=request.arrival_s / speed)
            for request in self.requests
        )
        return msgspec.structs.replace(self, requests=asked)

    def prompts_only(self) -> Workload:
        """The same prompts, each with one token of output."""
        asked = tuple(msgspec.structs.replace(r, output_tokens=1) for r in self.requests)
        return msgspec.structs.replace(self, requests=asked)

    def first(self, count: int) -> Workload:
        """The first `count` requests."""
        return msgspec.structs.replace(self, requests=self.requests[:count])


def load_trace(path: Path) -> Workload:
    """A trace in Mooncake's form (see `bench.trace`). Raises ConfigError naming the line.

    The id of a block that the prompt does not fill is left out: engines share full blocks only.
    """
    requests = [
        Request(
            line.timestamp / 1e3,
            line.input_length,
            max(1, line.output_length),
            tuple(line.hash_ids[: line.input_length // BLOCK_TOKENS]),
        )
        for line in read_trace(str(path))
    ]
    if not requests:
        raise ConfigError(f"{path}: no requests", param="trace")
    return Workload(path.name.split(".")[0], tuple(requests))


def save_trace(workload: Workload, path: Path) -> None:
    """In the form that `load_trace` reads. Ids of blocks that are not full are made up."""
    spare = 1 + max((max(r.chain) for r in workload.requests if r.chain), default=0)
    lines = []
    for request in workload.requests:
        ids = [*request.chain]
        if request.prompt_tokens % workload.block_tokens:
            ids.append(spare)
            spare += 1
        line = TraceLine(
            timestamp=request.arrival_s * 1e3,
            input_length=request.prompt_tokens,
            output_length=request.output_tokens,
            hash_ids=ids,
        )
        lines.append(msgspec.json.encode(line) + b"\n")
    path.write_bytes(b"".join(lines))
