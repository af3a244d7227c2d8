"""How long prompts and answers are: a number, or a law that each request draws from."""

from __future__ import annotations

import math
import random
from typing import Literal

import msgspec

from headrace.errors import ConfigError

FORMS = "N, uniform:LOW:HIGH, normal:MEAN:STD or lognormal:MEDIAN:SIGMA"


class Lengths(msgspec.Struct, frozen=True):
    """A law of whole numbers from 1: uniform (low, high), normal (mean, standard deviation) or
    lognormal (median, sigma of the logarithm). Values below 1 become 1."""

    law: Literal["uniform", "normal", "lognormal"]
    a: float
    b: float

    def __str__(self) -> str:
        """As `parse_lengths` reads it."""
        return f"{self.law}:{self.a:.12g}:{self.b:.12g}"

    def draw(self, source: random.Random) -> int:
        """One length."""
        if self.law == "uniform":
            return source.randint(int(self.a), int(self.b))
        if self.law == "normal":
            return max(1, round(source.gauss(self.a, self.b)))
        return max(1, round(source.lognormvariate(math.log(self.a), self.b)))


def drawn(length: int | Lengths, source: random.Random) -> int:
    """A fixed length, or one of a law. A fixed one takes nothing from `source`."""
    return length if isinstance(length, int) else length.draw(source)


def parse_lengths(text: str) -> int | Lengths:
    """`64` or `normal:64:16`. Raises ConfigError for anything else."""
    law, *numbers = text.split(":")
    try:
        if not numbers:
            fixed = int(law)
            if fixed >= 1:
                return fixed
        elif law in ("uniform", "normal", "lognormal"):
            a, b = (float(number) for number in numbers)
            whole = law != "uniform" or (a.is_integer() and b.is_integer() and a <= b)
            if a >= 1 and 0 <= b < math.inf and a < math.inf and whole:
                return Lengths(law, a, b)  # type: ignore[arg-type]
    except (ValueError, msgspec.ValidationError):
        pass
    raise ConfigError(f"{text!r} is no length: {FORMS}, each from 1", param="lengths")
