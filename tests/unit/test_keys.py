"""API keys: who may come in."""

from __future__ import annotations

import hashlib

import pytest

from headrace.api.keys import Keys

DIGEST = hashlib.sha256(b"third").hexdigest()
KEYS = Keys(("first", "second", f"sha256:{DIGEST}"))


def test_without_keys_everybody_may() -> None:
    assert Keys(()).admit({})


@pytest.mark.parametrize("key", ["first", "second", "third"])
@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "x-api-key"])
def test_each_key_in_both_headers(key: str, scheme: str) -> None:
    name, value = ("x-api-key", key) if scheme == "x-api-key" else ("authorization", scheme)
    header = value if name == "x-api-key" else f"{scheme} {key}"
    assert KEYS.admit({name.encode(): header.encode()})


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {b"authorization": b""},
        {b"authorization": b"first"},
        {b"authorization": b"Basic first"},
        {b"authorization": b"Bearer firs"},
        {b"authorization": b"Bearer "},
        {b"authorization": b"Bearer first second"},
        {b"authorization": b"Bearer \xff\xfe"},
        {b"x-api-key": b""},
        {b"x-api-key": b"sha256:" + DIGEST.encode()},
        {b"x-api-key": DIGEST.encode()},
    ],
)
def test_strangers(headers: dict[bytes, bytes]) -> None:
    assert not KEYS.admit(headers)


def test_the_other_header_may_hold_something_else() -> None:
    assert KEYS.admit({b"authorization": b"Bearer of-a-proxy", b"x-api-key": b"second"})


def test_the_keys_of_admins_are_keys_too() -> None:
    keys = Keys(["k"], ["root"])
    assert keys.admit({b"x-api-key": b"root"})
    assert keys.is_admin({b"x-api-key": b"root"})
    assert keys.name({b"x-api-key": b"root"})
    assert not keys.is_admin({b"x-api-key": b"k"})
    assert not keys.is_admin({})
    alone = Keys([], ["root"])
    assert not alone.admit({})
    assert Keys([]).is_admin({}), "without keys nobody is a stranger"
