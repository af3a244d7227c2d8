"""Every kernel test runs on every kernel table that this processor has."""

from __future__ import annotations

import platform
from collections.abc import Iterator

import pytest

from headrace.errors import ConfigError
from headrace.native.build import Unavailable, instruction_sets
from headrace.native.library import Library, load
from headrace.native.pool import Pool

SETS = tuple(instruction_sets(platform.machine()))


@pytest.fixture(scope="session")
def library() -> Library:
    found = load()
    if isinstance(found, Unavailable):
        pytest.skip(f"no native library: {found.reason}; {found.remedy}")
    return found


@pytest.fixture(scope="session", params=SETS)
def pool(request: pytest.FixtureRequest, library: Library) -> Iterator[Pool]:
    try:
        made = Pool(library, 2, isa=request.param)
    except ConfigError as error:
        pytest.skip(str(error))
    yield made
    made.close()
