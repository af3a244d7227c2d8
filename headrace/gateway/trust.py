"""Whose certificates count for https to workers: the system's, or those of a file."""

from __future__ import annotations

import ssl

from headrace.errors import ConfigError

_known: dict[str, ssl.SSLContext] = {}


def load(ca_file: str) -> ssl.SSLContext:
    """Read the file ("" = the system's), from now on for `trusted` too. Raises ConfigError."""
    try:
        made = ssl.create_default_context(cafile=ca_file or None)
    except OSError as error:  # SSLError is one
        raise ConfigError(f"ca_file = {ca_file!r}: {error}", param="workers") from None
    made.set_alpn_protocols(["http/1.1"])
    _known[ca_file] = made
    return made


def trusted(ca_file: str) -> ssl.SSLContext:
    """As it was read last: a file that is gone meanwhile stops no worker."""
    return _known.get(ca_file) or load(ca_file)
