"""Prefix lint: where prompts part, why, what it costs; that it is bounded and not untrue."""

from __future__ import annotations

import json
import random
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headrace.gateway.divergence import MAX_SEGMENTS, cut
from headrace.gateway.lint import (
    CREDIT_S,
    EARN_S,
    LOOK_BYTES,
    MAX_FAMILIES,
    MAX_FINDINGS,
    MAX_SAMPLES,
    Lint,
)
from headrace.gateway.prompt import Prompt, PromptReader
from headrace.gateway.sse import Usage
from tests.unit.lint_prompts import STAYS, Body, an_id, chat, words

READER = PromptReader(False)


def prompt_of(body: Body, path: str = "/v1/chat/completions", **how: Any) -> Prompt:
    return READER.read(path, json.dumps(body, **how).encode(), {})


def look(
    make: Callable[[int], Body],
    count: int = 12,
    *,
    cached: int = -1,
    excerpts: bool = False,
    **how: Any,
) -> dict[str, Any]:
    """What lint says of one tenant after so many requests."""
    lint = Lint(2**24, excerpts=excerpts, found=lambda *_: None, clock=lambda: 0.0)
    for i in range(count):
        prompt = prompt_of(make(i), **how)
        if lint.see("anna", prompt):
            lint.look("anna", f"r{i}", prompt, Usage(cached_tokens=cached))
    (row,) = lint.tell()["tenants"]
    return dict(row)


# ------------------------------------------------------------ what it finds


def tools(order: Sequence[int]) -> list[Body]:
    return [
        {
            "type": "function",
            "function": {
                "name": f"tool_{i}",
                "description": words(200, 50 + i),
                "parameters": {"type": "object", "properties": {"x": {"type": "string"}}},
            },
        }
        for i in order
    ]


def shuffled(seed: int) -> list[int]:
    order = list(range(8))
    random.Random(seed).shuffle(order)
    return order


def history(first: int, count: int) -> list[Body]:
    roles = ("user", "assistant")
    return [
        {"role": roles[i % 2], "content": words(300, 1000 + i)} for i in range(first, first + count)
    ]


def responses(i: int) -> Body:
    return {
        "model": "m",
        "instructions": f"It is {i % 24:02}:{i:02}. {STAYS}",
        "input": "What now?",
    }


CASES: dict[str, tuple[Callable[[int], Body], str, str, int | None]] = {
    "a timestamp": (
        lambda i: chat(f"Now: 2026-11-28T16:{i:02}:00Z. {STAYS}"),
        "time",
        "messages[0].content",
        None,
    ),
    "a date in words": (
        lambda i: chat(f"Today is November {i + 1}, 2026. {STAYS}"),
        "time",
        "messages[0].content",
        None,
    ),
    "seconds since 1970": (
        lambda i: chat(f"At {1795883317 + 37 * i}\n{STAYS}"),
        "time",
        "messages[0].content",
        None,
    ),
    "an id": (lambda i: chat(f"Session {an_id(i)}\n{STAYS}"), "id", "messages[0].content", 8),
    "a user's number": (
        lambda i: chat(f"User {7000 + i} asks.\n{STAYS}"),
        "id",
        "messages[0].content",
        None,
    ),
    "shuffled tools": (
        lambda i: chat("Be brief.", tools=tools(shuffled(i))),
        "order",
        "tools[0].function.name",
        5,
    ),
    "the question before the manual": (
        lambda i: chat(f"{words(200, 70 + i)}\nUse this manual.\n{STAYS}"),
        "text",
        "messages[0].content",
        None,
    ),
    "a window over the conversation": (
        lambda i: {"model": "m", "messages": [*chat("Be brief.")["messages"][:1], *history(i, 12)]},
        "dropped",
        "messages[1].role",
        0,
    ),
    "text without sentences": (
        lambda i: chat(f"時刻 16:{i:02} " + "あなたは親切です" * 200),
        "time",
        "messages[0].content",
        None,
    ),
    "in the system field": (
        lambda i: {
            "model": "m",
            "system": [{"type": "text", "text": f"id {an_id(i)} {STAYS}"}],
            "messages": [],
        },
        "id",
        "system[0].text",
        3,
    ),
    "in instructions": (responses, "time", "instructions", None),
    "a plain prompt": (
        lambda i: {"model": "m", "prompt": f"[{an_id(i)}] {STAYS}"},
        "id",
        "prompt",
        1,
    ),
}


@pytest.mark.parametrize("how", [{}, {"ensure_ascii": False, "separators": (",", ":")}])
@pytest.mark.parametrize("name", sorted(CASES))
def test_what_breaks_a_prefix_is_named_with_its_place(name: str, how: dict[str, Any]) -> None:
    make, kind, path, characters = CASES[name]
    row = look(make, **how)
    found = max(row["findings"], key=lambda one: one["lost_tokens"])
    assert found["kind"] == kind
    assert found["place"].replace("*", "1") == path
    if characters is not None and path == found["path"]:
        assert characters <= found["characters"] <= characters + 4  # some are alike by chance
    most = row["prompt_tokens"] * (row["looked"] - 1) / row["looked"]
    assert 0.5 * most < row["lost_tokens"] <= most
    assert not found["excerpt"]
    assert not found["other"]


