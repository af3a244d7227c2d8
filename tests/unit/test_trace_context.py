"""traceparent, as the W3C has it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.observe.trace_context import TraceContext, trace_context

PARENT = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
HEX = st.text("0123456789abcdef", min_size=1, max_size=40)


@given(st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.integers(0, 255))
def test_a_context_is_read(trace: int, span: int, flags: int) -> None:
    header = f"00-{trace:032x}-{span:016x}-{flags:02x}".encode()
    assert trace_context([(b"traceparent", header)]) == TraceContext(trace, span, flags)
    later = b"cc" + header[2:] + b"-more"
    assert trace_context([(b"traceparent", later)]) == TraceContext(trace, span, flags)


@given(st.one_of(st.binary(max_size=70), st.tuples(HEX, HEX, HEX, HEX).map(lambda p: "-".join(p))))
def test_nonsense_is_no_context(given: bytes | str) -> None:
    raw = given if isinstance(given, bytes) else given.encode()
    context = trace_context([(b"traceparent", raw)])
    assert context is None or raw.strip()[3:35] == context.id.encode()


@pytest.mark.parametrize(
    "header",
    [
        b"00-00000000000000000000000000000000-b7ad6b7169203331-01",
        b"00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
        b"ff" + PARENT[2:],
        PARENT + b"-more",
        PARENT.upper(),
    ],
)
def test_what_the_standard_forbids(header: bytes) -> None:
    assert trace_context([(b"traceparent", header)]) is None


def test_two_parents_are_none_and_pieces_of_a_state_are_one() -> None:
    parent, state = (b"traceparent", PARENT), b"tracestate"
    for others in ([parent], [(b"traceparent", b"")], [(b"traceparent", PARENT[:-1] + b"0")]):
        assert trace_context([parent, (b"x", b"y"), *others]) is None
    context = trace_context([(state, b"a=1,b=2"), parent, (b"x", b"y"), (state, b"c=3")])
    assert context is not None
    assert context.state == "a=1,b=2,c=3"
