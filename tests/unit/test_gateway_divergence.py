"""Where two prompts part, and how that place is told."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from headrace.gateway.divergence import common, cut, diverge, place_of


@given(st.binary(max_size=300), st.binary(max_size=300), st.binary(max_size=300))
def test_a_common_beginning(shared: bytes, one: bytes, other: bytes) -> None:
    a, b = shared + one, shared + other
    plain = next((i for i in range(min(len(a), len(b))) if a[i] != b[i]), min(len(a), len(b)))
    assert common(a, b) == plain
    assert common(list(a), list(b)) == plain


pieces = st.lists(
    st.sampled_from(
        ['{"', "},", "\\n", ". ", "abc", "stays the same", "12:30", "x", "\u00e9", "."]
    ),
    max_size=40,
).map("".join)


@given(pieces, pieces, pieces)
def test_a_divergence_is_where_the_texts_part(shared: str, one: str, other: str) -> None:
    a, b = (shared + one).encode(), (shared + other).encode()
    new, old = cut(a), cut(b)
    found = diverge(new, old, common(new.segments, old.segments))
    flat = [b"\0".join(some.segments) for some in (new, old)]
    assert [len(some) for some in flat] == [len(a), len(b)], "cuts change no length"
    if found is None:
        assert common(*flat) >= min(len(flat[0]), len(flat[1])) - 1
        return
    assert found.at == common(*flat)
    assert 0 <= found.behind_bytes <= len(a) - found.at
    assert found.excerpt in flat[0]
    assert found.other in flat[1]


keys = st.sampled_from(["content", "text", "secret word", "tools", 'a"b'])
leaves = st.one_of(st.text(max_size=9), st.integers(), st.booleans(), st.none())


@given(data=st.data(), text=st.text(min_size=1, max_size=30), ascii_=st.booleans())
def test_the_place_of_any_character_of_any_string(
    data: st.DataObject, text: str, ascii_: bool
) -> None:
    text = text.encode("utf-8", "ignore").decode()
    value: Any = "@@PLACE@@"
    path = ""
    for _ in range(data.draw(st.integers(0, 5))):
        if data.draw(st.booleans()):
            before = data.draw(st.lists(leaves, max_size=3))
            value = [*before, value, *data.draw(st.lists(leaves, max_size=2))]
            path = f"[{len(before)}]{path}"
        else:
            key = data.draw(keys)
            others = {f"k{i}": data.draw(leaves) for i in range(data.draw(st.integers(0, 2)))}
            value = {**others, key: value}
            path = f".{'*' if ' ' in key or chr(34) in key else key}{path}"
    count = data.draw(st.integers(0, len(text)))
    written = json.dumps(value, ensure_ascii=ascii_)
    start = written.index("@@PLACE@@")
    inside = json.dumps(text, ensure_ascii=ascii_)[1:-1]
    before_it = written[:start] + json.dumps(text[:count], ensure_ascii=ascii_)[1:-1]
    raw = written.replace("@@PLACE@@", inside).encode()
    assert place_of(raw, len(before_it.encode())) == (path, count)


@given(st.binary(max_size=200), st.integers(0, 220))
def test_the_place_in_what_is_no_json_is_found_without_an_error(raw: bytes, at: int) -> None:
    path, characters = place_of(raw, at)
    assert characters >= 0
    assert all(step == "*" or step.isidentifier() for step in path.split("[")[0].split(".")[1:])