def test_something_put_in_front_once() -> None:
    row = look(lambda i: chat(STAYS if i != 3 else f"A new rule for all of you.\n{STAYS}"), 4)
    (found,) = row["findings"]
    assert (found["kind"], found["seen"], found["request"]) == ("added", 1, "r3")


def test_the_excerpt_is_there_where_it_is_allowed() -> None:
    row = look(CASES["a timestamp"][0], excerpts=True)
    (found,) = row["findings"]
    assert "2026-11-28T16:11:00Z" in found["excerpt"]
    assert "2026-11-28T16:10:00Z" in found["other"]
    assert len(found["excerpt"]) <= 72


GOOD: dict[str, Callable[[int], Body]] = {
    "the same beginning": lambda i: chat(STAYS, words(900, 100 + i)),
    "a conversation that grows": lambda i: {"model": "m", "messages": history(0, 5 + i)},
    "nothing in common": lambda i: chat(words(3000, 500 + i)),
    "two variants by turns": lambda i: chat(f"Variant {i % 2}.\n{STAYS}", words(90, i)),
    "the same again": lambda i: chat(STAYS),
    "a shorter one in between": lambda i: chat(STAYS, words(900 if i % 2 else 2000, 7)),
    "a little at the end": lambda i: chat(
        f"{STAYS} Question {i}: {words(600, i)}\nAnswer in JSON."
    ),
}


@pytest.mark.parametrize("name", sorted(GOOD))
def test_prompts_that_share_what_they_can_are_left_alone(name: str) -> None:
    make = GOOD[name]
    row = look(lambda i: make(i), 12)
    first_of_variants = 1 if name == "two variants by turns" else 0
    assert sum(one["seen"] for one in row["findings"]) <= first_of_variants
    assert row["looked"] == 12


def test_what_the_engine_found_is_no_loss() -> None:
    make = CASES["a timestamp"][0]
    assert look(make, cached=10**6)["lost_tokens"] == 0
    whole, some = look(make)["lost_tokens"], look(make, cached=400)["lost_tokens"]
    assert 0 < some < whole


def drawn(count: int, seed: int) -> list[int]:
    """Token ids that no other seed has in this order."""
    return random.Random(seed).choices(range(30_000), k=count)


def of_ids(*parts: list[int], several: bool = False) -> Body:
    ids = [i for part in parts for i in part]
    return {"model": "m", "prompt": [ids, drawn(9, 5)] if several else ids}


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("how", [{}, {"separators": (",", ":")}])
def test_prompts_of_ids_part_at_an_index(how: dict[str, Any], several: bool) -> None:
    """Without a kind: an id says nothing of a text, a long number is no session's."""
    first, stays = drawn(20, 1), drawn(1500, 2)
    row = look(lambda i: of_ids(first, drawn(3, 50 + i), stays, several=several), **how)
    (found,) = row["findings"]
    assert (found["kind"], found["path"]) == ("text", "prompt[0][20]" if several else "prompt[20]")
    if not several:  # nobody counted the tokens of those
        assert found["shared_tokens"] == pytest.approx(20, abs=2)
    most = row["prompt_tokens"] * (row["looked"] - 1) / row["looked"]
    assert 0.8 * most < row["lost_tokens"] <= most


def test_stretches_of_ids_that_moved() -> None:
    parts = [[10_000 + 2 * i, 20_000 + 2 * i, *drawn(150, 10 + i), 7] for i in range(8)]
    row = look(lambda i: of_ids(*(parts[n] for n in shuffled(i)), drawn(9, 60 + i)))
    assert {found["kind"] for found in row["findings"]} == {"order"}
    assert row["lost_tokens"] > 0.5 * row["prompt_tokens"]


def test_prompts_of_ids_that_share_what_they_can_are_left_alone() -> None:
    stays = drawn(1500, 2)
    for make in (
        lambda i: of_ids(stays, drawn(300, 100 + i)),
        lambda i: of_ids(stays, *(drawn(200, n) for n in range(i))),
        lambda i: of_ids(drawn(1500, 500 + i)),
    ):
        row = look(make)
        assert (row["looked"], row["findings"]) == (12, [])


def test_short_prompts_are_not_looked_at() -> None:
    assert look(lambda i: of_ids([i, *drawn(150, 1)]))["looked"] == 0
    assert look(lambda i: chat(f"It is 12:{i:02}"))["looked"] == 0


# ------------------------------------------------------------ bounds

MAX_BYTES = 60_000


