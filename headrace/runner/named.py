"""Names of many tensors in few words."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

_NUMBER = re.compile(r"(?<=\.)(\d+)(?=\.)")


def fold(names: Iterable[str]) -> str:
    """All of them, sorted; those that differ in their first number alone as one: `h.{0-3,5}.x`."""
    numbers: dict[str, list[int]] = defaultdict(list)
    for name in names:
        match = _NUMBER.search(name)
        if match is None:
            numbers[name] = []
        else:
            numbers[f"{name[: match.start()]}\0{name[match.end() :]}"].append(int(match[1]))
    return ", ".join(
        name.replace("\0", _ranges(sorted(found))) for name, found in sorted(numbers.items())
    )


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> `{0-2,5}`; one alone as it is."""
    if len(numbers) == 1:
        return str(numbers[0])
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return "{" + ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) + "}"
