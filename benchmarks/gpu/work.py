"""What is measured offline, as data, and the seconds that each work cannot take less than.

Every engine runs the same list. A figure's `fraction` is the limit over the measured time:

    limit = sum over steps of max(bytes / read rate, FLOPs / matrix rate)

over the steps of an ideal engine: all prompts of a work in one step, then one step a token with all
rows in it (bytes and FLOPs: see `headrace.models.shape`; rates: measured on the card by `limits`).
"""

from __future__ import annotations

import dataclasses

from headrace.models.shape import Shape

MODEL_LEN = 8192  # tokens of the longest sequence, for every engine


@dataclasses.dataclass(frozen=True)
class Work:
    """`requests` prompts of random ids at once. `must`: the least ratio to the peer's rate, and
    `aim` what is hoped for; 0 = not asked."""

    kind: str  # wave, prefill, batch
    requests: int
    prompt_tokens: int
    output_tokens: int
    temperature: float = 0.0
    runs: int = 3  # the median counts
    must: float = 0.0
    aim: float = 0.0

    @property
    def name(self) -> str:
        """`wave 8x(32->75)`."""
        shape = f"{self.requests}x({self.prompt_tokens}->{self.output_tokens})"
        return f"{self.kind} {shape}" + (" sampled" if self.temperature else "")

    @property
    def tokens(self) -> int:
        """What a rate counts: prompt tokens of a prefill, output tokens of all else."""
        each = self.prompt_tokens if self.kind == "prefill" else self.output_tokens
        return self.requests * each


WAVES = tuple(
    Work("wave", c, 32, 75, must=must, aim=aim)
    for c, must, aim in (
        (1, 1.15, 1.25),
        (4, 1.15, 1.25),
        (8, 1.15, 1.25),
        (16, 1.15, 1.25),
        (32, 1.10, 0.0),
        (64, 1.10, 0.0),
        (128, 1.10, 0.0),
        (256, 1.03, 0.0),
    )
)
PREFILLS = (
    Work("prefill", 1, 2048, 1, must=1.0),
    Work("prefill", 1, 8000, 1, must=1.0),
    Work("prefill", 4, 2048, 1),
    Work("prefill", 4, 8000, 1, must=1.0),
)
BATCHES = (
    Work("batch", 512, 512, 128, temperature=0.8, runs=1, must=1.03),
    Work("batch", 32, 4096, 256, runs=1, must=1.0, aim=1.03),
)
SAME_AS_HTTP = tuple(Work("wave", c, 64, 75) for c in (64, 256))  # what `client` measures
ALL = (*WAVES, *SAME_AS_HTTP, *PREFILLS, *BATCHES)
SMALL = (  # a few seconds on a processor, with the shape `tiny`
    Work("wave", 1, 8, 6),
    Work("wave", 4, 8, 6),
    Work("prefill", 2, 64, 1, runs=1),
    Work("batch", 8, 16, 8, temperature=0.8, runs=1),
)
LISTS = {"all": ALL, "small": SMALL}


def chosen(works: str, only: str) -> list[Work]:
    """Those of a list whose name holds one of the comma-separated parts of `only`; "" = all."""
    parts = [part for part in only.split(",") if part]
    return [work for work in LISTS[works] if not parts or any(part in work.name for part in parts)]


@dataclasses.dataclass(frozen=True)
class Limits:
    """Measured rates of a device, a second."""

    read_bytes: float
    copy_bytes: float  # bytes read + bytes written
    flops: float  # of a large bfloat16 matrix product


def limit_s(work: Work, shape: Shape, limits: Limits, experts_hit: float = 0.0) -> float:
    """Seconds that `work` takes at least; `experts_hit` as in `Shape.step_bytes`."""

    def step_s(tokens: int, context: int, pairs: int) -> float:
        read_s = shape.step_bytes(context, experts_hit) / limits.read_bytes
        return max(read_s, shape.step_flops(tokens, work.requests, pairs) / limits.flops)

    n, prompt = work.requests, work.prompt_tokens
    total_s = step_s(n * prompt, 0, n * prompt * (prompt + 1) // 2)
    for length in range(prompt + 1, prompt + work.output_tokens):
        total_s += step_s(n, n * length, n * length)
    return total_s
