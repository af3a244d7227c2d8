"""How an optional package comes here: said by whoever finds that it is missing."""

from __future__ import annotations

import re
import shlex
import sys
from importlib import metadata

_OF_EXTRA = re.compile(r"""\bextra\s*==\s*['"]([\w.-]+)['"]""")


def install(extra: str) -> str:
    """The command that installs the packages of `extra` into the Python that runs this. It names
    the packages, not headrace, so that it is right for a clone as for an installed wheel."""
    packages = packages_of(extra)
    assert packages, f"pyproject.toml has no extra {extra}"
    return shlex.join([sys.executable, "-m", "pip", "install", *packages])


def packages_of(extra: str) -> list[str]:
    """What pyproject.toml names for `extra`, as pip takes it. Where headrace itself is not
    installed but runs from its folder, nobody knows more than the extra's name."""
    try:
        requirements = metadata.requires("headrace") or ()
    except metadata.PackageNotFoundError:
        return [f"headrace[{extra}]"]
    found = []
    for requirement in requirements:
        package, _, marker = requirement.partition(";")
        if extra in _OF_EXTRA.findall(marker):
            found.append(package.strip())
    return found
