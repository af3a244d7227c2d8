"""A value of a pythonic call as JSON text: Python's literals, and JSON's true, false and null."""

from __future__ import annotations

import ast
import json
import warnings
from typing import Any

_NAMES = {"true": True, "false": False, "null": None, "none": None}


def json_of(text: str) -> str:
    """What is neither becomes a string that holds it as it is."""
    try:
        with warnings.catch_warnings():  # "\d" in a string is no reason to say anything
            warnings.simplefilter("ignore")
            value = _value(ast.parse(text.strip(), mode="eval").body)
        return _dumped(value)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return _dumped(text.strip())


def _dumped(value: Any) -> str:
    shown = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        shown.encode()
    except UnicodeEncodeError:  # half a surrogate pair
        return json.dumps(value, allow_nan=False)
    return shown


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant):
        if not isinstance(node.value, str | int | float | None):
            raise ValueError("bytes, complex or ...")
        return node.value
    if isinstance(node, ast.Name):
        return _NAMES[node.id] if node.id in _NAMES else _no(node)
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return {_value(key) if key else _no(node): _value(value) for key, value in pairs}
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand)
        if isinstance(value, bool) or not isinstance(value, int | float):
            _no(node)
        return -value if isinstance(node.op, ast.USub) else value
    return _no(node)


def _no(node: ast.expr) -> Any:
    raise ValueError(f"{type(node).__name__} is no literal")
