"""Every kernel test runs on every kernel table that this processor has."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from headrace.errors import ConfigError
from headrace.native.build import Unavailable, build, instruction_sets
from headrace.native.library import Library
from headrace.native.pool import Pool

SETS = tuple(instruction_sets())


@pytest.fixture(scope="session")
def library() -> Library:
    # NATIVE_FLAGS: scripts/native_sanitize runs these tests under sanitizers.
    built = build(sets=SETS, extra_flags=os.environ.get("NATIVE_FLAGS", "").split())
    if isinstance(built, Unavailable):
        pytest.skip(f"no native library: {built.reason}; {built.remedy}")
    return Library(built)


@pytest.fixture(scope="session", params=SETS)
def pool(request: pytest.FixtureRequest, library: Library) -> Iterator[Pool]:
    try:
        made = Pool(library, 2, isa=request.param)
    except ConfigError as error:
        pytest.skip(str(error))
    yield made
    made.close()
