"""The HTTP page names every field, with the class that the code puts it in."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headrace.api.schemas import ACCEPTED, MAX_N, MAX_STOP_IDS, MAX_STOPS, NOT_YET, Chat, Completion

PAGE = (Path(__file__).parents[2] / "docs" / "http.md").read_text()
REFUSED = PAGE.split("**Refused until", 1)[1].split("**Unknown**", 1)[0]
HARMLESS = PAGE.split("**Harmless, accepted**", 1)[1].split("**Refused until", 1)[0]
HONOURED = PAGE.split("**Honoured by both", 1)[1].split("**Harmless, accepted**", 1)[0]


def names(text: str) -> set[str]:
    return set(re.findall(r"`([a-z_]+)`", text))


@pytest.mark.parametrize("kind", [Chat, Completion])
def test_every_honoured_field(kind: type[Chat] | type[Completion]) -> None:
    assert set(kind.__struct_fields__) <= names(HONOURED)


def test_every_other_field() -> None:
    assert names(HARMLESS) == ACCEPTED
    assert names(REFUSED) - {"unsupported_parameter", "param"} == set(NOT_YET)


def test_limits() -> None:
    assert f"1 to {MAX_N}, and" in PAGE
    assert f"a string or up to {MAX_STOPS}" in PAGE
    assert f"up to {MAX_STOP_IDS} ids" in PAGE