class Bounded(RuleBasedStateMachine):
    """Whatever tenants send, what is kept stays within its bounds, and nothing raises."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.told: list[tuple[str, int, str, int]] = []
        self.lint = Lint(
            MAX_BYTES,
            excerpts=True,
            found=lambda *said: self.told.append(said),
            clock=lambda: self.now_s,
        )

    @rule(
        tenant=st.sampled_from(["a", "b", "c"]),
        model=st.sampled_from(["m", "n"]),
        family=st.integers(0, 12),
        change=st.integers(0, 3),
        size=st.sampled_from([900, 3000, 60_000]),
        at=st.sampled_from(["front", "middle", "nowhere"]),
        cached=st.sampled_from([-1, 0, 500, 10**7]),
    )
    def ask(
        self, tenant: str, model: str, family: int, change: int, size: int, at: str, cached: int
    ) -> None:
        stays = words(size, family)
        moved = {"front": f"{change}:00 {stays}", "nowhere": stays}
        text = moved.get(at, f"{stays[: size // 2]} {an_id(change)}\n{stays[size // 2 :]}")
        prompt = prompt_of({**chat(text), "model": model})
        if self.lint.see(tenant, prompt):
            self.lint.look(tenant, "id", prompt, Usage(cached_tokens=cached))

    @rule(parts=st.lists(st.binary(max_size=3000), min_size=6, max_size=6))
    def ask_anything(self, parts: list[bytes]) -> None:
        prompt = prompt_of(chat(STAYS))
        prompt.parts = tuple(msgspec.Raw(part * 3) for part in parts)
        prompt.text_bytes = max(1, sum(map(len, prompt.parts)))
        if self.lint.see("d", prompt):
            self.lint.look("d", "id", prompt, Usage())

    @invariant()
    def within_bounds(self) -> None:
        families = list(self.lint._families)
        assert self.lint.used_bytes == sum(one.memory_bytes for one in families) <= MAX_BYTES
        for name, tenant in self.lint._tenants.items():
            assert len(tenant.families) <= MAX_FAMILIES
            assert len(tenant.findings) <= MAX_FINDINGS
            assert all(one.tenant is tenant for one in tenant.families)
            assert all(len(one.samples) <= MAX_SAMPLES for one in tenant.families)
            assert all(s.size_bytes <= LOOK_BYTES for one in tenant.families for s in one.samples)
            mine = [said for said in self.told if said[0] == name]
            assert tenant.looked == len(mine) <= tenant.requests
            assert tenant.prompt_tokens == sum(said[1] for said in mine)
            assert tenant.lost_tokens == sum(said[3] for said in mine) <= tenant.prompt_tokens
            assert sum(one.lost_tokens for one in tenant.findings.values()) <= tenant.lost_tokens
        assert len(families) == sum(len(t.families) for t in self.lint._tenants.values())
        self.lint.tell()


Bounded.TestCase.settings = settings(max_examples=15, stateful_step_count=25, deadline=None)
TestBounded = Bounded.TestCase


def test_time_is_paid_for_by_requests() -> None:
    """Looks that take a millisecond: what CREDIT_S holds, then what requests earn."""
    now_s = [0.0]

    def clock() -> float:
        now_s[0] += 0.0005
        return now_s[0]

    lint = Lint(2**24, excerpts=False, found=lambda *_: None, clock=clock)
    prompt = prompt_of(chat(STAYS))
    looks = []
    for i in range(4000):
        if lint.see("anna", prompt):
            looks.append(i)
            lint.look("anna", "id", prompt, Usage())
    took_s = 0.0005 * len(looks)
    assert took_s <= CREDIT_S + 4000 * EARN_S + 0.0005
    assert len(looks) > CREDIT_S / 0.0005, "and what is earned is spent"
    assert looks[-1] > 3000
    assert lint.see("bert", prompt), "another tenant has its own"


def test_a_text_of_nothing_but_ends_is_bounded() -> None:
    row = look(lambda i: {"model": "m", "prompt": f"{i % 3}{'.' * LOOK_BYTES}{'{' * 9000}"}, 9)
    assert row["looked"] == 9
    parts = cut(b"." * LOOK_BYTES)
    assert len(parts.segments) == MAX_SEGMENTS
    assert sum(map(len, parts.segments)) + MAX_SEGMENTS - 1 == LOOK_BYTES


def test_memory_is_what_it_says() -> None:
    lint = Lint(2**20, excerpts=False, found=lambda *_: None, clock=lambda: 0.0)
    prompts = [
        prompt_of(chat("".join(f"{i} {j}. " for j in range(3000)), words(500, i)))
        for i in range(30)
    ]
    tracemalloc.start()
    try:
        for i, prompt in enumerate(prompts):
            assert lint.see(f"t{i}", prompt)
            lint.look(f"t{i}", "id", prompt, Usage())
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert lint.used_bytes <= 2**20
    assert taken <= lint.used_bytes + 100_000  # counts of 30 tenants
