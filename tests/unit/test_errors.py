"""The exception tree is what its page says."""

from __future__ import annotations

import re

from headrace import errors
from headrace.errors import HeadraceError


def test_the_tree_names_every_leaf_with_its_status_and_code() -> None:
    tree = str(errors.__doc__)
    named = re.findall(r"── (\w+)(?: +(\d+)  (\w+))?", tree)
    kinds = {
        kind.__name__: kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, HeadraceError)
    }
    assert {name for name, _, _ in named} == kinds.keys() - {"HeadraceError"}
    for name, status, code in named:
        if status:
            assert (kinds[name].status, kinds[name].code) == (int(status), code), name
