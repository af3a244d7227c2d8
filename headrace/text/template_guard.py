"""Limits on what a template may cost: time, the size of values, the size of the prompt.

The environment looks at the clock in every turn of a loop and at every call and filter, and at
sizes before an operator makes a larger value of two. That bounds whatever a template does step by
step. A single call of a built-in filter can still take memory and time of its own, so templates
that come with a request are rendered in a process that can be killed: see `stranger`.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

RENDER_S = 2.0  # wall clock of one render
MAX_CHARS = 16 * 2**20  # of a prompt, and of any text that an operator makes
MAX_ITEMS = 2**20  # of a list that an operator makes
MAX_BITS = 4096  # of a number that an operator makes


class TooMuch(jinja2.TemplateError):
    """The template takes more than it may."""


class GuardedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with these limits. One object serves several threads."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(optimized=False, **options)  # nothing is computed while it is compiled
        self._local = threading.local()

    def seal(self) -> None:
        """Guard every filter that is known now. Call once, when all are added."""
        for name, made in list(self.filters.items()):
            self.filters[name] = _ticking(made, self.tick)

    def render_within(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        """Raises TooMuch beside whatever the template raises."""
        self._local.deadline_s = time.monotonic() + RENDER_S
        pieces: list[str] = []
        size = 0
        for piece in template.generate(variables):
            size += len(piece)
            if size > MAX_CHARS:
                raise TooMuch(f"it writes more than {MAX_CHARS} characters")
            pieces.append(piece)
        return "".join(pieces)

    def tick(self) -> None:
        """Raises TooMuch when the time is up."""
        if time.monotonic() > self._local.deadline_s:
            raise TooMuch(f"it takes longer than {RENDER_S:g} s")

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __self.tick()
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.tick()
        _check_operands(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def put_together(self, *values: Any) -> str:
        """The ~ of templates."""
        texts = [str(value) for value in values]
        if sum(map(len, texts)) > MAX_CHARS:
            raise TooMuch(f"it makes a text of more than {MAX_CHARS} characters")
        return "".join(texts)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _Guards().visit(tree)
        return tree


class _Guards(NodeTransformer):
    """A tick in every loop; ~ as a call."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        tick = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:
        self.generic_visit(node)
        put_together = nodes.EnvironmentAttribute("put_together")
        return nodes.Call(put_together, node.nodes, [], None, None, lineno=node.lineno)


def _ticking(made: Callable[..., Any], tick: Callable[[], None]) -> Callable[..., Any]:
    """A filter that looks at the clock first, with the marks that Jinja put on it."""

    def guarded(*args: Any, **kwargs: Any) -> Any:
        tick()
        for value in (*args[1:], *kwargs.values()):
            if type(value) is int and abs(value) > MAX_ITEMS:
                raise TooMuch(f"a filter is given {value}: {MAX_ITEMS} is the most")
        return made(*args, **kwargs)

    return functools.update_wrapper(guarded, made)


def _check_operands(operator: str, left: Any, right: Any) -> None:
    sizes = _size(left), _size(right)
    if operator == "+":
        _check_size(left, sum(sizes))
    elif operator == "*":
        if type(left) is int and type(right) is int:
            _check_bits(left.bit_length() + right.bit_length())
        for value, times in ((left, right), (right, left)):
            if isinstance(times, int) and not isinstance(value, int | float):
                _check_size(value, _size(value) * max(0, times))
    elif operator == "**":
        if isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * max(0, right))
    elif isinstance(left, str) and any(len(run) > 4 for run in _digit_runs(left)):
        raise TooMuch("a format is too wide")


def _digit_runs(text: str) -> Iterable[str]:
    return "".join(char if char.isdigit() else " " for char in text).split()


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple) else 0


def _check_size(value: Any, size: int) -> None:
    most = MAX_CHARS if isinstance(value, str | bytes) else MAX_ITEMS
    if size > most:
        raise TooMuch(f"it makes a value of {size} items: {most} is the most")


def _check_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise TooMuch(f"it makes a number of {bits} bits: {MAX_BITS} is the most")
