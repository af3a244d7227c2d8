"""JSON that somebody else wrote: one exception for all that can be wrong with it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from headrace.errors import InvalidRequest

T = TypeVar("T")
_LOOKED_AT_BYTES = 65_536  # of a body that is not JSON, in search of a bad number


class Malformed(ValueError):
    """It cannot be read. Its text goes on from the name of what was read: "is not JSON: ..."."""


def read_json(data: bytes | str, kind: type[T]) -> T:
    """A value of `kind`. Raises Malformed, whatever the bytes: msgspec alone has three ways."""
    try:
        return msgspec.json.decode(data, type=kind)
    except RecursionError:
        raise Malformed("nests too deeply") from None
    except msgspec.ValidationError as error:
        raise Malformed(f"is not as it should be: {error}") from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise Malformed(f"is not JSON: {error}") from None


def string_of(item: Mapping[str, Any], name: str, where: str) -> str:
    """A member that has to be a string. where: of the item, from a field of the body on.

    Raises InvalidRequest that names the field.
    """
    value = item.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"{where}.{name}: a string", param=where.partition("[")[0])
    return value


def refusal(body: bytes, error: Malformed) -> InvalidRequest:
    """What a client is told of a body that could not be read, with the field if that is known."""
    found = _absurd(body)
    if found is None:
        return InvalidRequest(f"the body {error}")
    field, fault = found
    return InvalidRequest(f"{field}: {fault}", param=field)


def _absurd(body: bytes) -> tuple[str, str] | None:
    """The member that holds what only Python reads, and what that is, if that is the fault: a
    number that is NaN or infinite, or half of a surrogate pair."""
    if len(body) > _LOOKED_AT_BYTES:
        return None  # a kindness that may not hold up others
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    for name, member in value.items():
        try:
            name.encode()
            json.dumps(member, ensure_ascii=False).encode()
        except RecursionError:
            return None
        except UnicodeEncodeError:
            return name.encode(errors="replace").decode(), "half of a surrogate pair is no text"
        try:
            json.dumps(member, allow_nan=False)
        except ValueError:
            return name, "a number is NaN or out of range"
    return None
